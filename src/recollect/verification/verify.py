"""Check a plan on the real model: gradients, peak and slowdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import nn

from recollect._torch_fsdp import fully_sharded_modules
from recollect._torch_parallel import GradientBuckets
from recollect.applying import apply, without_plans
from recollect.arguments import check_kind
from recollect.errors import NotYetError
from recollect.loss.intercept import loss_in_chunks
from recollect.measuring.device_memory import allocated_bytes, empty_cache, memory_bytes, other_bytes
from recollect.measuring.meter import PeakMeasurement, measure_peak, storage_bytes
from recollect.measuring.timing import timed
from recollect.planning.classic import classic_plan
from recollect.plans.plan import Plan
from recollect.progress import stage
from recollect.ranks.group import Place, Ranks
from recollect.ranks.members import GroupChoice, check_same_plans, ranks_of
from recollect.recording.model_step import LossFunction, Step, call_model, resident_tensors
from recollect.recording.optimizer_step import record_optimizer_step
from recollect.recording.optimizers import Optimizers, check_optimizers
from recollect.recording.record import record
from recollect.recording.step_recording import Gradients
from recollect.tracebacks import lets_go
from recollect.verification.compare import Computed, Findings, compare_runs, compare_units, furthest, without_choices
from recollect.verification.report import SLOWDOWNS, Report, report_of_ranks
from recollect.verification.steps import BatchStep, OwnStep, VerifiedStep

# The number of rounds, each a step without the plan and one under it, and their spread, as a part of the step, that suffices.
_FEWEST_ROUNDS: Final = 2
_MOST_ROUNDS: Final = 5
_SETTLED: Final = 0.02
# The first steps under a plan take longer: the tape compares content, and learns which modules to watch.
_UNSETTLED: Final = 2
# The usable part of a device, for a step in a group: a process that runs out of memory leaves the others waiting.
_USABLE: Final = 0.9


@lets_go
def verify(
    model: nn.Module,
    batch: Any,
    plan: Plan,
    *,
    step: Callable[[], object] | None = None,
    optimizer: Optimizers = None,
    loss_fn: LossFunction | None = None,
    holds_output: bool = True,
    gradients: Gradients = "held",
    compare: Literal["auto", "step", "units"] = "auto",
    time: bool = True,
    group: GroupChoice = None,
) -> Report:
    """Run the step with and without the plan, from the same random state on the same data, and compare.

    Parameters, gradients, buffers and random generators are restored; the optimizer does not step. A plan that is already
    applied is suspended meanwhile.

    Args:
        model: the model that the plan is for.
        batch: a tensor, tuple or dict, passed to the model as `record` does; None with `step`.
        plan: the plan to check.
        step: your own training step in place of a batch, which runs twelve to eighteen times, always from the same parameters
            (also others that the optimizers step over), gradients, buffers and state of the optimizers; other changes remain.
        optimizer: its state counts; it steps only if `step` has it step.
        loss_fn: from the model's output to a scalar; see `record`.
        holds_output: as the profile was recorded; see `record`.
        gradients: as the profile was recorded; see `record`.
        compare: "step" runs the whole step without the plan; "units" compares unit by unit, which needs no more memory
            than full recompute; "auto" tries the step, and the units if the step runs out of memory. In a group it predicts
            whether the step fits, and compares units in all processes if it does not in one.
        time: measure the slowdown too: two rounds of a step without the plan and one under it, up to five if these differ,
            after two steps under the plan, which take longer.
        group: the processes that verify together, each its own step, and all get one report: a process group or a device mesh;
            by default those that the model is spread over; "alone" for a separate report.

    Returns:
        The findings; `print(report)` shows them in four lines, or five if the loss is chunked, and one more in a group.

    Raises:
        ArgumentError: the model is not a module, or the plan not a plan.
        UnknownNameError, RecordError: see `apply` and `record`; or both or neither of batch and step; or a process of the group
            does not verify.
        PlanError: the processes of the group have different plans.
        NotYetError: units would be compared, of a model that FSDP2 shards.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        >>> x = torch.randn(8, 32)
        >>> plan = recollect.classic_plan(recollect.record(model, x, loss_fn=torch.sum), "full")
        >>> recollect.verify(model, x, plan, loss_fn=torch.sum).equal
        True
    """
    given = Step(model, batch, step, optimizer, loss_fn, holds_output, gradients)
    given.check("verify(model, batch, plan)")
    check_kind("verify(model, batch, plan)", "plan", plan, Plan, "recollect.Plan")
    check_optimizers(model, optimizer)
    ranks = ranks_of(model, group, "verify(model, batch, plan)")
    # Otherwise one compares fewer units than the others, and they wait for each other at different places.
    check_same_plans([plan], ranks)
    # Before anything is copied here.
    others_bytes = other_bytes(given.device, resident_tensors(model, batch, optimizer))
    verified: VerifiedStep = BatchStep(given) if step is None else OwnStep(given)
    check = _Check(verified, others_bytes, ranks, is_timed=time)
    text, most = _work(plan, compare, is_timed=time)
    with stage(text, total=most) as verified.done, verified.undisturbed(), without_plans(model):
        if ranks.is_alone:
            return _checked(check, plan, compare, may_fall_back=step is None)

        if compare == "auto":
            compare = "step" if step is not None or _all_fit(ranks, given) else "units"
        report = ranks.together(lambda: _checked(check, plan, compare, may_fall_back=False), Place.START)
        return report_of_ranks(ranks.gather(report, Place.START), ranks.ranks)


def _work(plan: Plan, compare: str, *, is_timed: bool) -> tuple[str, int | None]:
    """Describe what `verify` is about to do and return its largest number of steps; None if it compares units."""
    if compare == "units":
        return "verifying the plan unit by unit", None
    # Two for each peak, and one to compare on either side; one of the unchanged model; and one before each peak that compiles.
    fewest = 6 + (plan.loss_chunks > 1 or plan.is_compiled) + 2 * plan.is_compiled
    fewest += (_UNSETTLED + 2 * _FEWEST_ROUNDS if _stays(plan) else 2 * (_FEWEST_ROUNDS - 1)) * is_timed
    most = fewest + 2 * (_MOST_ROUNDS - _FEWEST_ROUNDS) * is_timed
    return f"verifying the plan in {fewest if fewest == most else f'{fewest} to {most}'} steps", most


def _checked(check: _Check, plan: Plan, compare: Literal["auto", "step", "units"], *, may_fall_back: bool) -> Report:
    """Compare the step, or units; `may_fall_back`: use units if the step, not asked for explicitly, runs out of memory."""
    if compare != "units":
        try:
            return check.by_step(plan)
        except (torch.OutOfMemoryError, MemoryError):
            if compare == "step" or not may_fall_back:
                raise
            check.step.clear()
    return check.by_unit(plan)


def _all_fit(ranks: Ranks, step: Step) -> bool:
    """Predict whether the step fits without a plan in all processes; on a CPU, whose memory processes share, it does."""
    usable_bytes = _USABLE * memory_bytes(step.device)
    if ranks.all_of([not usable_bytes], Place.START)[0]:
        return True
    # All together, since the step may need all of them.
    options = {name: getattr(step, name) for name in ("optimizer", "loss_fn", "holds_output", "gradients")}
    profile = record(step.model, step.batch, group="alone", **options)
    peak_bytes = classic_plan(profile, "keep_all").predicted_peak_bytes or 0
    return ranks.all_of([not usable_bytes or peak_bytes <= usable_bytes], Place.START)[0]


@dataclass(eq=False)
class _Check:
    step: VerifiedStep
    others_bytes: int
    """Bytes that a CUDA device held besides the step's tensors before anything was copied."""
    ranks: Ranks
    is_timed: bool

    def __post_init__(self) -> None:
        self.model, self.batch, self.device = self.step.model, self.step.given.batch, self.step.device
        self.optimizer_bytes = record_optimizer_step(self.step.given.optimizer, self.device).state_bytes
        # On CUDA they are among the others.
        buckets = GradientBuckets(self.model, may_communicate=True)
        self.buckets_bytes = sum(buckets.sizes_bytes) if self.device.type == "cpu" else 0
        self.first_bytes: int | None = None

    def by_step(self, plan: Plan) -> Report:
        # Peaks first: gradients to compare with would count on CUDA.
        with without_choices(self.model, plan):
            plain_peak_bytes = self._peak(is_compiled=plan.is_compiled).peak_bytes
        peak = self._peak_of(plan)
        # The unchanged model: without chunks of the loss, and without torch.compile.
        bare = self.step.run() if plan.loss_chunks > 1 or plan.is_compiled else None
        expected, plain_s = timed(lambda: self._reference(plan), self.device)
        off = None if bare is None else furthest(bare.gradients, expected.gradients)
        del bare
        with apply(self.model, plan) as applied:
            got, plan_s = timed(self.step.run, self.device)
            host = applied.host_use
        findings = compare_runs(expected, got, again=lambda: self._reference(plan), in_any=self._in_any)
        # The loss is not a gradient.
        findings = replace(findings, num_compared=findings.num_compared - ("the loss" in expected.gradients))
        del got
        slowdowns = self._slowdowns(plan, plan_s / plain_s - 1) if self.is_timed else ()
        made = self._report(
            plan,
            "step",
            findings,
            peak,
            plain_peak_bytes=plain_peak_bytes,
            measured_slowdown=statistics.median(slowdowns) if slowdowns else None,
            slowdowns=slowdowns,
            unchunked_difference=off if plan.loss_chunks > 1 else None,
            eager_difference=off if plan.is_compiled else None,
            eager_tolerance=max(
                (torch.finfo(p.dtype).eps ** 0.5 for p in self.model.parameters() if p.is_floating_point()), default=0.0
            ),
            host=host,
        )
        if slowdowns:
            SLOWDOWNS[plan] = made.slowdown_text()
        return made

    def _reference(self, plan: Plan) -> Computed:
        with loss_in_chunks(self.model, plan.loss_chunks), without_choices(self.model, plan):
            return self.step.run()

    def _in_any(self, flag: bool) -> bool:
        """Return whether something holds in any process; all have to know before they run a step again."""
        return not self.ranks.all_of([not flag], Place.START)[0]

    def by_unit(self, plan: Plan) -> Report:
        if fully_sharded_modules(self.model):
            raise NotYetError(
                settings={"compare": "units"},
                needs="units that run by themselves with the parameters that FSDP2 gathers for them",
                advice='Verify a step that fits without the plan, as of a smaller batch, with compare="step".',
            )
        peak = self._peak_of(plan)
        # Whole logits did not fit, so they would not fit here either.
        with loss_in_chunks(self.model, plan.loss_chunks, without_gradients=True):
            found = compare_units(self.model, plan, lambda: call_model(self.model, self.batch), self._in_any)
        return self._report(plan, "units", found, peak)

    def _report(
        self,
        plan: Plan,
        compared: Literal["step", "units"],
        findings: Findings,
        peak: PeakMeasurement[Any],
        **of_step: Any,
    ) -> Report:
        return Report(
            compared=compared,
            gradients_equal=findings.difference is None,
            first_difference=findings.difference,
            first_state_difference=findings.state_difference,
            num_compared=findings.num_compared,
            plan_peak_bytes=peak.peak_bytes,
            plan_reserved_bytes=peak.peak_reserved_bytes,
            plan_fragmentation_bytes=peak.fragmentation_bytes,
            predicted_peak_bytes=plan.predicted_peak_bytes,
            predicted_slowdown=plan.predicted_slowdown,
            loss_chunks=plan.loss_chunks,
            plain_difference=findings.plain_difference,
            predicted_host_bytes=plan.predicted_host_bytes,
            left_gradients_bytes=self.step.left_gradients_bytes,
            **of_step,
        )

    def _peak_of(self, plan: Plan) -> PeakMeasurement[Any]:
        with apply(self.model, plan):
            return self._peak(is_compiled=plan.is_compiled)

    def _peak(self, *, is_compiled: bool = False) -> PeakMeasurement[Any]:
        """Measure two steps of the loop, with a baseline that includes the optimizer's state, as in a budget."""
        if is_compiled:
            self.step.run()  # The first one compiles.
            self.step.clear()
        self.step.prepare_loop()
        resident = (t for t in resident_tensors(self.model, self.batch) if t.device == self.device)
        # Runs leave something behind, such as workspaces of libraries; each is measured with the same tensors in memory.
        now_bytes = allocated_bytes(self.device)
        self.first_bytes = now_bytes if self.first_bytes is None else self.first_bytes
        others_bytes = self.others_bytes + max(0, now_bytes - self.first_bytes)
        baseline_bytes = storage_bytes(resident) + self.optimizer_bytes + others_bytes + self.buckets_bytes
        empty_cache(self.device)
        with stage("measuring the peak"):
            measured = measure_peak(self.step.loop, device=self.device, baseline_bytes=baseline_bytes)
        self.step.clear()
        return measured

    def _slowdowns(self, plan: Plan, first: float) -> tuple[float, ...]:
        """Return the slowdown in each round; `first` if the plan was applied for the first time."""
        stays = _stays(plan)
        found = [] if stays else [first]
        with stage("timing steps"), ExitStack() as stack:
            applied = stack.enter_context(apply(self.model, plan)) if stays else None
            for _ in range(_UNSETTLED if stays else 0):
                self.step.run()
            while len(found) < _FEWEST_ROUNDS or (len(found) < _MOST_ROUNDS and self._in_any(not _have_settled(found))):
                with nullcontext() if applied is None else applied.suspended():
                    _, plain_s = timed(lambda: self._reference(plan), self.device)
                with apply(self.model, plan) if applied is None else nullcontext():
                    _, plan_s = timed(self.step.run, self.device)
                # The ratio of neighbours: a machine that slows down favours neither.
                found.append(plan_s / plain_s - 1)
        return tuple(found)


def _stays(plan: Plan) -> bool:
    """Whether a plan stays applied, and steps aside, while steps are timed; the plain step of others is under a plan, too."""
    return not plan.is_compiled and plan.loss_chunks == 1


def _have_settled(slowdowns: list[float]) -> bool:
    return max(slowdowns) - min(slowdowns) <= _SETTLED * (1 + statistics.median(slowdowns))
