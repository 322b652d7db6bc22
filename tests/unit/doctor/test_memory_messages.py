"""The numbers of "CUDA out of memory", in the forms that PyTorch has had, and what follows from them."""

from pathlib import Path

import pytest

import recollect
from recollect.doctor.out_of_memory import MemoryMessage

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
