"""Finds out which layers of a model are recomputed or offloaded, whoever does that, by watching one step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from recollect._torch_private import is_compiled_module
from recollect.applying import applied_to
from recollect.byte_format import format_bytes
from recollect.errors import NotYetError, RecordError
from recollect.notebooks import ShownInNotebooks
from recollect.observing.reasons import Reasons
from recollect.observing.step_watch import Seen, StepWatch
from recollect.plans.action import EngineChoice
from recollect.plans.text import label_paths, wrap
from recollect.recording.fake_model import fake_run
from recollect.recording.find_units import Unit, class_of, find_units
from recollect.recording.model_step import (
    LossFunction,
    check_step,
    describe_batch,
    device_of,
    find_loss,
    loss_in,
    run_model,
)
from recollect.recording.restored_state import free_gradients, undisturbed

_COLUMNS = 100
_WHOLE, _OUTSIDE = "the model", "all else"
_HEADS = ("ops", "run again", "made again", "kept", "offloaded", "")


@dataclass(frozen=True, kw_only=True)
class UnitCoverage:
    """What one unit recomputes, keeps and offloads; added up over its calls in the step.

    Attributes:
        name: module path of the unit; empty for all that is outside of units.
        calls: how often its forward ran, not counting runs in backward.
        ops: ops of its forward; views do not count.
        recomputed_ops: ops of forward that ran again in backward.
        recomputed_bytes: bytes that these made.
        kept_bytes: bytes that it made in forward, and that are alive on the device when backward begins. Its input belongs
            to the unit before it.
        offloaded_bytes: bytes in host memory in their place.
        is_layer: whether it is one of the layers that are counted, and not embedding, norm or head.
        reason: why it is not covered, as far as it can be seen; empty if it is, or is no layer.
    """

    name: str
    calls: int
    ops: int
    recomputed_ops: int
    recomputed_bytes: int
    kept_bytes: int
    offloaded_bytes: int
    is_layer: bool
    reason: str

    @property
    def covered(self) -> bool:
        """Whether anything of it is computed again in backward, or leaves the device until then."""
        return bool(self.recomputed_ops or self.offloaded_bytes)


@dataclass(frozen=True, kw_only=True)
class Coverage(ShownInNotebooks):
    """What `coverage` found; printing it shows a table, and why layers are not covered.

    Attributes:
        model_class: the model's class.
        batch: the batch, in words; empty with `step`.
        units: the units, in the order of the model; the last is what is outside of them, such as the loss.
        note: what to know about these numbers; empty if nothing.
    """

    model_class: str
    batch: str
    units: tuple[UnitCoverage, ...]
    note: str

    @property
    def layers(self) -> tuple[UnitCoverage, ...]:
        """The units that are layers."""
        return tuple(unit for unit in self.units if unit.is_layer)

    @property
    def uncovered(self) -> tuple[UnitCoverage, ...]:
        """The layers that nothing covers."""
        return tuple(unit for unit in self.layers if not unit.covered)

    def to_data(self) -> dict[str, Any]:
        """Return all numbers and reasons as JSON has them."""
        return {**asdict(self), "units": [{**asdict(unit), "covered": unit.covered} for unit in self.units]}

    def __str__(self) -> str:
        num_layers, num_uncovered = len(self.layers), len(self.uncovered)
        of = f"{num_layers - num_uncovered} of {num_layers} layers {'is' if num_layers == 1 else 'are'} covered"
        lines = [f"{self.model_class}{self.batch and f', {self.batch}'}", of, "", *self._table()]
        paths_of: dict[str, list[str]] = {}
        for unit in self.uncovered:
            paths_of.setdefault(unit.reason, []).append(unit.name or _WHOLE)
        if paths_of:
            lines += ["", f"{num_uncovered} {'is' if num_uncovered == 1 else 'are'} not, because"]
        for reason, paths in paths_of.items():
            lines += wrap(f"{label_paths(paths)}: {reason}.", _COLUMNS, start="  ", hang="    ")
        return "\n".join([*lines, *([self.note] if self.note else [])])

    def _table(self) -> list[str]:
        alike: dict[tuple[str, ...], list[str]] = {}
        for unit in self.units:
            sizes = map(format_bytes, (unit.recomputed_bytes, unit.kept_bytes, unit.offloaded_bytes))
            is_covered = "covered" if unit.covered else "NOT COVERED" if unit.is_layer else ""
            cells = (f"{unit.ops}", f"{unit.recomputed_ops}", *sizes, is_covered)
            alike.setdefault(cells, []).append(unit.name or (_OUTSIDE if unit is self.units[-1] else _WHOLE))
        rows = [("", *_HEADS), *((label_paths(paths), *cells) for cells, paths in alike.items())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:-1]), row[-1]]).rstrip()
            for row in rows
        ]


def coverage(
    model: nn.Module,
    batch: Any = None,
    *,
    step: Callable[[], object] | None = None,
    loss_fn: LossFunction | None = None,
    units: Iterable[str] | None = None,
    fake: bool = False,
) -> Coverage:
    """Run one step of a model as it is, and tell which of its layers are recomputed or offloaded, and why others are not.

    Whatever recomputes is seen at work, not asked for its settings: Hugging Face's switch, PyTorch's `checkpoint` and
    `checkpoint_wrapper`, DeepSpeed's or Megatron's function, an applied plan. With a batch, the step leaves no traces, as in
    `record`; a step of your own trains, as it does without this.

    Args:
        model: any module, in the mode (train or eval) in which it is trained.
        batch: a tensor, tuple or dict, passed as `model(batch)`, `model(*batch)` or `model(**batch)`.
        step: runs a training step, without arguments, in place of `batch`.
        loss_fn: from the model's output to a scalar; by default `output.loss`, or the output itself if it is a scalar.
        units: module paths of the layers, where `find_units` does not find them.
        fake: run on fake tensors, without memory or arithmetic; the model may be on the meta device.

    Returns:
        A row for each unit. Where `torch.compile` is in use the step runs without it: what it covers is the same, except
        for what the compiler chooses by itself.

    Raises:
        UnsupportedModelError: there are no layers in the model.
        NotYetError: a plan is applied that has compiled layers; or, with `fake`, one that offloads.
        RecordError: both or neither of `batch` and `step`, or `fake` with `step`; the model rejected the batch; or the loss
            is not a scalar or does not require grad, for another reason than a checkpoint.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> from torch.utils.checkpoint import checkpoint
        >>> class Stack(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))
        ...
        ...     def forward(self, x):
        ...         for i, layer in enumerate(self.layers):
        ...             x = checkpoint(layer, x, use_reentrant=False) if i < 1 else layer(x)
        ...         return x
        >>> found = recollect.coverage(Stack(), torch.randn(2, 8), loss_fn=torch.sum)
        >>> [unit.name for unit in found.layers if unit.covered]
        ['layers.0']
    """
    check_step(model, batch, step, "coverage(model, batch)")
    if fake and step is not None:
        raise RecordError("coverage(model, step=..., fake=True): got a step, expected a batch: a step runs on real tensors.")
    _check_plans(model, fake=fake)
    found, device = find_units(model, units), device_of(model, batch)
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        sent = _sent_bytes(model)
        if fake:
            batch = stack.enter_context(fake_run(model, batch, device))
        elif step is None:
            stack.enter_context(undisturbed(model))
        watch = StepWatch(model, found, device)
        with watch.watching():
            has_run = _run_batch(model, batch, loss_fn, watch) if step is None else (step(), True)[1]
        for path, nbytes in _sent_bytes(model).items():
            watch.seen[path].offloaded_bytes += nbytes - sent.get(path, 0)
        rows = _rows(model, found, watch, is_on_cpu=device.type == "cpu")
        if step is None:
            free_gradients(model.parameters())
    return Coverage(
        model_class=type(model).__name__,
        batch=describe_batch(batch) if step is None else "",
        units=rows,
        note=_note(model, has_run=has_run),
    )


def _run_batch(model: nn.Module, batch: Any, loss_fn: LossFunction | None, watch: StepWatch) -> bool:
    """Run forward and backward; return whether there was anything to do for backward.

    There is not where reentrant checkpoints cut the whole graph, which is for the reasons to say.
    """
    name = type(model).__name__
    output = run_model(model, batch)
    loss = find_loss(output, name) if loss_fn is None else loss_fn(output)
    del output
    is_cut = any(seen.calls_without_gradients for seen in watch.seen.values())
    if is_cut and isinstance(loss, torch.Tensor) and not loss.requires_grad:
        return False
    loss_in(loss, name, lambda loss: loss).backward()
    return True


def _note(model: nn.Module, *, has_run: bool) -> str:
    if not has_run:
        return "The loss does not require grad, so there is no backward."
    is_compiled = any(is_compiled_module(module) for module in model.modules())
    return "Counted without torch.compile, which may choose to keep less." if is_compiled else ""


def _check_plans(model: nn.Module, *, fake: bool) -> None:
    for plan in (applied.plan for applied in applied_to(model) if applied.plan is not None):
        compiled = [path for path, unit in plan.units.items() if unit.engine is EngineChoice.COMPILE]
        if compiled or (fake and plan.offloads):
            raise NotYetError(
                settings={"coverage": compiled[0]} if compiled else {"fake": True},
                needs="a look into compiled code" if compiled else "copies to host memory, which fake tensors have none of",
                advice="Read print(plan), which says what these layers keep." if compiled else "Run it on real tensors.",
            )


def _sent_bytes(model: nn.Module) -> dict[str, int]:
    """Return the bytes that applied plans have offloaded so far, by unit."""
    uses = [applied.host_use for applied in applied_to(model)]
    return {path: nbytes for use in uses if use is not None for path, nbytes in use.sent_bytes.items()}


def _rows(model: nn.Module, units: list[Unit], watch: StepWatch, *, is_on_cpu: bool) -> tuple[UnitCoverage, ...]:
    def row(seen: Seen, name: str = "", *, is_layer: bool = False, reason: str = "") -> UnitCoverage:
        return UnitCoverage(
            name=name,
            calls=seen.calls,
            ops=seen.ops,
            recomputed_ops=seen.recomputed_ops,
            recomputed_bytes=seen.recomputed_bytes,
            kept_bytes=seen.kept_bytes,
            offloaded_bytes=seen.offloaded_bytes,
            is_layer=is_layer,
            reason=reason,
        )

    rows = [row(watch.seen[unit.path], unit.path, is_layer=unit.is_layer) for unit in units]
    classes = {unit.path: class_of(unit.module).__name__ for unit in units}
    covered = tuple(dict.fromkeys(classes[one.name] for one in rows if one.is_layer and one.covered))
    reasons = Reasons(model, covered, is_on_cpu)
    explained = [
        row(seen, unit.path, is_layer=unit.is_layer, reason=reasons.of(unit, seen))
        if (seen := watch.seen[unit.path]) and unit.is_layer and not one.covered
        else one
        for unit, one in zip(units, rows, strict=True)
    ]
    return (*explained, row(watch.outside))
