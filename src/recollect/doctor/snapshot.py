"""`Snapshot`: a pickle or JSON file from `torch.cuda.memory._snapshot()`, and the findings in it. Imports no torch.

The format is that of `torch/cuda/_memory_viz.py` in PyTorch 2.13: `segments` with their blocks, and `device_traces`, the
events in order. Its memory profiler writes the same, without the allocator's gaps. Unpickling runs code of the file's choosing,
so only plain containers, numbers and texts are read.
"""

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from recollect.byte_format import format_bytes
from recollect.doctor.rule import RULES, Finding
from recollect.errors import DiagnosisError

# The largest that are read: a snapshot of 100,000 events with stacks has about 200 MB.
MAX_BYTES = 2 * 2**30

_PROFILED = re.compile(r"(.+)\((\d+)\): (.+)$")
_GAPS_MATTER = 0.15  # of the reserved bytes
_SHARE_MATTERS = 0.3  # of the peak, but for these:
_OTHER_SHARES = {"snapshot-logits": 0.2, "snapshot-without-stacks": 0.5}
# A stack may match several; the first counts.
_PLACES = tuple(RULES[f"snapshot-{name}"] for name in ("optimizer", "logits", "recompute"))
_BACKWARD = re.compile(r"run_backward|:backward$")
_FORWARD = re.compile(r":(?:forward|forward_with_checkpointing)$")
_OWN = re.compile(r"^none:|(?:^|/)torch/|\?\?:|\.cpp:|\.h:")


@dataclass(frozen=True, slots=True)
class Block:
    """A live piece of memory."""

    size_bytes: int
    """As requested."""
    stack: tuple[str, ...]
    """Where it was allocated, innermost first, as "file:line:function"; () if not recorded."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot of one device."""

    place: str
    reserved_bytes: int
    """Bytes that PyTorch holds on the device."""
    free_blocks_bytes: tuple[int, ...]
    """The sizes of the pieces in no tensor, largest first."""
    peak: tuple[Block, ...]
    """Blocks allocated at the highest point of the recorded events; if there are none, at the end."""
    refused_bytes: int | None = None
    """The last allocation that failed, in bytes; None if none did."""
    device_free_bytes: int | None = None
    """Bytes that were free on the device then; None if unknown."""
    is_expandable: bool | None = None
    """Whether segments can grow; None if unknown."""

    @property
    def peak_bytes(self) -> int:
        return sum(block.size_bytes for block in self.peak)

    @property
    def unallocated_bytes(self) -> int:
        return sum(self.free_blocks_bytes)


class _PlainUnpickler(pickle.Unpickler):
    """Builds containers, numbers and texts; refuses anything that needs a class or function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it needs {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside the file")


def read_pickle(path: Path) -> Any:
    """Read plain data: dictionaries, lists, tuples, numbers, texts, None."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise DiagnosisError(
            f"{path}: got a snapshot of {size} bytes, expected at most {MAX_BYTES}. Record fewer events: "
            "torch.cuda.memory._record_memory_history(max_entries=100_000)."
        )
    try:
        with path.open("rb") as file:
            return _PlainUnpickler(file).load()
    # A malformed pickle may raise almost anything (IndexError, AttributeError, MemoryError, ...).
    except Exception as problem:
        raise DiagnosisError(
            f"{path}: got a pickle that cannot be read safely ({problem}), expected the plain data of "
            "torch.cuda.memory._dump_snapshot(path). A pickle can run code, so nothing else is unpickled; "
            "where you trust it, write it again as JSON."
        ) from None


def is_snapshot(data: object) -> bool:
    return isinstance(data, Mapping) and isinstance(data.get("segments"), Sequence)


def snapshot_of(data: Mapping[str, Any], place: str) -> list[Snapshot]:
    try:
        devices: dict[int, list[Mapping[str, Any]]] = {}
        for segment in data["segments"]:
            devices.setdefault(int(segment.get("device", 0)), []).append(segment)
        traces = data.get("device_traces") or []
        many = len(devices) > 1
        return [
            _of_device(segments, traces[i] if i < len(traces) else [], f"{place} (device {i})" if many else place)
            for i, segments in sorted(devices.items())
        ]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as problem:
        raise DiagnosisError(
            f"{place}: got a snapshot of an unknown form ({type(problem).__name__}: {problem}), expected segments with blocks, "
            "as torch.cuda.memory._snapshot() of PyTorch 2.0 to 2.13 writes them."
        ) from None


def _of_device(segments: Sequence[Mapping[str, Any]], trace: Sequence[Mapping[str, Any]], place: str) -> Snapshot:
    live: dict[int, Block] = {}
    free: list[int] = []
    # A profiler's segment, which has no such size, is all addresses between two tensors.
    reserved_bytes = sum(int(segment["total_size"]) for segment in segments if "allocated_size" in segment)
    for segment in segments:
        address = int(segment.get("address", 0))
        for block in segment["blocks"]:
            start = int(block.get("address", address))
            address = start + int(block["size"])
            if str(block["state"]).startswith("active"):
                live[start] = Block(int(block.get("requested_size", block["size"])), _stack(block))
            elif "allocated_size" in segment:
                free.append(int(block["size"]))
    refused = next((event for event in reversed(trace) if event.get("action") == "oom"), None)
    expandable = [bool(segment["is_expandable"]) for segment in segments if "is_expandable" in segment]
    return Snapshot(
        place,
        reserved_bytes,
        tuple(sorted(free, reverse=True)),
        _peak(live, trace),
        None if refused is None else int(refused["size"]),
        None if refused is None or "device_free" not in refused else int(refused["device_free"]),
        any(expandable) if expandable else None,
    )


def _stack(record: Mapping[str, Any]) -> tuple[str, ...]:
    frames = record.get("frames")
    if frames is None:  # PyTorch 2.0
        frames = [frame for entry in record.get("history") or [] for frame in entry.get("frames") or []]
    return tuple(map(_frame, frames))


def _frame(frame: Mapping[str, Any]) -> str:
    """Return a frame as "file:line:function"; a profiler writes all three as the name."""
    if frame["filename"] == "none" and (found := _PROFILED.match(frame["name"])):
        return f"{found[1]}:{found[2]}:{found[3]}"
    return f"{frame['filename']}:{frame['line']}:{frame['name']}"


def _peak(live: Mapping[int, Block], trace: Sequence[Mapping[str, Any]]) -> tuple[Block, ...]:
    """Return the blocks that were live at the highest point, walking back through the events from the end."""
    now = highest = sum(block.size_bytes for block in live.values())
    at = len(trace)
    for i, event in reversed(list(enumerate(trace))):
        now -= _growth(event)
        if now > highest:
            highest, at = now, i
    alive = dict(live)
    for event in reversed(trace[at:]):
        address = int(event.get("addr", -1))
        if event["action"] == "alloc":
            alive.pop(address, None)
        elif event["action"] == "free_completed":
            alive[address] = Block(int(event["size"]), ())
    return tuple(_with_stacks(alive, trace[:at]))


def _growth(event: Mapping[str, Any]) -> int:
    sign = {"alloc": 1, "free_completed": -1}.get(event.get("action", ""), 0)
    return sign * int(event["size"]) if sign else 0


def _with_stacks(alive: Mapping[int, Block], trace: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    """Yield the blocks with the stacks of the last events that allocated them, where they have none."""
    missing = {address for address, block in alive.items() if not block.stack}
    stacks: dict[int, tuple[str, ...]] = {}
    for event in reversed(trace):
        if not missing:
            break
        address = int(event.get("addr", -1))
        if event.get("action") == "alloc" and address in missing:
            stacks[address] = _stack(event)
            missing.discard(address)
    for address, block in alive.items():
        yield Block(block.size_bytes, block.stack or stacks.get(address, ()))


def snapshot_findings(snapshot: Snapshot) -> Iterator[Finding]:
    if (gaps := _gaps(snapshot)) is not None:
        yield gaps
    total = snapshot.peak_bytes
    if not total:
        return
    groups: dict[str, list[Block]] = {}
    for block in snapshot.peak:
        if (name := _kind(block.stack)) is not None:
            groups.setdefault(name, []).append(block)
    sizes = {name: sum(block.size_bytes for block in blocks) for name, blocks in groups.items()}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size < _OTHER_SHARES.get(name, _SHARE_MATTERS) * total:
            continue
        largest = max(groups[name], key=lambda block: block.size_bytes)
        where = _caller(largest) or "no stack"
        yield RULES[name].finding(
            f"{snapshot.place}: {format_bytes(size)} in {len(groups[name])} blocks; the largest, "
            f"{format_bytes(largest.size_bytes)}, from {where}",
            size=format_bytes(size),
            peak=format_bytes(total),
            share=f"{size / total:.0%}",
            largest=f"{format_bytes(largest.size_bytes)} from {where}",
        )


def _gaps(snapshot: Snapshot) -> Finding | None:
    if not snapshot.free_blocks_bytes or not snapshot.reserved_bytes:
        return None
    refused = snapshot.refused_bytes
    would_fit = refused is not None and refused <= snapshot.unallocated_bytes + (snapshot.device_free_bytes or 0)
    if not would_fit and (refused is not None or snapshot.unallocated_bytes < _GAPS_MATTER * snapshot.reserved_bytes):
        return None
    largest = snapshot.free_blocks_bytes[0]
    text = format_bytes(refused or 0)
    told = f"; {text} were refused" if refused is not None else ""
    grow = {True: "expandable segments are on", False: "expandable segments are off", None: "segments of unknown kind"}
    return RULES["snapshot-fragmented"].finding(
        f"{snapshot.place}: reserved {format_bytes(snapshot.reserved_bytes)}, in no tensor "
        f"{format_bytes(snapshot.unallocated_bytes)}{told}; {grow[snapshot.is_expandable]}",
        certainty="likely" if would_fit else "possible",
        unallocated=format_bytes(snapshot.unallocated_bytes),
        reserved=format_bytes(snapshot.reserved_bytes),
        count=len(snapshot.free_blocks_bytes),
        largest=format_bytes(largest),
        refused=f". {text} were refused, which the gaps together would have held" if would_fit else "",
    )


@lru_cache(maxsize=4096)  # a training step allocates from few places again and again
def _kind(stack: tuple[str, ...]) -> str | None:
    if not stack:
        return "snapshot-without-stacks"
    for rule in _PLACES:
        if any(map(rule.is_frame, stack)):
            return rule.name
    is_backward = any(_BACKWARD.search(frame) for frame in stack)
    return "snapshot-activations" if not is_backward and any(_FORWARD.search(frame) for frame in stack) else None


def _caller(block: Block) -> str:
    """Return the innermost frame outside PyTorch."""
    return next((frame for frame in block.stack if not _OWN.search(frame)), block.stack[0] if block.stack else "")
