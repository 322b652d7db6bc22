"""Finds out which layers of a model are recomputed or offloaded, by whatever means, by watching one step."""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from recollect._torch_private import is_compiled_module, without_wrapper
from recollect.applying import applied_to
from recollect.byte_format import format_bytes
from recollect.errors import NotYetError, RecordError
from recollect.notebooks import ShownInNotebooks
from recollect.observing.step_watch import OUTSIDE, StepWatch
from recollect.plans.action import EngineChoice
from recollect.plans.paths import paths_above
from recollect.plans.text import label_paths, wrap
from recollect.recording.fake_model import fake_run
from recollect.recording.find_units import Unit, find_units
from recollect.recording.model_step import LossFunction, Step, describe_batch
from recollect.recording.restored_state import free_gradients, undisturbed

_NO_GRADIENTS = (
    "NO GRADIENTS: it ran under torch.no_grad() and never again, and its trained parameters get none. A reentrant checkpoint "
    "does this if none of its inputs requires grad: pass use_reentrant=False, or call model.enable_input_require_grads()"
)


def reason_of(model: nn.Module, unit: Unit, watch: StepWatch, covered: Collection[str], *, is_on_cpu: bool) -> str:
    """Return why a layer is not covered; to be called right after the step, with its gradients.

    `covered`: the classes of the layers that are.
    """
    seen = watch.counts[unit.path]
    if not seen["calls"]:
        return "it was not called in the step, other than by its forward itself"
    trained = [parameter for parameter in unit.module.parameters() if parameter.requires_grad]
    is_blind = seen["calls"] == watch.without_gradients[unit.path]
    if trained and is_blind and all(parameter.grad is None for parameter in trained):
        return _NO_GRADIENTS
    if not trained and not seen["kept_bytes"]:
        return "it keeps nothing: no gradient goes through it"
    plans = [applied.plan for applied in applied_to(model) if applied.plan is not None]
    if plans:
        is_named = any(unit.path in plan.units for plan in plans)
        return "the plan keeps all of it" if is_named else "the plan does not name it, so it keeps all"
    if is_on_cpu and unit.path in watch.under_save_on_cpu:
        return "save_on_cpu copies nothing in a step on the CPU: what it saves is there already"
    found = list(_switches(model, unit))
    name, is_on, is_training = next((one for one in found if one[1]), (*found, ("", False, True))[0])
    if name and not is_on:
        return f"{name} is False"
    if name and not is_training:
        return f"{name} is True, but it is in eval mode, where such switches do nothing: call model.train()"
    text = f"{name} is True, but nothing of it ran again" if name else "nothing of it ran again"
    own = type(without_wrapper(unit.module)).__name__
    if covered and own not in covered:
        return f"{text}; its class is {own}, that of covered layers is {' or '.join(covered)}"
    return text if name or covered else f"{text}, and nothing in the model asks for that"


def _switches(model: nn.Module, unit: Unit) -> Iterator[tuple[str, bool, bool]]:
    """Yield the switches of a unit, its parts and what is around it: name, whether it is on, whether its module is training."""
    above = reversed(["", *paths_above(unit.path)]) if unit.path else ()
    around = [(f"{path}." if path else "the model's ", model.get_submodule(path)) for path in above]
    inside = [(f"its {path}." if path else "its ", module) for path, module in unit.module.named_modules()]
    for label, module in (*inside, *around):
        values = {name: value for scope in reversed(type(module).__mro__) for name, value in vars(scope).items()}
        for name, value in {**values, **vars(module)}.items():
            if isinstance(value, bool) and ("checkpoint" in name or "recompute" in name) and "support" not in name:
                yield f"{label}{name}", value, module.training


_COLUMNS = 100
_HEADS = ("", "ops", "run again", "made again", "kept", "offloaded", "")


@dataclass(frozen=True, kw_only=True)
class UnitCoverage:
    """What one unit recomputes, keeps and offloads; added up over its calls in the step.

    Attributes:
        name: module path of the unit; "all else" for everything outside units, such as the loss.
        is_layer: whether it is one of the layers that are counted, and not embedding, norm or head.
        reason: why it is not covered, as far as it can be seen; empty if it is, or is not a layer.
        calls: how often its forward ran, not counting runs in backward.
        ops: ops of its forward; views do not count.
        recomputed_ops: ops of forward that ran again in backward.
        recomputed_bytes: bytes that these made.
        kept_bytes: bytes that it made in forward, and that are alive on the device when backward begins. Its input belongs
            to the unit before it.
        offloaded_bytes: bytes in host memory in their place.
    """

    name: str
    is_layer: bool = False
    reason: str = ""
    calls: int = 0
    ops: int = 0
    recomputed_ops: int = 0
    recomputed_bytes: int = 0
    kept_bytes: int = 0
    offloaded_bytes: int = 0

    @property
    def covered(self) -> bool:
        """Whether anything of it is computed again in backward, or leaves the device until then."""
        return bool(self.recomputed_ops or self.offloaded_bytes)

    def _cells(self) -> tuple[str, ...]:
        sizes = map(format_bytes, (self.recomputed_bytes, self.kept_bytes, self.offloaded_bytes))
        found = "covered" if self.covered else "NOT COVERED" if self.is_layer else ""
        return str(self.ops), str(self.recomputed_ops), *sizes, found


@dataclass(frozen=True, kw_only=True)
class Coverage(ShownInNotebooks):
    """What `coverage` found; printing it shows a table, and why layers are not covered.

    Attributes:
        model_class: the model's class.
        batch: the batch, in words; empty with `step`.
        units: the units, in the order of the model; the last is everything outside of them.
        is_compiled: whether a module is compiled, which was not watched: the step ran without `torch.compile`.
    """

    model_class: str
    batch: str
    units: tuple[UnitCoverage, ...]
    is_compiled: bool = False

    @property
    def layers(self) -> tuple[UnitCoverage, ...]:
        """The units that are layers."""
        return tuple(unit for unit in self.units if unit.is_layer)

    def to_data(self) -> dict[str, Any]:
        """Return all numbers and reasons as JSON has them."""
        return {**asdict(self), "units": [{**asdict(unit), "covered": unit.covered} for unit in self.units]}

    def __str__(self) -> str:
        uncovered = [unit for unit in self.layers if not unit.covered]
        found = f"{len(self.layers) - len(uncovered)} of {len(self.layers)} layers covered"
        groups = _grouped((unit._cells(), unit.name) for unit in self.units)
        rows = [_HEADS, *((label, *cells) for cells, label in groups.items())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{self.model_class}{self.batch and f', {self.batch}'}: {found}", ""]
        for label, *numbers, found in rows:
            cells = (label.ljust(widths[0]), *map(str.rjust, numbers, widths[1:-1]), found)
            lines.append("  ".join(cells).rstrip())
        if uncovered:
            lines += ["", f"{len(uncovered)} not covered, because"]
        for reason, label in _grouped((unit.reason, unit.name) for unit in uncovered).items():
            lines += wrap(f"{label}: {reason}.", _COLUMNS, start="  ", hang="    ")
        if self.is_compiled:
            lines.append("Counted without torch.compile, which may choose to keep less.")
        return "\n".join(lines)


def _grouped(names: Iterable[tuple[Any, str]]) -> dict[Any, str]:
    found: dict[Any, list[str]] = {}
    for key, name in names:
        found.setdefault(key, []).append(name or "the model")
    return {key: label_paths(paths) for key, paths in found.items()}


def coverage(
    model: nn.Module,
    batch: Any = None,
    *,
    step: Callable[[], object] | None = None,
    loss_fn: LossFunction | None = None,
    units: Iterable[str] | None = None,
    fake: bool = False,
) -> Coverage:
    """Run one step of an unchanged model, and tell which of its layers are recomputed or offloaded, and why others are not.

    Recompute is observed, not read from settings: Hugging Face's switch, PyTorch's `checkpoint` and
    `checkpoint_wrapper`, DeepSpeed's or Megatron's function, an applied plan. With a batch, the step leaves no traces, as in
    `record`; a step of your own trains, as it does without this. It runs without `torch.compile`.

    Args:
        model: any module, in the mode (train or eval) in which it is trained.
        batch: a tensor, tuple or dict, passed as `model(batch)`, `model(*batch)` or `model(**batch)`.
        step: runs a training step, without arguments, in place of `batch`.
        loss_fn: from the model's output to a scalar; by default `output.loss`, or the output itself if it is a scalar.
        units: module paths of the layers, if `find_units` does not find them.
        fake: run on fake tensors, without memory or arithmetic; the model may be on the meta device.

    Returns:
        A row for each unit.

    Raises:
        UnsupportedModelError: there are no layers in the model.
        NotYetError: a plan is applied that has compiled layers; or, with `fake`, one that offloads.
        RecordError: both or neither of `batch` and `step`, or `fake` with `step`; the model rejected the batch; or the loss
            is not a scalar or does not require grad.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))
        >>> unit = recollect.UnitPlan({"0.addmm": "recompute", "1.gelu": "keep"})
        >>> _ = recollect.apply(model, recollect.Plan({"0": unit}))
        >>> found = recollect.coverage(model, torch.randn(2, 8), loss_fn=torch.sum)
        >>> [unit.name for unit in found.layers if unit.covered]
        ['0']
    """
    seen = Step(model, batch, step, loss_fn=loss_fn, holds_output=False)
    seen.check("coverage(model, batch)")
    if fake and step is not None:
        raise RecordError(
            "coverage(model, step=..., fake=True): got a step, expected a batch: a step runs on real tensors."
        )
    _check_plans(model, fake=fake)
    found, device = find_units(model, units), seen.device
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        sent = _sent_bytes(model)
        if fake:
            seen.batch = stack.enter_context(fake_run(model, batch, device))
        elif step is None:
            stack.enter_context(undisturbed(model))
        watch = StepWatch(model, found, device)
        with watch.watching():
            seen.run()
        for path, nbytes in _sent_bytes(model).items():
            watch.counts[path]["offloaded_bytes"] += nbytes - sent.get(path, 0)
        rows = tuple(_rows(model, found, watch, is_on_cpu=device.type == "cpu"))
        if step is None:
            free_gradients(model.parameters())
    return Coverage(
        model_class=type(model).__name__,
        batch=describe_batch(batch) if step is None else "",
        units=rows,
        is_compiled=any(is_compiled_module(module) for module in model.modules()),
    )


def _check_plans(model: nn.Module, *, fake: bool) -> None:
    for plan in (applied.plan for applied in applied_to(model) if applied.plan is not None):
        is_compiled = EngineChoice.COMPILE in {unit.engine for unit in plan.units.values()}
        if is_compiled or (fake and plan.offloads):
            part = "the compiled layers" if is_compiled else "copies of fake tensors to the host memory"
            raise NotYetError(
                settings={"engine": "compile"} if is_compiled else {"fake": True},
                needs=f"{part} of the plan that is applied",
                advice="print(plan) says what its layers keep.",
            )


def _sent_bytes(model: nn.Module) -> dict[str, int]:
    """Return the bytes that applied plans have offloaded so far, by unit."""
    uses = [applied.host_use for applied in applied_to(model)]
    return {path: nbytes for use in uses if use is not None for path, nbytes in use.sent_bytes.items()}


def _rows(model: nn.Module, units: list[Unit], watch: StepWatch, *, is_on_cpu: bool) -> Iterator[UnitCoverage]:
    counts: dict[str, Any] = {**watch.counts}
    rows = {unit.path: UnitCoverage(name=unit.path, is_layer=unit.is_layer, **counts[unit.path]) for unit in units}
    classes = {unit.path: type(without_wrapper(unit.module)).__name__ for unit in units}
    covered = dict.fromkeys(classes[path] for path, row in rows.items() if row.is_layer and row.covered)
    for unit in units:
        row = rows[unit.path]
        if row.is_layer and not row.covered:
            row = replace(row, reason=reason_of(model, unit, watch, covered, is_on_cpu=is_on_cpu))
        yield row
    yield UnitCoverage(name=OUTSIDE, **counts[OUTSIDE])
