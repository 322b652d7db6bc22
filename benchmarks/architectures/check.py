"""Check one architecture: plan its step, run it as loops do, and compare everything with the step without a plan."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy
import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_leaves

import recollect
from allocator_meter import AllocatorMeter
from architectures.inputs import batch_for, loss_of
from architectures.small_config import small_config
from architectures.subjects import Subject
from recollect.engine.content import has_same_bits
from recollect.errors import BudgetTooSmallError
from recollect.measuring.meter import storage_bytes
from recollect.profile.profile import Profile

__all__ = ["SECONDS", "Checked", "Verdict", "check"]

Verdict = Literal["exact", "inexact", "over budget", "crashed", "too slow", "not built", "not repeatable"]
SECONDS = 20
"""Processor time from the beginning of the recording to the end of the last step."""
_BUDGET = 0.6  # of the way from the least peak to that of the step without recompute
_LARGEST = 16_000_000  # parameters; above, a configuration is not small

Step = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Checked:
    """What was found. Bytes and seconds are 0 where it did not come so far.

    Attributes:
        task: what transformers lists the class for.
        class_name: the class.
        verdict: "exact" if loss, gradients, buffers and random state had the same bits under both plans, within the budget.
        reason: why not; empty for "exact".
        num_parameters: of the small model.
        plain_bytes: measured peak of the step without a plan.
        least_bytes: least peak that the planner found.
        budget_bytes: budget of the plan.
        predicted_bytes: its predicted peak.
        measured_bytes: its measured peak.
        full_predicted_bytes: predicted peak of full recompute.
        full_measured_bytes: its measured peak.
        seconds: processor time of recording, planning and all steps.
    """

    task: str
    class_name: str
    verdict: Verdict = "exact"
    reason: str = ""
    num_parameters: int = 0
    plain_bytes: int = 0
    least_bytes: int = 0
    budget_bytes: int = 0
    predicted_bytes: int = 0
    measured_bytes: int = 0
    full_predicted_bytes: int = 0
    full_measured_bytes: int = 0
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        """Return the fields, as they are written to the results."""
        return asdict(self)


def check(subject: Subject, meter: AllocatorMeter) -> Checked:
    """Build a model and check it; whatever is raised becomes a verdict."""
    found = Checked(subject.task, subject.class_name)
    try:
        torch.manual_seed(0)
        model = getattr(transformers, subject.class_name)(small_config(subject.config_class)).train()
        batch = batch_for(subject, model)
        subject_step = _Step(model, batch, meter)
        plain, plain_bytes = subject_step.run()
        again, _ = subject_step.run()
    except Exception as error:
        return replace(found, verdict="not built", reason=_reason(error))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    found = replace(found, num_parameters=num_parameters, plain_bytes=plain_bytes)
    if num_parameters > _LARGEST:
        return replace(found, verdict="not built", reason=f"{num_parameters:,} parameters")
    if (name := _first_difference(plain, again)) is not None:
        return replace(found, verdict="not repeatable", reason=f"{name} of two steps without a plan")
    start_s = time.process_time()
    try:
        found = _compare(found, subject_step, plain)
    except Exception as error:
        found = replace(found, verdict="crashed", reason=_reason(error))
    found = replace(found, seconds=round(time.process_time() - start_s, 2))
    if found.verdict == "exact" and found.seconds > SECONDS:
        return replace(found, verdict="too slow", reason=f"{found.seconds:.0f} s")
    return found


def _compare(found: Checked, step: _Step, plain: Step) -> Checked:
    with _quiet():
        step.reset()
        profile = recollect.record(step.model, step.batch, loss_fn=loss_of)
        least_bytes, most_bytes = _range_of(profile)
        budget_bytes = int(least_bytes + _BUDGET * (most_bytes - least_bytes))
        plan = recollect.plan(profile, budget_bytes)
        full = recollect.classic_plan(profile, "full")
        with recollect.apply(step.model, plan):
            planned, measured_bytes = step.run()
        with recollect.apply(step.model, full):
            fully, full_measured_bytes = step.run()
    found = replace(
        found,
        least_bytes=least_bytes,
        budget_bytes=budget_bytes,
        predicted_bytes=plan.predicted_peak_bytes or 0,
        measured_bytes=measured_bytes,
        full_predicted_bytes=full.predicted_peak_bytes or 0,
        full_measured_bytes=full_measured_bytes,
    )
    for kind, got in (("the plan", planned), ("full recompute", fully)):
        if (name := _first_difference(plain, got)) is not None:
            return replace(found, verdict="inexact", reason=f"{name} under {kind}")
    if measured_bytes > budget_bytes:
        return replace(found, verdict="over budget", reason=f"by {measured_bytes / budget_bytes - 1:.1%}")
    return found


class _Step:
    """The commonest step: the output is held until backward has ended, and those of the last step until the next is there.

    The gradients of the last step are alive in forward, too, as where a loop clears them right before backward.
    """

    def __init__(self, model: nn.Module, batch: dict[str, Any], meter: AllocatorMeter) -> None:
        self.model = model
        self.batch = batch
        self.meter = meter
        self.buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def reset(self) -> None:
        """Go back to the state from which every step begins."""
        with torch.no_grad():
            for buffer, before in self.buffers:
                buffer.copy_(before)
        torch.manual_seed(1)
        # What transformers masks in sound is drawn by NumPy.
        numpy.random.seed(1)
        random.seed(1)

    def run(self) -> tuple[Step, int]:
        """Run the step twice from the same state, and return all that the second one leaves, and its peak in bytes."""
        resident = [*self.model.parameters(), *self.model.buffers(), *tree_leaves(self.batch)]
        resident_bytes = storage_bytes(tensor for tensor in resident if isinstance(tensor, torch.Tensor))
        before_bytes = self.meter.now_bytes()
        for _ in range(2):
            self.reset()
            self.meter.restart()
            output = self.model(**self.batch)
            loss = loss_of(output)
            self.model.zero_grad()
            loss.backward()
        peak_bytes = resident_bytes + self.meter.peak_bytes() - before_bytes
        left = {"loss": loss.detach().clone(), "random state": torch.get_rng_state()}
        left |= {f"gradient of {n}": p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        left |= {f"buffer {n}": buffer.detach().clone() for n, buffer in self.model.named_buffers()}
        self.model.zero_grad()
        return left, peak_bytes


def _range_of(profile: Profile) -> tuple[int, int]:
    """Return the least peak that a plan can have, and the peak without recompute."""
    most_bytes = recollect.plan(profile, "100%").predicted_peak_bytes or 0
    try:
        recollect.plan(profile, 1)
    except BudgetTooSmallError as error:
        return error.least_peak_bytes, most_bytes
    raise AssertionError("a plan fits into one byte")


def _first_difference(one: Step, other: Step) -> str | None:
    if one.keys() != other.keys():
        return next(iter(one.keys() ^ other.keys()))
    return next((name for name in one if not has_same_bits(one[name], other[name])), None)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _reason(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first[:160]}"
