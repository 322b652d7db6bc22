"""Check a plan on the real model: gradients, peak and slowdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from recollect._torch_parallel import GradientBuckets
from recollect.applying import applied_to, apply
from recollect.arguments import check_kind
from recollect.byte_format import format_bytes
from recollect.loss.intercept import loss_in_chunks
from recollect.measuring.device_memory import OtherAllocations, empty_cache
from recollect.measuring.meter import PeakMeasurement, measure_peak, storage_bytes
from recollect.measuring.timing import timed
from recollect.plans.plan import Plan
from recollect.progress.stage import stage
from recollect.recording.model_step import (
    LossFunction,
    call_model,
    check_step,
    device_of,
    resident_tensors,
)
from recollect.recording.optimizer_step import record_optimizer_step
from recollect.recording.optimizers import Optimizers, check_optimizers
from recollect.recording.step_recording import Gradients
from recollect.verification.compare import Computed, Findings, compare_runs, furthest
from recollect.verification.steps import BatchStep, OwnStep, VerifiedStep
from recollect.verification.units import compare_units

_NUM_TIMINGS = 5


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `verify` found.

    Attributes:
        compared: "step" if the whole step ran with and without the plan; "units" if the plain step does not fit, so that
            each unit was compared alone, on the inputs that it gets in the step.
        gradients_equal: every gradient has the same bits with and without the plan, and so has the loss. If the plan chunks
            the loss, "without the plan" means with the same chunks but without recompute.
        first_difference: name of the first parameter (or unit, or "the loss") that differs, and the largest absolute
            difference; None if there is none.
        first_state_difference: the same for what the step leaves behind besides gradients: "buffer layers.0.running_mean", or
            "random generator".
        plain_difference: the same between two steps (or two runs of that unit) without the plan, if they differ. Kernels are
            not deterministic then, and the plan need not be the cause of a difference.
        num_compared: number of gradients compared.
        plain_peak_bytes, plan_peak_bytes: measured peaks of forward and backward, including parameters, buffers, batch and
            optimizer state; None if the plain step did not run.
        plan_reserved_bytes, plan_fragmentation_bytes: on CUDA, the most bytes that the caching allocator held in the step
            with the plan, and how many of them were unused; the prediction excludes them. None on the CPU.
        predicted_peak_bytes, predicted_slowdown: the plan's predictions.
        measured_slowdown: median of the ratio of times with the plan and without recompute (both with the plan's loss chunks,
            as in the prediction), minus one; runs alternate.
        loss_chunks: parts of the plan's loss; with more than one, sums have another order than the model's.
        unchunked_difference: the gradient (or "the loss") furthest from that of the unchunked model, and its distance: the norm
            of the difference over the norm; None with one chunk, or if the plain step did not run.
    """

    compared: Literal["step", "units"]
    gradients_equal: bool
    first_difference: tuple[str, float] | None
    num_compared: int
    plain_peak_bytes: int | None
    plan_peak_bytes: int
    predicted_peak_bytes: int | None
    predicted_slowdown: float | None
    measured_slowdown: float | None
    loss_chunks: int = 1
    unchunked_difference: tuple[str, float] | None = None
    plan_reserved_bytes: int | None = None
    plan_fragmentation_bytes: int | None = None
    plain_difference: tuple[str, float] | None = None
    first_state_difference: tuple[str, float] | None = None

    @property
    def equal(self) -> bool:
        """Whether gradients, loss, buffers and random generators all have the same bits with and without the plan."""
        return self.gradients_equal and self.first_state_difference is None

    def __str__(self) -> str:
        how = ", unit by unit" if self.compared == "units" else ""
        equal = f"equal bit for bit ({self.num_compared} compared{how})"
        if self.first_difference is not None:
            name, difference = self.first_difference
            equal = f"DIFFERENT, first at {name}, by up to {difference:.3g}"
        lines = [f"gradients        {equal}"]
        if self.first_state_difference is not None:
            name, difference = self.first_state_difference
            lines.append(f"left behind      DIFFERENT, first at {name}, by up to {difference:.3g}")
        if self.plain_difference is not None:
            name, difference = self.plain_difference
            lines.append(
                f"                 two runs without the plan differ, too, first at {name}, by up to {difference:.3g}:"
            )
            lines.append("                 kernels are not deterministic; try torch.use_deterministic_algorithms(True)")
        if self.unchunked_difference is not None:
            name, difference = self.unchunked_difference
            lines.append(f"loss             in {self.loss_chunks} chunks: off by {difference:.1e} at most, at {name}")
        plain = "did not fit" if self.plain_peak_bytes is None else format_bytes(self.plain_peak_bytes)
        lines.append(f"peak without     {plain}")
        lines.append(f"peak with plan   {format_bytes(self.plan_peak_bytes)}{self._compared_peak()}")
        if self.plan_reserved_bytes is not None and self.plan_fragmentation_bytes is not None:
            fragmentation = format_bytes(self.plan_fragmentation_bytes)
            lines.append(f"reserved         {format_bytes(self.plan_reserved_bytes)} ({fragmentation} fragmentation)")
        if self.measured_slowdown is not None:
            predicted = "" if self.predicted_slowdown is None else f" (predicted {self.predicted_slowdown:.1%})"
            lines.append(f"slowdown         {self.measured_slowdown:.1%}{predicted}")
        return "\n".join(lines)

    def _compared_peak(self) -> str:
        if self.predicted_peak_bytes is None:
            return ""
        off = self.plan_peak_bytes / self.predicted_peak_bytes - 1
        return f" (predicted {format_bytes(self.predicted_peak_bytes)}, measured {off:+.2%})"


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
) -> Report:
    """Run the step with and without the plan, from the same random state on the same data, and compare.

    Parameters, gradients, buffers and random generators are restored; the optimizer does not step. A plan that is already
    applied is suspended meanwhile.

    Args:
        model: the model that the plan is for.
        batch: a tensor, tuple or dict, passed to the model as `record` does; None with `step`.
        plan: the plan to check.
        step: your own training step in place of a batch, which runs about twenty times, each time from the same parameters,
            gradients, buffers and state of the optimizers; what else it changes stays changed.
        optimizer: its state counts; it does not step, unless `step` has it step.
        loss_fn: from the model's output to a scalar; see `record`.
        holds_output: as the profile was recorded; see `record`.
        gradients: as the profile was recorded; see `record`.
        compare: "step" runs the whole step without the plan; "units" compares unit by unit, which needs no more memory
            than full recompute; "auto" tries the step, and the units if the step runs out of memory.

    Returns:
        The findings; `print(report)` shows them in four lines, or five if the loss is chunked.

    Raises:
        ArgumentError: the model is no module, or the plan no plan.
        UnknownNameError, RecordError: see `apply` and `record`; or both or neither of batch and step.

    Example:
        >>> import torch, recollect
        >>> from recollect.lab.models.architectures import llama_config
        >>> from recollect.lab.models.gpt import GPTModel
        >>> model = GPTModel(llama_config(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64))
        >>> tokens = torch.randint(0, 64, (2, 32))
        >>> batch = {"tokens": tokens, "labels": tokens}
        >>> plan = recollect.classic_plan(recollect.record(model, batch), "full")
        >>> recollect.verify(model, batch, plan).equal
        True
    """
    check_step(model, batch, step, "verify(model, batch, plan)")
    check_kind("verify(model, batch, plan)", "plan", plan, Plan, "recollect.Plan")
    check_optimizers(model, optimizer)
    device = device_of(model, batch)
    # Before anything is copied here.
    others = OtherAllocations(device, resident_tensors(model, batch, optimizer))
    verified: VerifiedStep
    if step is None:
        verified = BatchStep(model, device, batch, loss_fn, holds_output=holds_output, gradients=gradients)
    else:
        verified = OwnStep(model, device, step, optimizer)
    check = _Check(verified, batch, optimizer, others)
    with stage("verifying the plan"), verified.undisturbed(), _without_plans(model):
        if compare != "units":
            try:
                return check.by_step(plan)
            except (torch.OutOfMemoryError, MemoryError):
                if compare == "step" or step is not None:
                    raise
                verified.clear()
        return check.by_unit(plan)


class _Check:
    def __init__(self, step: VerifiedStep, batch: Any, optimizer: Optimizers, others: OtherAllocations) -> None:
        self.step = step
        self.model = step.model
        self.batch = batch
        self.device = step.device
        self.optimizer_bytes = record_optimizer_step(optimizer, self.device).state_bytes
        self.others = others
        # On CUDA they are among the others.
        buckets = GradientBuckets(step.model, may_communicate=True)
        self.buckets_bytes = sum(buckets.sizes_bytes) if self.device.type == "cpu" else 0

    def by_step(self, plan: Plan) -> Report:
        # Peaks first: gradients to compare with would count on CUDA.
        plain_peak_bytes = self._peak().peak_bytes
        peak = self._peak_of(plan)
        expected = self.step.run()
        off = None
        if plan.loss_chunks > 1:
            with loss_in_chunks(self.model, plan.loss_chunks):
                unchunked, expected = expected, self.step.run()
            off = furthest(unchunked.gradients, expected.gradients)
            del unchunked
        with apply(self.model, plan):
            got = self.step.run()
        findings = compare_runs(expected, got, again=lambda: self._again(plan))
        # The loss is no gradient.
        findings = replace(findings, num_compared=findings.num_compared - ("the loss" in expected.gradients))
        del got
        return self._report(plan, "step", findings, plain_peak_bytes, peak, self._slowdown(plan), off)

    def _again(self, plan: Plan) -> Computed:
        """Run the reference step once more."""
        with loss_in_chunks(self.model, plan.loss_chunks):
            return self.step.run()

    def by_unit(self, plan: Plan) -> Report:
        peak = self._peak_of(plan)
        # Whole logits did not fit, so they would not fit here either.
        with loss_in_chunks(self.model, plan.loss_chunks, without_gradients=True):
            found = compare_units(self.model, plan, lambda: call_model(self.model, self.batch))
        return self._report(plan, "units", found, None, peak, None, None)

    def _report(
        self,
        plan: Plan,
        compared: Literal["step", "units"],
        findings: Findings,
        plain_peak_bytes: int | None,
        peak: PeakMeasurement[Any],
        slowdown: float | None,
        unchunked_difference: tuple[str, float] | None,
    ) -> Report:
        return Report(
            compared=compared,
            gradients_equal=findings.difference is None,
            first_difference=findings.difference,
            first_state_difference=findings.state_difference,
            num_compared=findings.num_compared,
            plain_peak_bytes=plain_peak_bytes,
            plan_peak_bytes=peak.peak_bytes,
            plan_reserved_bytes=peak.peak_reserved_bytes,
            plan_fragmentation_bytes=peak.fragmentation_bytes,
            predicted_peak_bytes=plan.predicted_peak_bytes,
            predicted_slowdown=plan.predicted_slowdown,
            measured_slowdown=slowdown,
            loss_chunks=plan.loss_chunks,
            unchunked_difference=unchunked_difference,
            plain_difference=findings.plain_difference,
        )

    def _peak_of(self, plan: Plan) -> PeakMeasurement[Any]:
        with apply(self.model, plan):
            return self._peak()

    def _peak(self) -> PeakMeasurement[Any]:
        """Measure two steps of the loop, with a baseline that includes the optimizer's state, as in a budget."""
        self.step.prepare_loop()
        resident = (t for t in resident_tensors(self.model, self.batch) if t.device == self.device)
        baseline_bytes = storage_bytes(resident) + self.optimizer_bytes + self.others.before_step() + self.buckets_bytes
        empty_cache(self.device)
        with stage("measuring the peak"):
            measured = measure_peak(self.step.loop, device=self.device, baseline_bytes=baseline_bytes)
        self.step.clear()
        return measured

    def _slowdown(self, plan: Plan) -> float:
        plain_s, plan_s = [], []
        with stage("timing steps", total=_NUM_TIMINGS) as done:
            for _ in range(_NUM_TIMINGS):
                with loss_in_chunks(self.model, plan.loss_chunks):
                    plain_s.append(self._seconds())
                with apply(self.model, plan):
                    plan_s.append(self._seconds())
                done()
        # The ratio of neighbours, so that a machine that slows down favours neither.
        return statistics.median(b / a for a, b in zip(plain_s, plan_s, strict=True)) - 1

    def _seconds(self) -> float:
        return timed(self.step.run, self.device)[1]


@contextmanager
def _without_plans(model: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for applied in applied_to(model):
            stack.enter_context(applied.suspended())
        yield
