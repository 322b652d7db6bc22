"""The peak of training under a budget, as a user's own loop has it, on any device; as a program, in a process of its own.

PYTHONPATH=src:tests/support python tests/support/training_peaks.py cuda 0.3
"""

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import recollect
from budgets import budgets
from device_models import decoder
from recollect.lab.bench.race import few_objects
from recollect.measuring.meter import measure_peak, storage_bytes
from recollect.planning.choose import Planner
from recollect.profile.profile import block_bytes

_NUM_STEPS = 3


@dataclass(frozen=True)
class Trial:
    """A budget, what was predicted for it, and what training took at its peak.

    `allocated_bytes`: what the caching allocator counts; `requested_bytes`: what PyTorch asked it for. On the CPU the same.
    `held_bytes`: what the loop holds on to beyond what was recorded: the loss until the next one, in a lean loop.
    """

    budget_bytes: int
    predicted_bytes: int
    allocated_bytes: int
    requested_bytes: int
    reserved_bytes: int
    held_bytes: int


def train_under_budget(
    device: torch.device, fraction: float, make_optimizer: Callable[[Any], torch.optim.Optimizer], *, holds_output: bool
) -> Trial:
    """Train some steps at a fraction of the way from the least possible peak to that of keeping everything.

    `holds_output`: by `out = model(**batch)`, so that the logits, and the cache of keys and values, live until the next ones
    are there.
    """
    case = decoder("llama", device)
    model, batch = case.model(), case.data()
    optimizer = make_optimizer(model.parameters())
    profile = recollect.record(model, batch, optimizer=optimizer, holds_output=holds_output, gradients="freed")
    planner = Planner(profile)
    (budget_bytes,) = budgets(planner, (fraction,))
    plan = planner.plan(budget_bytes)
    held_bytes = 0

    def train() -> None:
        nonlocal held_bytes
        for _ in range(_NUM_STEPS):
            optimizer.zero_grad()
            if holds_output:
                out = model(**batch)
                out.loss.backward()
            else:
                loss = model(**batch).loss
                held_bytes = block_bytes(loss.nbytes, str(device))
                loss.backward()
            optimizer.step()
        optimizer.zero_grad()

    with recollect.apply(model, plan):
        allocated, requested, reserved = peaks(train, [model, batch, optimizer], device)
    return Trial(
        budget_bytes=budget_bytes,
        predicted_bytes=plan.predicted_peak_bytes or 0,
        allocated_bytes=allocated,
        requested_bytes=requested,
        reserved_bytes=reserved,
        held_bytes=held_bytes,
    )


def peaks(train: Callable[[], None], alive: list[Any], device: torch.device) -> tuple[int, int, int]:
    """Return the most bytes allocated, requested and reserved by the process; `alive` is what there is already."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
        train()
        requested = torch.cuda.memory_stats(device)["requested_bytes.all.peak"]
        return torch.cuda.max_memory_allocated(device), requested, torch.cuda.max_memory_reserved(device)
    train()
    model, batch, optimizer = alive
    state = [value for values in optimizer.state.values() for value in values.values()]
    start = storage_bytes([*model.parameters(), *model.buffers(), *batch.values(), *state])
    peak = start + measure_peak(train, device=device).peak_growth_bytes
    return peak, peak, peak


if __name__ == "__main__":
    asked, at = sys.argv[1:]
    with few_objects():
        found = train_under_budget(torch.device(asked), float(at), torch.optim.AdamW, holds_output=False)
    print(json.dumps(asdict(found)))
