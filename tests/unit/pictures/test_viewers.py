"""What is written for other viewers: their own parsers read it, and it adds up to the prediction, to the byte."""

import json
import pickle
import pickletools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

import recollect
from recollect.errors import ArgumentError, RecollectError
from recollect.profile.profile import Profile
from recollect.simulation.timeline import CATEGORIES, Timeline

# What MemoryViz.js, the viewer of pytorch.org/memory_viz, can unpickle.
READ_BY_THE_VIEWER = frozenset(
    """
    APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT EMPTY_LIST EMPTY_TUPLE FRAME LIST
    LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE SETITEM SETITEMS SHORT_BINUNICODE STOP TUPLE TUPLE1
    TUPLE2 TUPLE3
    """.split()
)
# Of Chrome's trace format: what each kind of event has to have.
NEEDED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "ts", "args"},
    "b": {"name", "cat", "id", "pid", "tid", "ts", "args"},
    "e": {"name", "cat", "id", "pid", "tid", "ts"},
}


@pytest.fixture(scope="module")
def over_time() -> Timeline:
    layers = [nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8)) for _ in range(3)]
    net = nn.Sequential(nn.Linear(8, 8), *layers)
    optimizer = torch.optim.AdamW(net.parameters())
    profile = recollect.record(net, torch.zeros(256, 8), loss_fn=torch.sum, optimizer=optimizer, fake=True)
    return recollect.timeline(profile, recollect.plan(profile, "70%"))


@pytest.fixture(scope="module")
def snapshot(over_time: Timeline, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("snapshot") / "step.pickle"
    recollect.write_snapshot(over_time, path)
    (protocol, *others) = pickletools.genops(path.read_bytes())
    assert 2 <= (protocol[1] or 0) <= 4 and {opcode.name for opcode, _, _ in others} <= READ_BY_THE_VIEWER
    return pickle.loads(path.read_bytes())


@pytest.fixture(scope="module")
def events(over_time: Timeline, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("trace") / "step.json"
    recollect.write_trace(over_time, path)
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def test_torch_reads_the_snapshot(over_time: Timeline, snapshot: Any) -> None:
    assert "total_allocated:" in _memory_viz.segsum(snapshot)
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "MemoryViz.js" in plot(snapshot)
    assert _memory_viz.trace(snapshot).startswith("Device 0")
    names: list[str] = []
    _memory_viz.memory(snapshot, format_flamegraph=lambda text: names.append(text) or "")
    assert "before the step:0:optimizer state" in names[0]


def test_the_snapshot_has_the_bytes_of_the_prediction(over_time: Timeline, snapshot: Any) -> None:
    (trace,) = snapshot["device_traces"]
    alive: dict[int, int] = {}
    peak, ends = 0, dict[int, int]()
    for event in trace:
        if event["action"] == "alloc":
            start, end = event["addr"], event["addr"] + event["size"]
            assert not any(start < other + size and other < end for other, size in alive.items())
            alive[start] = event["size"]
        elif event["action"] == "free_completed":
            assert alive.pop(event["addr"]) == event["size"]
        peak = max(peak, sum(alive.values()))
        ends[event["time_us"]] = sum(alive.values())
    assert peak == over_time.report.peak_bytes
    (segment,) = snapshot["segments"]
    assert {b["address"]: b["size"] for b in segment["blocks"] if b["state"] == "active_allocated"} == alive
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"] >= peak
    categories = Counter(event["category"] for event in trace if "category" in event)
    # The viewer's code fails without the last.
    assert set(categories) <= {*CATEGORIES, "unknown"} and categories["unknown"] == 1


def test_the_snapshot_names_values_by_unit(snapshot: Any) -> None:
    stacks = [event["frames"] for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
    named = {(frames[0]["filename"], frames[0]["name"], frames[-1]["name"]) for frames in stacks}
    assert ("1 (Sequential)", "2.bernoulli_ (Dropout)", "kept values") in named
    assert ("before the step", "parameters", "parameters") in named
    assert any(unit == "2 (Sequential)" and what == "recomputed values" for unit, _, what in named)
    line = next(frames[0]["line"] for frames in stacks if frames[0]["name"] == "1 (GELU)")
    assert line == 2  # the second op of the unit


def test_the_trace_is_of_the_format(events: list[dict[str, Any]]) -> None:
    for event in events:
        assert NEEDED[event["ph"]] <= event.keys()
        assert event["ph"] == "M" or event["ts"] >= 0 and event.get("dur", 0) >= 0
    # Each value begins and ends once; and slices of one thread do not overlap, which viewers would not draw.
    begins = {event["id"]: event["ts"] for event in events if event["ph"] == "b"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    assert begins.keys() == ends.keys() and all(begins[one] <= ends[one] for one in begins)
    threads: dict[tuple[int, int], float] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        thread = event["pid"], event["tid"]
        assert event["ts"] >= threads.get(thread, 0.0) - 1e-6  # times are sums of floats, in microseconds
        threads[thread] = event["ts"] + event["dur"]


def test_the_trace_shows_values_and_recompute_by_unit(over_time: Timeline, events: list[dict[str, Any]]) -> None:
    name_of = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(name_of.values()) == [
        "step of Sequential", "0 (Linear)", "1 (Sequential)", "2 (Sequential)", "3 (Sequential)", "outside of the units",
    ]  # fmt: skip
    again = [name_of[e["pid"]] for e in events if e["ph"] == "X" and name_of[e["pid"]] != "step of Sequential"]
    assert len(again) == len(over_time.lives.reruns) > 0
    twice = Counter((e["name"], name_of[e["pid"]], e["cat"]) for e in events if e["ph"] == "b")
    recomputed = {(name, unit) for name, unit, category in twice if category == "recomputed values"}
    assert recomputed and all(
        any(key[:2] == one and key[2] != "recomputed values" for key in twice) for one in recomputed
    )
    alive = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "bytes alive: all"]
    assert max(alive) == over_time.report.peak_bytes
    assert {e["name"] for e in events if e["pid"] == 1 and e.get("tid") == 1 and e["ph"] == "X"} >= {
        "forward",
        "backward",
    }


@pytest.mark.parametrize("write", [recollect.write_trace, recollect.write_snapshot])
def test_what_cannot_be_written(over_time: Timeline, write: Any, tmp_path: Path) -> None:
    with pytest.raises(RecollectError, match=r"none.step\.json: cannot be written \(no folder .*none\), expected"):
        write(over_time, tmp_path / "none" / "step.json")
    with pytest.raises(ArgumentError, match=r"over_time.*Profile"):
        write(over_time.profile, tmp_path / "step.json")
    assert isinstance(over_time.profile, Profile)
