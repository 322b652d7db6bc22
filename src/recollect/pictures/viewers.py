"""Write a step's memory for other viewers: a trace for Perfetto, and a snapshot for PyTorch's memory viewer.

Both hold the result of `recollect.timeline`, moment by moment: every value, by its name and its unit, from its creation to
its release; a recomputed value appears twice. Nothing is simulated again.
"""

import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recollect.arguments import check_kind
from recollect.byte_format import format_bytes
from recollect.fields import writing
from recollect.pictures.curves import positions, spans
from recollect.pictures.words import describe_profile
from recollect.plans.text import label_paths
from recollect.simulation.lifetimes import Lifetime
from recollect.simulation.storage_names import StorageNames
from recollect.simulation.timeline import PHASES, Timeline, before_the_step
from recollect.slots import SlotList

_MICROSECOND = (1e-6, "us")
# Process 1 of a trace is the step; units are the next ones, and storages outside units the last.
_STEP = 1
_PHASES, _UNITS, _RECOMPUTE = 1, 2, 1
_OUTSIDE = "outside of the units"
_WORKING = "working memory"
# The newest that the viewer reads, whatever Python writes by default.
_PROTOCOL = 4
_FIRST_ADDRESS = 1 << 40
_Event = dict[str, Any]


def write_trace(over_time: Timeline, out: str | Path) -> Path:
    """Write a trace for Perfetto (ui.perfetto.dev) or chrome://tracing, which both read Chrome's trace format.

    The step is one process, with its phases, the units that run and the bytes alive by category. Each unit is a separate one,
    with the ops that it runs again, and a track for each of its values.

    Args:
        over_time: the result of `recollect.timeline`.
        out: the file, such as "step.json".

    Returns:
        The file.

    Raises:
        ArgumentError: it is not a timeline.
        RecollectError: the file cannot be written.

    Example:
        >>> import json, tempfile, torch, recollect
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> profile = recollect.record(net, torch.zeros(4, 8), loss_fn=torch.sum, fake=True)
        >>> plan = recollect.classic_plan(profile, "full")
        >>> path = recollect.write_trace(recollect.timeline(profile, plan), f"{tempfile.mkdtemp()}/step.json")
        >>> sorted({event["ph"] for event in json.loads(path.read_text())["traceEvents"]})
        ['C', 'M', 'X', 'b', 'e']
    """
    check_kind("write_trace(over_time, out)", "over_time", over_time, Timeline, "a recollect.Timeline")
    at, axis = positions(over_time, _MICROSECOND)
    trace = _Trace(over_time, at.tolist())
    document = {
        "traceEvents": [*trace.names(), *trace.step(), *trace.counters(), *trace.units()],
        "displayTimeUnit": "ms",
        "otherData": {"step": describe_profile(over_time.profile), "plan": str(over_time.plan), "time": axis},
    }
    with writing(out):
        Path(out).write_text(json.dumps(document, separators=(",", ":"), allow_nan=False), encoding="utf-8")
    return Path(out)


class _Trace:
    """The events of a trace, with times in microseconds."""

    def __init__(self, over_time: Timeline, at: list[float]) -> None:
        self._found = over_time
        self._at = at
        self._names = StorageNames(over_time.profile, over_time.lives)
        units = [path or "the model" for path in dict.fromkeys(over_time.paths)]
        self._process = {path: number for number, path in enumerate([*units, _OUTSIDE], start=_STEP + 1)}

    def _process_of(self, call: int) -> int:
        return self._process[self._found.paths[call] or "the model" if call >= 0 else _OUTSIDE]

    def names(self) -> Iterator[_Event]:
        step = f"step of {self._found.profile.model_class or 'a model'}"
        shown = {label_paths([path], self._names.classes): process for path, process in self._process.items()}
        for name, process in {step: _STEP, **shown}.items():
            yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
            yield {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}
            threads = {"phases": _PHASES, "units": _UNITS} if process == _STEP else {"runs again": _RECOMPUTE}
            for thread, number in threads.items():
                yield {"ph": "M", "pid": process, "tid": number, "name": "thread_name", "args": {"name": thread}}

    def step(self) -> Iterator[_Event]:
        phases = [PHASES[phase] for phase in self._found.phases.tolist()]
        paths = [self._found.paths[call] or "the model" if call >= 0 else "" for call in self._found.calls.tolist()]
        for thread, names in ((_PHASES, phases), (_UNITS, paths)):
            for span in spans(self._at, names):
                if span.name:
                    yield self._slice(span.name, _STEP, thread, span.start, span.end)

    def _slice(self, name: str, process: int, thread: int, start: float, end: float) -> _Event:
        return {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": start, "dur": end - start}

    def counters(self) -> Iterator[_Event]:
        """Emit the bytes alive, wherever they change: in total, and by category."""
        every = {"all": self._found.total_bytes, **self._found.bytes_of, "in host memory": self._found.host_bytes}
        for name, alive in every.items():
            changes = np.flatnonzero(np.diff(alive, prepend=-1)) if alive.any() else ()
            for moment in map(int, changes):
                yield {
                    "ph": "C", "name": f"bytes alive: {name}", "pid": _STEP, "ts": self._at[moment],
                    "args": {"bytes": int(alive[moment])},
                }  # fmt: skip

    def units(self) -> Iterator[_Event]:
        """Say which ops each unit runs again, and when each of its values lives."""
        lives = self._found.lives
        for call, op, moment in lives.reruns:
            # The clock moves on with the op.
            later = int(np.searchsorted(self._at, self._at[moment], side="right"))
            end = self._at[min(later, len(self._at) - 1)]
            yield self._slice(op.name, self._process_of(call), _RECOMPUTE, self._at[moment], end)
        for number, (storage, category) in enumerate(zip(lives.storages, self._found.categories, strict=True)):
            if not storage.nbytes:
                continue
            name = self._names.of(storage, category)
            args = {"bytes": storage.nbytes, "size": format_bytes(storage.nbytes), "what": name}
            # A track for each name: all workspaces share one.
            event = {
                "name": _WORKING if storage.op is not None else name, "cat": category, "id": number,
                "pid": self._process_of(storage.owner[0]), "tid": 0,
            }  # fmt: skip
            yield {"ph": "b", **event, "ts": self._at[storage.born], "args": args}
            yield {"ph": "e", **event, "ts": self._at[storage.died]}


def write_snapshot(over_time: Timeline, out: str | Path) -> Path:
    """Write a snapshot for PyTorch's memory viewer (pytorch.org/memory_viz) and the functions of `torch.cuda._memory_viz`.

    In place of a stack, each value has its unit with the number and the name of the op, and below that where it was
    made and its category. Addresses assume a first-fit allocator: they say nothing about fragmentation.

    Args:
        over_time: the result of `recollect.timeline`.
        out: the file, such as "step.pickle".

    Returns:
        The file.

    Raises:
        ArgumentError: it is not a timeline.
        RecollectError: the file cannot be written.

    Example:
        >>> import pickle, tempfile, torch, recollect
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> profile = recollect.record(net, torch.zeros(4, 8), loss_fn=torch.sum, fake=True)
        >>> over_time = recollect.timeline(profile, recollect.plan(profile, "100%"))
        >>> path = recollect.write_snapshot(over_time, f"{tempfile.mkdtemp()}/step.pickle")
        >>> pickle.loads(path.read_bytes())["device_traces"][0][0]["frames"][0]["filename"]
        'before the step'
    """
    check_kind("write_snapshot(over_time, out)", "over_time", over_time, Timeline, "a recollect.Timeline")
    snapshot = _snapshot(over_time)
    with writing(out):
        Path(out).write_bytes(pickle.dumps(snapshot, protocol=_PROTOCOL))
    return Path(out)


def _snapshot(over_time: Timeline) -> dict[str, Any]:
    at, _ = positions(over_time, _MICROSECOND)
    lives, names = over_time.lives, StorageNames(over_time.profile, over_time.lives)
    room, events = SlotList(alignment=1), list[_Event]()
    # The blocks that are still alive, by address.
    alive: dict[int, _Event] = {}

    def allocate(nbytes: int, category: str, frames: list[_Event], time_us: float) -> _Event:
        address = _FIRST_ADDRESS + (room.take(nbytes) or 0)
        block = {"address": address, "size": nbytes, "requested_size": nbytes, "frames": frames}
        alive[address] = {**block, "state": "active_allocated"}
        made = {"action": "alloc", "addr": address, "size": nbytes, "stream": 0, "frames": frames}
        made["time_us"] = int(time_us)
        events.append({**made, "category": category})
        return made

    for item in before_the_step(over_time.profile):
        if item.nbytes > 0:
            allocate(item.nbytes, item.category, [_frame("before the step", 0, item.name)], 0.0)
    storages = [(number, storage) for number, storage in enumerate(lives.storages) if storage.nbytes]
    changes = [(storage.born, True, number) for number, storage in storages]
    changes += [(storage.died, False, number) for number, storage in storages if storage.died >= 0]
    made_of: dict[int, _Event] = {}
    for moment, is_new, number in sorted(changes):
        storage, category = lives.storages[number], over_time.categories[number]
        if is_new:
            frames = _frames(over_time, storage, category, names)
            made_of[number] = allocate(storage.nbytes, category, frames, at[moment])
            continue
        made = {**made_of.pop(number), "time_us": int(at[moment])}
        room.give_back(made["addr"] - _FIRST_ADDRESS)
        del alive[made["addr"]]
        events += [{**made, "action": action} for action in ("free_requested", "free_completed")]
    # The viewer requires this category if there are any.
    end = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": int(at[-1]), "category": "unknown"}
    events.append({**end, "frames": [_frame("end of the step", 0, "as recollect predicts it")]})
    return {"segments": [_segment(room.end_bytes, alive)], "device_traces": [events]}


def _frames(over_time: Timeline, storage: Lifetime, category: str, names: StorageNames) -> list[_Event]:
    """Return the replacement for a stack: the unit with the op and the value, and where in the step it was made."""
    call, value = storage.owner
    unit, number = "outside of the units", 0
    if call >= 0:
        unit = label_paths([over_time.paths[call] or "the model"], names.classes)
        values = over_time.profile.graph_of(over_time.profile.calls[call]).values
        producer = values[value].producer if value >= 0 else None
        number = 0 if producer is None else producer + 1
    made_in = _frame(over_time.where(storage.born), storage.born, category)
    return [_frame(unit, number, names.of(storage, category)), made_in]


def _frame(place: str, line: int, name: str) -> _Event:
    return {"filename": place, "line": line, "name": name}


def _segment(total_bytes: int, alive: Mapping[int, _Event]) -> _Event:
    """Return the single segment that contains all addresses, in its final state."""
    blocks = list[_Event]()
    end = _FIRST_ADDRESS
    of_blocks = sorted((address, block["size"]) for address, block in alive.items())
    for address, nbytes in [*of_blocks, (_FIRST_ADDRESS + total_bytes, 0)]:
        if address > end:
            gap = address - end
            blocks.append({"address": end, "size": gap, "requested_size": 0, "state": "inactive", "frames": []})
        if nbytes:
            blocks.append(alive[address])
        end = address + nbytes
    alive_bytes = sum(block["size"] for block in alive.values())
    return {
        "device": 0, "address": _FIRST_ADDRESS, "total_size": total_bytes, "allocated_size": alive_bytes,
        "active_size": alive_bytes, "requested_size": alive_bytes, "stream": 0, "segment_type": "large",
        "is_expandable": False, "frames": [], "blocks": blocks,
    }  # fmt: skip
