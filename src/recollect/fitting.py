"""`fit`: record, plan and apply in one call, and warn when the loop later does more than the planned step."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from recollect.applying import applied_to, apply_own, without_plans
from recollect.byte_format import format_bytes
from recollect.engine.placed_forward import Applied, PlacedForward, placed_call
from recollect.errors import AlreadyAppliedError, BudgetWarning, RecordError
from recollect.measuring.device_memory import memory_bytes
from recollect.measuring.host_memory import check_host_budget
from recollect.planning.loss_chunks import LossChunks, plan_with_chunks
from recollect.planning.planners import Engine
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.quantities import check_budget, parse_bytes
from recollect.ranks.group import ALONE, Place
from recollect.ranks.members import GroupChoice, check_alike, common_plan, ranks_of
from recollect.recording.engines import check_host_engine
from recollect.recording.model_step import LossFunction, Step, as_dict, device_of
from recollect.recording.optimizers import Optimizers, check_optimizers, present_state_bytes
from recollect.recording.record import record
from recollect.recording.step_recording import Gradients
from recollect.tensors import tensors_in
from recollect.tracebacks import lets_go
from recollect.warning import warn_user
from recollect.weak_hooks import register_weakly

DEFAULT_BUDGET: Final = "90% of the device"


def _left_out(model: nn.Module, *, has_optimizer: bool) -> list[str]:
    """Describe the work that a plan for the model's current state would not count."""
    found = []
    if not has_optimizer and any(parameter.requires_grad for parameter in model.parameters()):
        found.append("counts no optimizer: fit got none")
    if not any(module.training for module in model.modules()):
        found.append("made for the model in eval mode")
    return found


class _FittedForward(PlacedForward):
    """Wraps a model's forward and checks its arguments; recomputes nothing."""

    def __init__(self, model: nn.Module, batch: Any, *, has_optimizer: bool, device: torch.device) -> None:
        super().__init__(model)
        self.device = device
        self.shapes = [tuple(tensor.shape) for tensor in tensors_in(batch)]
        self.numel = sum(tensor.numel() for tensor in tensors_in(batch)) if self.shapes else None
        self.is_training = any(module.training for module in model.modules())
        self.said: set[str] = set()
        if not has_optimizer:
            register_weakly(register_optimizer_step_post_hook, self._stepped)

    @placed_call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.recomputes():
            self._look(args, kwargs)
        return self.forward(*args, **kwargs)

    def _look(self, args: Any, kwargs: Any) -> None:
        found = tensors_in((args, kwargs))
        if self.numel is not None and sum(tensor.numel() for tensor in found) > self.numel:
            of_both = [tuple(tensor.shape) for tensor in found], self.shapes
            sizes = " and ".join(str(list(max(shapes, key=math.prod, default=()))) for shapes in of_both)
            self._say("batch", f"got a larger batch than its plan was made for (shapes {sizes})")
        if self.module.training and not self.is_training:
            self._say("mode", "trains, and its plan was made in eval mode, in which dropout and batch norm hold less")

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self.is_on:
            return
        own = set(map(id, self.module.parameters()))
        nbytes = present_state_bytes([optimizer], self.device)
        if nbytes and any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            name = type(optimizer).__name__
            self._say(
                "optimizer", f"is trained by {name}, whose state of {format_bytes(nbytes)} its plan does not count"
            )

    def _say(self, what: str, text: str) -> None:
        if what not in self.said:
            self.said.add(what)
            warn_user(
                f"recollect: {type(self.module).__name__} {text}: the peak may exceed the budget. Call fit again as the loop "
                "trains (model.train(), its largest batch, optimizer=...); or use attach, which follows the loop.",
                BudgetWarning,
            )


@lets_go
def fit(
    model: nn.Module,
    batch: Any = None,
    budget: int | str = DEFAULT_BUDGET,
    *,
    step: Callable[[], object] | None = None,
    optimizer: Optimizers = None,
    loss_fn: LossFunction | None = None,
    fake: bool = False,
    units: Iterable[str] | None = None,
    holds_output: bool = True,
    gradients: Gradients = "held",
    loss_chunks: LossChunks = 1,
    host_budget: int | str = 0,
    engine: Engine = "tape",
    group: GroupChoice = None,
) -> Plan:
    """Fit the model's training step into a memory budget with the least recompute: record, plan and apply.

    An existing plan of the model is replaced, unless no plan fits the budget.

    Args:
        model: any module. It is not edited; only its units' `forward` is wrapped.
        batch: a tensor, tuple or dict, as large as in training. The step is then `out = model(**batch); out.loss.backward()`,
            and recording leaves no traces.
        budget: bytes of the whole step (parameters, gradients, optimizer state, kept values, workspaces), as an int or
            text: "16GiB", "80GB", "60%" of the peak without recompute, "90% of the device" (CUDA).
        step: your own training step in place of a batch: it runs once, as a step of your training; see `record`.
        optimizer: one, or several; counts with its state and the workspace of its step.
        loss_fn: from the model's output to a scalar; see `record`.
        fake: record on fake tensors; see `record`.
        units: module paths of the layers to plan, if they are not found; see `record`.
        holds_output: the loop holds the model's output until the next one replaces it; see `record`.
        gradients: the gradients of the last step, when the next one begins; see `record`.
        loss_chunks: parts in which LM head and loss are computed, one part's logits at a time; see
            `chunked_cross_entropy`. 1: as the model does, with unchanged gradient bits. "auto": as many as the fastest
            plan needs, and 1 if that is as fast; records up to four times, and needs a batch.
        host_budget: bytes of host memory, as an int or text such as "64GiB", that values may be copied to in forward and back
            in backward, in parallel with computation; the speed of copies is measured first. 0: nothing is offloaded.
        engine: "tape": dropped values are recomputed op by op, eagerly. "compile" lets layers run inside `torch.compile`, too,
            which then keeps the plan's values; it compiles each kind of layer up to ten times first, seconds to a minute
            each. Gradients are those of the compiled layers.
        group: the processes that record together and run one plan; see `record`.

    Returns:
        The plan, now applied to the model. `recollect.applied_to(model)` returns the handle that removes it.

    Raises:
        BudgetTooSmallError: no plan fits; names the least possible peak and its unit.
        ChunkedLossError: the model's loss cannot be computed in chunks.
        ConfigError: two processes of the group have different budgets; or host memory is too small.
        OffloadError: host memory for the plan is not available.
        ArgumentError, QuantityError, UnsupportedModelError, AlreadyAppliedError, RecordError: see `plan` and `record`.

    Warns:
        BudgetWarning: at the step where the loop does more than planned: the batch is larger, a model planned in eval
            mode trains, or an optimizer steps that was not passed. The plan's note says so, too.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        >>> plan = recollect.fit(model, torch.randn(256, 32), budget="70%", loss_fn=torch.sum)
        >>> plan.predicted_peak_bytes <= plan.budget_bytes
        True
    """
    if step is not None and loss_chunks == "auto":
        raise RecordError(
            'fit: loss_chunks="auto" records the step up to four times, but step= is a step of your training, which runs '
            "once. Pass a batch, or a number of chunks."
        )
    Step(model, batch, step).check("fit(model, batch, budget)")
    ranks = ALONE if fake else ranks_of(model, group, "fit(model, batch, budget)")

    def check() -> None:
        _check_free(model, optimizer)
        check_budget(budget, device_bytes=1 if fake else memory_bytes(device_of(model, batch)))
        check_host_budget(host_budget)
        check_host_engine(engine, host_budget)

    ranks.together(check, Place.START)
    check_alike(ranks, model, {"budget": budget, "host_budget": host_budget, "engine": engine})

    def recorder(num_chunks: int) -> Profile:
        return record(
            model,
            batch,
            step=step,
            optimizer=optimizer,
            loss_fn=loss_fn,
            fake=fake,
            units=units,
            holds_output=holds_output,
            gradients=gradients,
            loss_chunks=num_chunks,
            host_link=bool(parse_bytes(host_budget)),
            engine=engine,
            group=group,
        )

    with without_plans(model) as before:
        planned = partial(plan_with_chunks, recorder, budget, loss_chunks, host_budget, engine)
        made = ranks.together(planned, Place.PLANNED)
    check_alike(ranks, model, {"loss_chunks": made.plan.loss_chunks})
    budget_bytes, plain_bytes = made.plan.budget_bytes or 0, made.plain_peak_bytes
    chosen, _ = common_plan(made.profile, made.plan, plain_bytes=plain_bytes, budget_bytes=budget_bytes, ranks=ranks)
    for applied in before:
        applied.remove()
    return _put(model, chosen, as_dict(batch), has_optimizer=optimizer is not None or step is not None)


def _check_free(model: nn.Module, optimizer: Optimizers) -> None:
    """Check that no loop is planned for the model already, and that the optimizer trains no other one."""
    check_optimizers(model, optimizer)
    for applied in applied_to(model):
        if applied.removal != Applied.removal:
            raise AlreadyAppliedError(
                f"cannot fit {type(model).__name__}: it is attached to a loop, or captured. First call {applied.removal}."
            )


def _put(model: nn.Module, chosen: Plan, batch: Any, *, has_optimizer: bool) -> Plan:
    """Apply a plan, and watch for work that it does not count; return it with a note about that."""
    notes = [note for note in (chosen.note, *_left_out(model, has_optimizer=has_optimizer)) if note]
    noted = replace(chosen, note="; ".join(notes))
    watch = _FittedForward(model, batch, has_optimizer=has_optimizer, device=device_of(model, batch))
    apply_own(model, noted, watch)
    return noted
