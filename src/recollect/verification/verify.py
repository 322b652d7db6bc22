"""Check a plan on the real model: gradients, peak and slowdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from recollect.applying import applied_to, apply
from recollect.byte_format import format_bytes
from recollect.loss.intercept import loss_in_chunks
from recollect.measuring.device_memory import OtherAllocations, empty_cache
from recollect.measuring.meter import PeakMeasurement, measure_peak, storage_bytes
from recollect.measuring.timing import timed
from recollect.plans.plan import Plan
from recollect.recording.model_step import (
    LossFunction,
    call_model,
    device_of,
    resident_tensors,
    restored_buffers,
    run_forward,
    undisturbed,
)
from recollect.recording.optimizer_step import record_optimizer_step
from recollect.verification.units import compare_units, first_difference

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

    def __str__(self) -> str:
        how = ", unit by unit" if self.compared == "units" else ""
        equal = f"equal bit for bit ({self.num_compared} compared{how})"
        if self.first_difference is not None:
            name, difference = self.first_difference
            equal = f"DIFFERENT, first at {name}, by up to {difference:.3g}"
        lines = [f"gradients        {equal}"]
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
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: LossFunction | None = None,
    compare: Literal["auto", "step", "units"] = "auto",
) -> Report:
    """Run the step with and without the plan, from the same random state on the same data, and compare.

    Parameters, gradients, buffers and random generators are restored; the optimizer does not step. A plan that is already
    applied is suspended meanwhile.

    Args:
        model: the model that the plan is for.
        batch: a tensor, tuple or dict, passed to the model as `record` does.
        plan: the plan to check.
        optimizer: its state counts; it does not step.
        loss_fn: from the model's output to a scalar; see `record`.
        compare: "step" runs the whole step without the plan; "units" compares unit by unit, which needs no more memory
            than full recompute; "auto" tries the step, and the units if the step runs out of memory.

    Returns:
        The findings; `print(report)` shows them in four lines, or five if the loss is chunked.

    Raises:
        UnknownNameError, RecordError: see `apply` and `record`.

    Example:
        >>> import torch, recollect
        >>> from recollect.lab.models.architectures import llama_config
        >>> from recollect.lab.models.gpt import GPTModel
        >>> model = GPTModel(llama_config(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64))
        >>> tokens = torch.randint(0, 64, (2, 32))
        >>> batch = {"tokens": tokens, "labels": tokens}
        >>> plan = recollect.classic_plan(recollect.record(model, batch), "full")
        >>> recollect.verify(model, batch, plan).gradients_equal
        True
    """
    check = _Check(model, batch, optimizer, loss_fn)
    with undisturbed(model), _without_plans(model):
        if compare != "units":
            try:
                return check.by_step(plan)
            except (torch.OutOfMemoryError, MemoryError):
                if compare == "step":
                    raise
                check.clear()
        return check.by_unit(plan)


class _Check:
    def __init__(
        self, model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None, loss_fn: LossFunction | None
    ) -> None:
        self.model = model
        self.batch = batch
        self.loss_fn = loss_fn
        self.device = device_of(model, batch)
        self.optimizer_bytes = record_optimizer_step(optimizer, self.device).state_bytes
        self.others = OtherAllocations(self.device, resident_tensors(model, batch, optimizer))
        self.random_state = torch.random.get_rng_state()

    def by_step(self, plan: Plan) -> Report:
        plain_peak_bytes = self._peak().peak_bytes
        expected = self._gradients()
        off = None
        if plan.loss_chunks > 1:
            with loss_in_chunks(self.model, plan.loss_chunks):
                unchunked, expected = expected, self._gradients()
            off = _largest_difference(unchunked, expected)
            del unchunked
        with apply(self.model, plan):
            peak = self._peak()
            got = self._gradients()
        difference = first_difference(expected, got)
        del got
        plain_difference = None if difference is None else first_difference(expected, self._again(plan))
        slowdown = self._slowdown(plan)
        return self._report(
            plan,
            "step",
            difference,
            len(expected) - 1,
            plain_peak_bytes,
            peak,
            slowdown,
            off,
            plain_difference,
        )

    def _again(self, plan: Plan) -> dict[str, torch.Tensor]:
        """Run the reference step once more."""
        with loss_in_chunks(self.model, plan.loss_chunks):
            return self._gradients()

    def by_unit(self, plan: Plan) -> Report:
        with apply(self.model, plan):
            peak = self._peak()
        # Whole logits did not fit, so they would not fit here either.
        with loss_in_chunks(self.model, plan.loss_chunks, without_gradients=True):
            found = compare_units(self.model, plan, lambda: call_model(self.model, self.batch))
        difference, plain_difference, num_compared = found
        return self._report(
            plan, "units", difference, num_compared, None, peak, None, plain_difference=plain_difference
        )

    def _report(
        self,
        plan: Plan,
        compared: Literal["step", "units"],
        difference: tuple[str, float] | None,
        num_compared: int,
        plain_peak_bytes: int | None,
        peak: PeakMeasurement[Any],
        slowdown: float | None,
        unchunked_difference: tuple[str, float] | None = None,
        plain_difference: tuple[str, float] | None = None,
    ) -> Report:
        return Report(
            compared=compared,
            gradients_equal=difference is None,
            first_difference=difference,
            num_compared=num_compared,
            plain_peak_bytes=plain_peak_bytes,
            plan_peak_bytes=peak.peak_bytes,
            plan_reserved_bytes=peak.peak_reserved_bytes,
            plan_fragmentation_bytes=peak.fragmentation_bytes,
            predicted_peak_bytes=plan.predicted_peak_bytes,
            predicted_slowdown=plan.predicted_slowdown,
            measured_slowdown=slowdown,
            loss_chunks=plan.loss_chunks,
            unchunked_difference=unchunked_difference,
            plain_difference=plain_difference,
        )

    def clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def _step(self) -> torch.Tensor:
        torch.random.set_rng_state(self.random_state)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(0)
        loss = run_forward(self.model, self.batch, self.loss_fn)
        loss.backward()
        return loss.detach()

    def _gradients(self) -> dict[str, torch.Tensor]:
        self.clear()
        with restored_buffers(self.model):
            loss = self._step()
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.clear()
        return {"the loss": loss, **gradients}

    def _peak(self) -> PeakMeasurement[Any]:
        """Measure the step, with a baseline that includes the optimizer's state, as in a budget."""
        self.clear()
        # Gradients from before are set aside and do not count.
        resident = (t for t in resident_tensors(self.model, self.batch) if t.device == self.device)
        resident_bytes = storage_bytes(resident) + self.optimizer_bytes
        with restored_buffers(self.model):
            baseline_bytes = resident_bytes + self.others.before_step()
            empty_cache(self.device)
            measured = measure_peak(self._step, device=self.device, baseline_bytes=baseline_bytes)
        self.clear()
        return measured

    def _slowdown(self, plan: Plan) -> float:
        plain_s, plan_s = [], []
        for _ in range(_NUM_TIMINGS):
            with loss_in_chunks(self.model, plan.loss_chunks):
                plain_s.append(self._seconds())
            with apply(self.model, plan):
                plan_s.append(self._seconds())
        # The ratio of neighbours, so that a machine that slows down favours neither.
        return statistics.median(b / a for a, b in zip(plain_s, plan_s, strict=True)) - 1

    def _seconds(self) -> float:
        self.clear()
        with restored_buffers(self.model):
            return timed(self._step, self.device)[1]


def _largest_difference(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> tuple[str, float]:
    """Return the name of the most different tensor, and the norm of the difference over the norm."""
    far = {}
    for name, tensor in expected.items():
        exact, other = tensor.double(), got[name].double()
        norm = float(exact.norm())
        far[name] = float((exact - other).norm()) / norm if norm else float(other.norm())
    name = max(far, key=lambda name: far[name])
    return name, far[name]


@contextmanager
def _without_plans(model: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for applied in applied_to(model):
            stack.enter_context(applied.suspended())
        yield
