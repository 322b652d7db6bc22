"""Predicted against measured peak and step time, in a plain loop: forward, loss, backward, optimizer step, gradients to None.

The peak that is predicted, and bounded by the budget, is `torch.cuda.max_memory_allocated`. Beside it stand what was asked for
before blocks were rounded up, and what the caching allocator reserved; on a CPU neither exists. Each plan runs three whole
steps, of which the highest peak counts. Times are of forward and backward, plans in turns, ratios to the plan that keeps
everything.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from rich.table import Table

import recollect
from gpu.part import Context
from models import ModelName
from recollect.byte_format import format_bytes
from recollect.measuring.device_memory import empty_cache, is_out_of_memory
from recollect.measuring.meter import PeakMeasurement, measure_peak, storage_bytes
from recollect.measuring.timing import timed
from recollect.recording.model_step import resident_tensors
from recompute import SwitchablePlan
from results_csv import Number
from step_times import plans_for
from subject import Step, StepFlags

KEEP_ALL = "keep all"
# Fractions of the way from the least peak to that of keeping everything.
_BUDGETS = (0.0, 0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
# The tape learns in two steps what it has to watch, and forgets nothing of it in the third.
_NUM_STEPS = 3

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
_OPTIMIZERS: dict[str, MakeOptimizer | None] = {
    "no optimizer": None,
    "AdamW foreach": functools.partial(torch.optim.AdamW, lr=1e-5, foreach=True),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=1e-5, fused=True),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model at a size."""

    name: str
    model: ModelName
    sizes: StepFlags


def cases(context: Context) -> list[Case]:
    """Return the models, those that say most first."""
    large = context.large_step(seq_length=2048)
    experts = replace(large, num_layers=8, seq_length=4096)
    found = [
        Case(name="Llama 2k", model="dense", sizes=large),
        Case(name="Mixtral 4k", model="moe", sizes=experts),
        Case(name="DeepSeek-V3 4k", model="mla", sizes=experts),
        # The most positions that GPT-2 has.
        Case(name="GPT-2 1k", model="gpt2", sizes=replace(large, hidden_size=1024, batch_size=8, seq_length=1024)),
        Case(name="Llama 8k", model="dense", sizes=replace(large, seq_length=8192)),
        Case(name="Llama 4k", model="dense", sizes=replace(large, seq_length=4096)),
    ]
    if context.is_dry_run:
        tiny = {"hidden_size": 32, "num_layers": 2, "vocab_size": 64, "seq_length": 32, "threads": 1}
        found = [replace(case, sizes=replace(case.sizes, **tiny)) for case in found[:4]]
    return found


@dataclass(frozen=True)
class Row:
    """One plan: peaks in bytes, seconds of forward and backward; `slowdown` is None where keeping everything did not fit."""

    name: str
    plan: recollect.Plan
    peak: PeakMeasurement[None]
    predicted_s: float
    measured_s: float
    slowdown: float | None

    @property
    def is_over_budget(self) -> bool:
        """Whether the peak is above what the plan was made for."""
        return self.plan.budget_bytes is not None and self.peak.peak_bytes > self.plan.budget_bytes

    @property
    def off_bytes(self) -> int:
        """How far the measured peak is above the predicted one."""
        return self.peak.peak_bytes - (self.plan.predicted_peak_bytes or 0)

    def numbers(self, case: str) -> list[Number]:
        """Return the rows of the file."""
        name = f"{case}, {self.name}"
        found = [
            Number("budget", "bytes", name, self.plan.budget_bytes or 0),
            Number("predicted_peak", "bytes", name, self.plan.predicted_peak_bytes or 0),
            Number("allocated_peak", "bytes", name, self.peak.peak_bytes),
            Number("over_budget", "bool", name, int(self.is_over_budget)),
            Number("predicted_step_time", "s", name, self.predicted_s),
            Number("measured_step_time", "s", name, self.measured_s),
            Number("predicted_slowdown", "1", name, self.plan.predicted_slowdown or 0.0),
        ]
        if self.slowdown is not None:
            found.append(Number("measured_slowdown", "1", name, self.slowdown))
        if self.peak.peak_requested_bytes is not None:
            found.append(Number("requested_peak", "bytes", name, self.peak.peak_requested_bytes))
        if self.peak.peak_reserved_bytes is not None:
            found.append(Number("reserved_peak", "bytes", name, self.peak.peak_reserved_bytes))
        return found


class Loop:
    """A user's loop around one model."""

    def __init__(self, case: Case, make_optimizer: MakeOptimizer | None) -> None:
        self.step = Step(case.sizes, case.model)
        self.model, self.batch, self.device = self.step.model, self.step.batch, self.step.device
        self.clear()
        self.optimizer = None if make_optimizer is None else make_optimizer(list(self.model.parameters()))

    def clear(self) -> None:
        """Let go of the gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def run(self) -> None:
        """Run one whole step."""
        self.step.run()
        if self.optimizer is not None:
            self.optimizer.step()
        self.clear()

    def peak(self) -> PeakMeasurement[None]:
        """Run one whole step, and measure it."""
        baseline_bytes = None  # CUDA's allocator knows what is there
        if self.device.type != "cuda":
            baseline_bytes = storage_bytes(resident_tensors(self.model, self.batch, self.optimizer))
        empty_cache(self.device)
        return measure_peak(self.run, device=self.device, baseline_bytes=baseline_bytes)

    def seconds(self) -> float:
        """Time forward and backward."""
        self.clear()
        seconds = timed(self.step.run, self.device)[1]
        self.clear()
        return seconds


def measured(loop: Loop, profile: recollect.Profile, plans: dict[str, recollect.Plan], *, num_rounds: int) -> list[Row]:
    """Measure the peaks of plans, then their times in turns; a plan that runs out of memory is left out of the times."""
    peaks: dict[str, PeakMeasurement[None]] = {}
    for name, plan in plans.items():
        try:
            with recollect.apply(loop.model, plan):
                peaks[name] = max((loop.peak() for _ in range(_NUM_STEPS)), key=lambda peak: peak.peak_bytes)
        except Exception as error:
            # Keeping everything may not fit; that a budget does not hold is a row of its own.
            if not is_out_of_memory(error) or plan.budget_bytes is not None:
                raise
            error.__traceback__ = None
            loop.clear()
            empty_cache(loop.device)
    seconds: dict[str, list[float]] = {name: [] for name in peaks}
    # Suspended in between, since a tape learns in its first steps what it has to watch.
    with ExitStack() as stack:
        switches = {
            name: SwitchablePlan(stack.enter_context(recollect.apply(loop.model, plans[name]))) for name in peaks
        }
        for round_number in range(_NUM_STEPS + num_rounds):
            for name, switch in switches.items():
                with switch.on():
                    elapsed_s = loop.seconds()
                if round_number >= _NUM_STEPS:
                    seconds[name].append(elapsed_s)
    rows = []
    for name, peak in peaks.items():
        predicted_s = profile.step_s * (1 + (plans[name].predicted_slowdown or 0.0))
        slowdown = None
        if KEEP_ALL in seconds:
            pairs = zip(seconds[name], seconds[KEEP_ALL], strict=True)
            slowdown = statistics.median(with_plan / without for with_plan, without in pairs) - 1
        rows.append(Row(name, plans[name], peak, predicted_s, statistics.median(seconds[name]), slowdown))
    return rows


def table(rows: Sequence[Row], title: str) -> Table:
    """Return what is printed of one model and optimizer."""
    found = Table(title=title, title_justify="left")
    for heading in ("plan", "predicted", "allocated", "off", "reserved", "slowdown predicted", "measured"):
        found.add_column(heading, justify="right")
    for row in rows:
        reserved = row.peak.peak_reserved_bytes
        found.add_row(
            row.name + (" OVER BUDGET" if row.is_over_budget else ""),
            format_bytes(row.plan.predicted_peak_bytes or 0),
            format_bytes(row.peak.peak_bytes),
            format_bytes(row.off_bytes),
            "" if reserved is None else format_bytes(reserved),
            f"{row.plan.predicted_slowdown or 0.0:.1%}",
            "" if row.slowdown is None else f"{row.slowdown:.1%}",
        )
    return found


def run(context: Context) -> str:
    """Run all models, first each with one optimizer."""
    names = list(_OPTIMIZERS)
    budgets, num_turns, num_rounds = (_BUDGETS, len(names), 5) if not context.is_dry_run else (_BUDGETS[::3], 1, 1)
    turns = [
        (case, names[(place + turn) % len(names)])
        for turn in range(num_turns)
        for place, case in enumerate(cases(context))
    ]
    rows: list[Row] = []
    for case, optimizer in turns:
        name = f"{case.name}, {optimizer}"

        def one_case(case: Case = case, optimizer: str = optimizer, name: str = name) -> None:
            loop = Loop(case, _OPTIMIZERS[optimizer])
            profile = recollect.record(
                loop.model, loop.batch, optimizer=loop.optimizer, holds_output=False, gradients="freed"
            )
            classic = {KEEP_ALL: "keep_all", "full": "full"}
            plans = {name: recollect.classic_plan(profile, kind) for name, kind in classic.items()}
            found = measured(loop, profile, plans | plans_for(profile, budgets), num_rounds=num_rounds)
            others = Number("other_allocations", "bytes", name, profile.persistent.get("other_allocations", 0))
            calibration = Number("calibration", "bytes", name, profile.calibration_bytes)
            numbers = [number for row in found for number in row.numbers(name)]
            context.write([others, calibration, *numbers], case=name, sizes=str(case.sizes))
            context.console.print(table(found, name))
            rows.extend(found)

        if context.begins(name):
            context.attempt(name, one_case)
    return _finding(rows)


def _finding(rows: Sequence[Row]) -> str:
    if not rows:
        return "no case ran"
    over = sum(row.is_over_budget for row in rows)
    off = [row.off_bytes for row in rows]
    slow = [abs(row.slowdown - (row.plan.predicted_slowdown or 0.0)) for row in rows if row.slowdown is not None]
    times = f"slowdowns {100 * statistics.median(slow):.1f} points off in the median" if slow else "nothing timed"
    return (
        f"{len(rows)} plans, {over} over budget; peaks {format_bytes(min(off))} to {format_bytes(max(off))} above the "
        f"prediction; {times}"
    )
