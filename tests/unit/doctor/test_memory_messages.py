"""The numbers of "CUDA out of memory", and snapshots, in the formats that PyTorch writes; and what follows from them."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

import recollect
from recollect.doctor.out_of_memory import MemoryMessage
from recollect.doctor.snapshot import Snapshot, snapshot_of
from recollect.errors import DiagnosisError

TEXTS = Path(__file__).parent / "texts"
GIB = 2**30


def message(name: str) -> MemoryMessage:
    (found,) = filter(None, map(MemoryMessage.of, (TEXTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()))
    return found


def in_gib(num_bytes: int | None) -> float:
    return round(num_bytes / GIB, 2)


@pytest.mark.parametrize(
    ("name", "expected"),  # tried, capacity, free, allocated, unallocated, in GiB
    [
        ("memory-fragmented", (1.99, 23.56, 1.23, 14.73, 6.39)),
        ("memory-fragmented-2.1", (1.70, 6.00, 0.00, 2.93, 2.30)),
        ("memory-full", (22.78, 31.47, 12.73, 9.08, 9.35)),
        ("memory-full-1.10", (0.23, 14.76, 0.07, 13.54, 0.09)),
        ("memory-of-others", (2.11, 14.74, 1.65, 4.50, 2.14)),
    ],
)
def test_numbers(name: str, expected: tuple[float, ...]) -> None:
    got = message(name)
    numbers = (got.tried_bytes, got.capacity_bytes, got.free_bytes, got.allocated_bytes, got.unallocated_bytes)
    assert tuple(map(in_gib, numbers)) == expected


def test_this_process_is_not_another_one() -> None:
    """In a container the message names it by its number, like the others."""
    assert {pid: in_gib(size) for pid, size in message("memory-of-others").other_processes.items()} == {
        19069: 0.5,
        19060: 4.93,
        19063: 0.87,
    }
    assert message("memory-in-recompute").other_processes == {}
    assert message("memory-in-logits").other_processes == {}  # of 17179869184 GiB, on a device of 8


def test_a_message_without_numbers() -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert MemoryMessage.of(text) == MemoryMessage(2 * GIB, None, None, None, None, {})
    assert MemoryMessage.of("RuntimeError: CUDA error: out of memory") is None
    assert recollect.diagnose(text) == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "memory-fragmented",
            "Out of memory by fragmentation, not for lack of it: 2.0 GiB were asked for, and 7.6 GiB were in no tensor.",
        ),
        (
            "memory-full",
            "Out of memory for lack of it: 22.8 GiB were asked for, and 716.8 MiB of that do not exist even without gaps.",
        ),
        ("memory-of-others", "Other processes hold 6.3 GiB of the device's 14.7 GiB."),
        ("memory-in-logits", "The step runs out of memory at the logits (2.0 GiB)."),
    ],
)
def test_problems_name_them(name: str, problem: str) -> None:
    assert problem in [finding.problem for finding in recollect.diagnose(TEXTS / f"{name}.txt")]


def test_the_budget_is_of_the_device() -> None:
    (found,) = recollect.diagnose(TEXTS / "memory-in-recompute.txt")
    assert 'recollect.attach(model, optimizer, budget="71GiB")' in found.fix[1]


def test_the_place_is_the_innermost_frame_that_says_one() -> None:
    """A step with a closure runs forward inside the optimizer's step: that is no optimizer."""
    frames = (
        '  File "/site-packages/torch/optim/adam.py", line 143, in step',
        "    loss = closure()",
        '  File "/site-packages/pytorch_lightning/loops/optimization/automatic.py", line 140, in closure',
        "    step_output = self._step_fn()",
        '  File "/work/model.py", line 12, in forward',
        "    return self.block(x)",
    )
    message_line = (TEXTS / "memory-full.txt").read_text(encoding="utf-8").splitlines()[-1]
    text = "\n".join(("Traceback (most recent call last):", *frames, message_line))
    assert [finding.rule for finding in recollect.diagnose(text)] == ["memory-full"]
    direct = "\n".join(("Traceback (most recent call last):", *frames[:1], message_line))
    (place,) = recollect.diagnose(direct)
    assert place.rule == "memory-at-optimizer-start"
    assert place.evidence[1] == 'in "/site-packages/torch/optim/adam.py", line 143, in step'


def test_where_it_was_without_other_processes() -> None:
    text = (TEXTS / "memory-while-loading.txt").read_text(encoding="utf-8")
    (others,) = recollect.diagnose(text)
    assert others.rule == "memory-of-others"
    assert "line 1050, in <lambda>" in others.evidence[1] or "in _apply" in others.evidence[1]
    (place,) = recollect.diagnose(text.replace("Process 2797307 has 14.85 GiB memory in use.", ""))
    assert place.rule == "memory-while-loading"


def test_the_frame_is_shown_with_its_code() -> None:
    place = recollect.diagnose(TEXTS / "memory-at-optimizer-start.txt")[0]
    assert place.evidence[1] == (
        'in "/site-packages/torch/optim/adamw.py", line 606, in _multi_tensor_adamw: '
        "exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)"
    )


MIB = 2**20
FORWARD = [
    {"filename": "/site-packages/torch/nn/modules/linear.py", "line": 144, "name": "forward"},
    {"filename": "/work/model.py", "line": 12, "name": "forward"},
]
LOSS = [{"filename": "/site-packages/torch/nn/functional.py", "line": 3494, "name": "cross_entropy"}]
STEP = [{"filename": "/site-packages/torch/optim/adamw.py", "line": 180, "name": "_init_group"}]
ALLOCATION = {"action": "alloc", "addr": 0x7F0000000000, "size": 600 * MIB, "stream": 0}
AGAIN = [
    FORWARD[0],
    {"filename": "/site-packages/torch/utils/checkpoint.py", "line": 1670, "name": "recompute_fn"},
    {"filename": "/site-packages/torch/autograd/graph.py", "line": 979, "name": "_engine_run_backward"},
]


def snapshot(
    blocks: list[tuple[int, list[dict[str, Any]] | None]], trace: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """One segment; a block without frames is free."""
    written, address = [], 0x7F0000000000
    for size, frames in blocks:
        state = "inactive" if frames is None else "active_allocated"
        written.append(
            {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames or []}
        )
        address += size
    total, live = sum(size for size, _ in blocks), sum(size for size, frames in blocks if frames is not None)
    segment = {
        **dict.fromkeys(("allocated_size", "active_size", "requested_size"), live),
        **{"device": 0, "address": 0x7F0000000000, "total_size": total, "stream": 0, "segment_type": "large"},
        **{"segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": written},
    }
    return {"segments": [segment], "device_traces": [trace or []], "allocator_settings": {}}


def test_the_format_is_that_of_pytorch() -> None:
    """PyTorch's own readers take what the tests build."""
    data = snapshot([(600 * MIB, FORWARD), (400 * MIB, None)])
    assert "600.0MiB" in _memory_viz.segsum(data)
    assert "TOTAL MEM: 600.0MiB" in _memory_viz.trace({**data, "device_traces": [[{**ALLOCATION, "frames": FORWARD}]]})


def test_a_snapshot_that_pytorch_made(tmp_path: Path) -> None:
    """Of a real step on the CPU, by PyTorch's memory profiler; its stacks are whole."""
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8000, bias=False))
    batch, labels = torch.randn(512, 32), torch.randint(0, 8000, (512,))
    verbose = torch._C._profiler._ExperimentalConfig(verbose=True)
    with torch.profiler.profile(
        profile_memory=True, with_stack=True, record_shapes=True, experimental_config=verbose
    ) as profile:
        nn.functional.cross_entropy(model(batch), labels).backward()
    path = write(tmp_path / "snapshot.pickle", _memory_viz._profile_to_snapshot(profile))
    found = {finding.rule: finding for finding in recollect.diagnose(path)}
    assert "snapshot-fragmented" not in found
    logits_bytes = 512 * 8000 * 4
    (read,) = snapshot_of(pickle.loads(path.read_bytes()), "s")
    assert 2 * logits_bytes < read.peak_bytes < 4 * logits_bytes
    assert "snapshot-logits" in found
    assert found["snapshot-logits"].evidence[0].startswith(f"{path}: ")


def write(path: Path, data: dict[str, Any]) -> Path:
    path.write_bytes(pickle.dumps(data))
    return path


@pytest.mark.parametrize(
    ("rule", "frames"),
    [
        ("snapshot-logits", LOSS),
        ("snapshot-optimizer", STEP),
        ("snapshot-recompute", AGAIN),
        ("snapshot-activations", FORWARD),
        ("snapshot-without-stacks", []),
    ],
)
def test_what_fills_the_peak(rule: str, frames: list[dict[str, Any]], tmp_path: Path) -> None:
    other = [{"filename": "/work/train.py", "line": 1, "name": "<module>"}]
    path = write(tmp_path / "snapshot.pickle", snapshot([(600 * MIB, frames), (400 * MIB, other)]))
    (finding,) = recollect.diagnose(path)
    assert finding.rule == rule
    assert "600.0 MiB of 1000.0 MiB" in finding.problem or "600.0 MiB" in finding.problem
    assert finding.evidence[0].startswith(f"{path}: 600.0 MiB in 1 blocks")


def test_json_says_the_same(tmp_path: Path) -> None:
    data = snapshot([(600 * MIB, FORWARD)])
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps(data))
    (finding,) = recollect.diagnose(path)
    assert finding.cause.endswith("the largest: 600.0 MiB from /work/model.py:12:forward.")


def test_fragmentation(tmp_path: Path) -> None:
    pieces = [part for _ in range(8) for part in ((64 * MIB, FORWARD), (32 * MIB, None))]
    oom = [{"action": "oom", "size": 128 * MIB, "device_free": 16 * MIB, "stream": 0, "frames": []}]
    found = recollect.diagnose(write(tmp_path / "snapshot.pickle", snapshot(pieces, oom)))
    assert found[0].rule == "snapshot-fragmented"
    assert found[0].certainty == "likely"
    assert found[0].problem == (
        "256.0 MiB of the 768.0 MiB that PyTorch holds are in no tensor, in 8 pieces of at most 32.0 MiB."
    )
    assert "128.0 MiB were refused, which the gaps together would have held" in found[0].cause
    oom[0]["size"] = 512 * MIB  # more than all gaps: capacity, not fragmentation
    found = recollect.diagnose(write(tmp_path / "snapshot.pickle", snapshot(pieces, oom)))
    assert "snapshot-fragmented" not in [finding.rule for finding in found]


def test_the_peak_lies_before_the_end() -> None:
    """The trace: 100 allocated, 500 of logits allocated and freed, 50 allocated; at the end 150 are live."""
    start = 0x7F0000000000
    events = [
        {"action": "alloc", "addr": start, "size": 100, "frames": FORWARD},
        {"action": "alloc", "addr": 1, "size": 500, "frames": LOSS},
        {"action": "free_requested", "addr": 1, "size": 500, "frames": []},
        {"action": "free_completed", "addr": 1, "size": 500, "frames": []},
        {"action": "alloc", "addr": start + 100, "size": 50, "frames": STEP},
    ]
    (found,) = snapshot_of(snapshot([(100, FORWARD), (50, STEP)], events), "s")
    assert isinstance(found, Snapshot)
    assert found.peak_bytes == 600
    assert sorted(block.size_bytes for block in found.peak) == [100, 500]
    assert {block.size_bytes: block.stack[0].rpartition(":")[2] for block in found.peak}[500] == "cross_entropy"


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_runs_nothing(protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [Runs()]}, protocol))
    with pytest.raises(DiagnosisError, match=r"cannot be read safely \(it needs "):
        recollect.diagnose(path)
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x04garbage", "cannot be read safely"),
        (pickle.dumps([1, 2]), "got a pickle of a list without segments, expected a snapshot"),
        (pickle.dumps({"segments": [{"total_size": 1}]}), r"a snapshot of an unknown form \(KeyError: 'blocks'\)"),
    ],
)
def test_other_pickles(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pickle"
    path.write_bytes(content)
    with pytest.raises(DiagnosisError, match=message):
        recollect.diagnose(path)


def test_too_large_a_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "x.pickle"
    with path.open("wb") as file:
        file.write(b"\x80\x04")
        file.truncate(2**31 + 1)  # sparse: takes no space
    with pytest.raises(DiagnosisError, match=r"got a snapshot of 2147483649 bytes, expected at most 2147483648"):
        recollect.diagnose(path)
