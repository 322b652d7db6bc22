"""Measure settings side by side on one model: first plans, then peaks and FLOPs, then step times in turns."""

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import recollect
from recollect.byte_format import format_bytes
from recollect.costs.op_work import flops_of
from recollect.engine.facts import OpMode
from recollect.errors import BenchError, BudgetTooSmallError
from recollect.integrations.megatron import megatron_plan
from recollect.lab.bench.race import Contestant, Race, percentile
from recollect.lab.bench.results import Row
from recollect.lab.bench.settings import Setting
from recollect.lab.bench.switchable import SwitchablePlan
from recollect.lab.train.optimizer_step import resident_bytes
from recollect.measuring.device_memory import empty_cache, is_out_of_memory
from recollect.measuring.meter import PeakMeasurement, measure_peak
from recollect.measuring.timing import timed
from recollect.planning.choose import Planner
from recollect.planning.planners import planner_for
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.recording.model_step import Step


class FlopCount(OpMode):
    """Count FLOPs while active; PyTorch's `FlopCounterMode` misses attention on the CPU and counts causal attention as full.

    The FLOPs of compiled parts are not counted: they run compiled, as in training.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, output)
        return output


@dataclass(eq=False, kw_only=True)
class Subject:
    """A model and its training step, run with whatever plan is applied to the model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: dict[str, Tensor]
    """One micro-batch, as keywords of the model; all micro-batches of a step are the same."""
    num_microbatches: int
    num_tokens: int
    """Tokens per micro-batch."""
    device: torch.device

    def step(self) -> None:
        """Run one step; gradients are None before and after."""
        for _ in range(self.num_microbatches):
            loss = Step(self.model, self.batch).forward()[1] / self.num_microbatches
            loss.backward()
            del loss
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def seconds(self) -> float:
        gc.collect()
        return timed(self.step, self.device)[1]

    def peak(self) -> PeakMeasurement[None]:
        """Run one step and measure its peak, including parameters, optimizer state and batch."""
        baseline_bytes = None  # CUDA's allocator counts everything
        empty_cache(self.device)
        if self.device.type != "cuda":
            baseline_bytes = resident_bytes(self.model, self.optimizer, self.batch)
        return measure_peak(self.step, device=self.device, baseline_bytes=baseline_bytes)

    def hardware_flops(self) -> float:
        """Run one step and count the FLOPs of its matrix products."""
        with (count := FlopCount()):
            self.step()
        return count.flops

    @torch.no_grad()
    def forward_flops(self) -> float:
        """Run a forward without gradients and return the FLOPs of all forwards of a step."""
        with (count := FlopCount()):
            self.model(**self.batch)
        return count.flops * self.num_microbatches

    def record(self) -> Profile:
        return recollect.record(
            self.model,
            self.batch,
            optimizer=self.optimizer,
            holds_output=False,
            gradients="accumulated" if self.num_microbatches > 1 else "freed",
        )

    def clean_up(self) -> None:
        """Free memory left behind by a step that ran out of memory."""
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        empty_cache(self.device)

    def describe(self) -> dict[str, Any]:
        """Describe the step, apart from the model's dimensions and the machine."""
        parameter = next(self.model.parameters())
        return {
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "micro_batch": ", ".join(f"{name} {list(t.shape)}" for name, t in self.batch.items()),
            "num_microbatches": self.num_microbatches,
            "optimizer": type(self.optimizer).__name__,
        }


@dataclass(eq=False, kw_only=True)
class _Entry(Contestant):
    """One setting, with its plan applied to the model; None for no recompute."""

    row: Row
    plan: SwitchablePlan | None = None

    def on(self) -> AbstractContextManager[None]:
        return nullcontext() if self.plan is None else self.plan.on()


def measure(
    subject: Subject,
    settings: Sequence[Setting],
    *,
    model_flops: float,
    rounds: int,
    memory_limit_bytes: int | None,
    report: Callable[[str], None],
) -> tuple[tuple[Row, ...], str, int]:
    """Measure settings; running out of memory is a result, and the remaining settings continue.

    Return a row for each setting, the name of the setting that slowdowns refer to, and the number of rounds.
    """
    report("recording")
    try:
        planner = planner_for(subject.record())
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        raise BenchError(
            f"recording {type(subject.model).__name__}: out of memory, even with everything possible recomputed "
            f"({_first_line(problem)}). Use a smaller model or micro-batch, or bf16."
        ) from None
    session = _Session(subject, planner, memory_limit_bytes, report)
    num_tokens = subject.num_tokens * subject.num_microbatches
    blank = Row(name="", fields={}, model_flops=model_flops, num_tokens=num_tokens)
    entries = [session.entry(setting, blank) for setting in settings]
    for entry in entries:
        session.measure_memory(entry)
    return session.race(entries, rounds)


@dataclass(eq=False)
class _Session:
    subject: Subject
    planner: Planner
    memory_limit_bytes: int | None
    report: Callable[[str], None]

    def entry(self, setting: Setting, blank: Row) -> _Entry:
        """Return a setting with its plan, marked as OOM if it is predicted not to fit."""
        row = replace(blank, name=setting.name, fields=setting.fields)
        try:
            plan = self._plan(setting)
        except BudgetTooSmallError as problem:
            note = f"no plan: the least possible peak is {format_bytes(problem.least_peak_bytes)}"
            return _Entry(name=row.name, row=replace(row, result="OOM (predicted)", note=note))
        peak_bytes = self.planner.plain_peak_bytes if plan is None else plan.predicted_peak_bytes
        row = replace(row, predicted_peak_bytes=peak_bytes, predicted_slowdown=plan.predicted_slowdown if plan else 0.0)
        if self._is_above_limit(peak_bytes):
            return _Entry(name=row.name, row=replace(row, result="OOM (predicted)", note="predicted above the limit"))
        switchable = None if plan is None else SwitchablePlan(recollect.apply(self.subject.model, plan))
        return _Entry(name=row.name, row=row, plan=switchable)

    def measure_memory(self, entry: _Entry) -> None:
        """Measure peak and FLOPs; the first steps of a setting also warm it up."""
        if entry.row.is_oom:
            self.report(f"{entry.name}: not run, {entry.row.note}")
            return
        self.report(f"{entry.name}: measuring its peak")
        try:
            with entry.on():
                if not self.subject.optimizer.state:
                    self.subject.step()  # creates the optimizer state
                peak = self.subject.peak()
                hardware_flops = self.subject.hardware_flops()
        except Exception as problem:
            self._ran_out(entry, problem)
            return
        entry.row = replace(
            entry.row,
            peak_bytes=peak.peak_bytes,
            reserved_bytes=peak.peak_reserved_bytes,
            hardware_flops=hardware_flops,
        )
        if self._is_above_limit(peak.peak_bytes):
            entry.row = replace(entry.row, result="OOM", note="measured above the limit")

    def race(self, entries: Sequence[_Entry], rounds: int) -> tuple[tuple[Row, ...], str, int]:
        """Time the settings that fit, in turns, each next to the first of them."""
        running = [entry for entry in entries if not entry.row.is_oom]
        if not running:
            return tuple(entry.row for entry in entries), entries[0].name, 0
        for entry in running:
            entry.seconds.clear()
            entry.ratios.clear()
        first, *others = running
        # A lone reference is not compared, but its times still count.
        groups = [[other] for other in others] or [[first]]
        race = Race(lambda: self._reference_s(first), self._seconds, report=self.report, seed=0)
        try:
            race.run(groups, seconds=0.0, least_rounds=rounds)
        except Exception as problem:
            # Only the reference can fail here, as the others' errors are caught: make a different setting the reference.
            self._ran_out(first, problem)
            return self.race(entries, rounds)
        if others:
            first.seconds = race.reference_s
            first.ratios = {(0, 0): 1.0}
        return tuple(_timed(entry) for entry in entries), first.name, race.num_rounds

    def _plan(self, setting: Setting) -> Plan | None:
        if setting.is_plain:
            return None
        if setting.budget is not None:
            return self.planner.plan(setting.budget)
        return megatron_plan(self.planner.profile, setting.config)

    def _is_above_limit(self, peak_bytes: int | None) -> bool:
        limit_bytes = self.memory_limit_bytes
        return limit_bytes is not None and peak_bytes is not None and peak_bytes > limit_bytes

    def _reference_s(self, entry: _Entry) -> float:
        with entry.on():
            return self.subject.seconds()

    def _seconds(self, entry: _Entry) -> float | None:
        if entry.row.is_oom:
            return None
        try:
            return self._reference_s(entry)
        except Exception as problem:
            self._ran_out(entry, problem)
            return None

    def _ran_out(self, entry: _Entry, problem: Exception) -> None:
        """Note that a setting ran out of memory; raise any other problem."""
        if not is_out_of_memory(problem):
            raise problem
        entry.row = replace(entry.row, result="OOM", note=_first_line(problem))
        self.report(f"{entry.name}: out of memory")
        # The traceback would keep the step's frames and their tensors alive.
        problem.__traceback__ = None
        self.subject.clean_up()


def _first_line(problem: Exception) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0]


def _timed(entry: _Entry) -> Row:
    if entry.row.is_oom or not entry.seconds:
        return entry.row
    low_s, middle_s, high_s = (percentile(entry.seconds, percent) for percent in (20, 50, 80))
    low, middle, high = (entry.percentile(percent) for percent in (20, 50, 80))
    return replace(
        entry.row,
        step_s=middle_s,
        step_p20_s=low_s,
        step_p80_s=high_s,
        slowdown=middle,
        slowdown_p20=low,
        slowdown_p80=high,
    )
