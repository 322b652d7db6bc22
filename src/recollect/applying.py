"""Applies a plan to a model, and removes it again.

Only the instance attribute `forward` is replaced, of planned units and of the modules inside and around them: parameters,
buffers, hooks, state dict, class and `repr` are unchanged. A unit's hooks (FSDP2's gathering, for example) run outside
the tape, as they run outside `forward`.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from recollect._torch_fsdp import freed_after_forward
from recollect._torch_parallel import is_checkpoint_wrapper
from recollect._torch_private import without_compiler
from recollect.arguments import check_kind
from recollect.costs.host_copies import warn_if_link_is_slower
from recollect.engine.check_plan import check_depth, warn_if_recorded_elsewhere
from recollect.engine.compiled.compiled_engine import named_as_inside
from recollect.engine.eager_forward import EagerForward, eager_forwards
from recollect.engine.placed_forward import Applied, PlacedForward, unit_modules
from recollect.engine.plan_per_micro_batch import PlanPerMicroBatch
from recollect.engine.policy import Policy
from recollect.engine.self_check import switched_off
from recollect.engine.tape import Tape
from recollect.engine.tape_engine import ENGINES
from recollect.engine.tape_forwards import ScopeForward, tape_forwards
from recollect.engine.together import Agreement, first_call_forwards, is_partitioned
from recollect.errors import AlreadyAppliedError, ArgumentError, PlanError, UnknownNameError
from recollect.loss.intercept import loss_forwards
from recollect.plans.action import Action, EngineChoice
from recollect.plans.paths import unit_words
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan, digest_of, needs_all_ranks
from recollect.plans.value_names import module_of
from recollect.ranks.group import ALONE, Place
from recollect.ranks.members import GroupChoice, check_same_plans, ranks_of
from recollect.tracebacks import lets_go


@lets_go
def apply(model: nn.Module, plan: Plan | Sequence[Plan], *, group: GroupChoice = None) -> Applied:
    """Make the model's units keep and recompute values as the plan says, starting with the next forward.

    Args:
        model: the model that the plan was made for, or one with the same modules. It is not copied.
        plan: the plan to apply. Units that it does not name, or that recompute nothing, run as before. Several for the
            stage of a pipeline, one for each micro-batch of a step: each forward with gradients takes the next, and after the
            last one the first again. See `Applied.follow` for stages of `torch.distributed.pipelining`.
        group: processes that all apply it, a process group or a device mesh: they compare their plans. By default
            nothing is compared, and each may run its own plan.

    Returns:
        A handle that removes the plan; also a context manager.

    Raises:
        ArgumentError: the model is not a module, the plan not a plan, or there are no plans.
        UnknownNameError: the plan names a unit, or a module in a unit, that the model does not have.
        AlreadyAppliedError: the model already has a plan, `CheckpointWrapper` or Hugging Face's gradient checkpointing.
        ChunkedLossError: the plan computes the loss in chunks, which this model does not support.
        PlanError: the plan drops the output of a unit whose parameters FSDP frees after forward; the processes of the group
            have different plans; or micro-batches compute the loss in different numbers of chunks.
        RecordError: a process of the group does not apply a plan.
        PlanError by the model's first call, on all ranks: their plans differ, and some run collectives again.

    Warns:
        PlanMismatchWarning: the plan was made for a model with fewer layers; or once, if a unit runs ops that the plan does
            not name. Values that it does not name are kept.
        ProfileMismatchWarning: the plan's profile was recorded with a different version of PyTorch, on a different device, or
            where copies to host memory were half as fast again, or more.
        TorchVersionWarning: once in a process, with a PyTorch newer than the tested ones, or one that behaves differently.
        ConfigWarning by the first call: `torch.compile` has no effect, since the model runs eagerly under a plan.
        PlanMismatchWarning by the first call: compiled code lacks values that the plan names.

    Example:
        >>> import recollect
        >>> from torch import nn
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        >>> plan = recollect.Plan({"0": recollect.UnitPlan({"1.gelu": "recompute"})})
        >>> applied = recollect.apply(model, plan)
        >>> applied.remove()
    """
    check_kind("apply(model, plan)", "model", model, nn.Module, "torch.nn.Module")
    switched_off()  # To warn here, not in the first step.
    plans = _checked_plans(plan)
    ranks = ALONE if group is None else ranks_of(model, group, "apply(model, plan)")
    distinct = list({id(one): one for one in plans}.values())
    for one in distinct:
        warn_if_recorded_elsewhere(model, one)
        warn_if_link_is_slower(model, one)
    check_same_plans(plans, ranks)

    def applied() -> Applied:
        for one in distinct:
            check_depth(model, one)
        return apply_own(model, plan, compares=True)

    return ranks.together(applied, Place.START, undo=Applied.remove)


def _checked_plans(given: Any) -> list[Plan]:
    plans = list(given) if isinstance(given, (list, tuple)) else [given]
    if not plans:
        raise ArgumentError(
            "recollect.apply(model, plan): got no plans, expected a recollect.Plan, or one for each micro-batch of a step."
        )
    for plan in plans:
        check_kind("apply(model, plan)", "plan", plan, Plan, "recollect.Plan")
    return plans


def apply_own(model: nn.Module, plan: Plan | Sequence[Plan], *around: PlacedForward, compares: bool = False) -> Applied:
    """Apply a plan that was made for this very model, by all of its ranks, and need not name all of its layers.

    The plans of micro-batches may share forwards. `around`: forwards put in place, and removed, together with it. `compares`:
    ranks may have different plans, which the first call detects.
    """
    plans = [plan] if isinstance(plan, Plan) else plan
    chunks = sorted({one.loss_chunks for one in plans})
    if len(chunks) > 1:
        raise PlanError(
            f"cannot apply the plans: they compute the loss in {' and '.join(map(str, chunks))} chunks, expected the same "
            "loss_chunks for all micro-batches, since it is set on the model."
        )
    # Ranks compare the plans of all micro-batches together, in the first call.
    needs_all = any(needs_all_ranks(one.units) for one in plans)
    # Ranks that attach has given several plans may change between them at different times, if these need no other rank.
    is_alone = not (needs_all or compares or any(map(is_partitioned, model.parameters())))
    agreement = Agreement("+".join(digest_of(one.units) for one in plans), needs_all=needs_all, is_alone=is_alone)
    known = {id(one): _unit_forwards(model, one, agreement) for one in plans}
    forwards = [forward for own in known.values() for forward in own]
    _check_not_applied(model, forwards)
    paths = {path for one in plans for path in one.units}
    compiled = [{path for path, unit in one.units.items() if unit.engine is EngineChoice.COMPILE} for one in plans]
    others = [
        *eager_forwards(model, paths, forwards, set.intersection(*compiled)),
        *loss_forwards(model, chunks[0]),
    ]
    if not isinstance(plan, Plan):
        others.append(PlanPerMicroBatch(model, [known[id(one)] for one in plans]))
    others += first_call_forwards(model, agreement) if compares else []
    return Applied(model, [*forwards, *others, *around], plan if isinstance(plan, Plan) else None)


def _unit_forwards(model: nn.Module, plan: Plan, agreement: Agreement) -> list[PlacedForward]:
    modules = unit_modules(model, plan.units)
    for path, unit in plan.units.items():
        if unit.engine is EngineChoice.COMPILE:
            _check_value_names(without_compiler(modules[path]), path, named_as_inside(unit.actions))
        else:
            _check_value_names(modules[path], path, unit.actions)
    _check_outputs_stay(model, plan, modules)
    return [
        forward
        for engine, units in _by_engine(plan.units).items()
        for forward in ENGINES[engine](model, units, agreement, plan.predicted_host_bytes)
    ]


def applied_to(model: nn.Module) -> list[Applied]:
    """Find the plans currently applied to a model; `fit` leaves one applied.

    Args:
        model: any module.

    Returns:
        Their handles, each with `remove()`; an empty list if there are none.

    Example:
        >>> import recollect
        >>> from torch import nn
        >>> recollect.applied_to(nn.Linear(2, 2))
        []
    """
    found = [vars(module).get("forward") for module in model.modules()]
    forwards = [forward for forward in found if isinstance(forward, PlacedForward)]
    # Models may share modules inside units, as YOLO's share an activation: one's plan is not the other's.
    own = {forward.applied for forward in forwards if not isinstance(forward, ScopeForward)}
    applied = dict.fromkeys(forward.applied for forward in forwards)
    return [one for one in applied if one in own or _holds(one.model, model) or _holds(model, one.model)]


def _holds(model: nn.Module, module: nn.Module) -> bool:
    return any(part is module for part in model.modules())


@contextmanager
def without_plans(model: nn.Module) -> Iterator[list[Applied]]:
    """Suspend the plans applied to a model within the block; yields their handles."""
    applied = applied_to(model)
    with ExitStack() as stack:
        for one in applied:
            stack.enter_context(one.suspended())
        yield applied


def apply_policy(model: nn.Module, unit_paths: Iterable[str], policy: Policy | Tape) -> Applied:
    """Put units on the tape under any policy; `apply` does this with a plan as the policy."""
    tape = policy if isinstance(policy, Tape) else Tape(policy)
    paths = list(unit_paths)
    forwards = tape_forwards(model, paths, tape)
    _check_not_applied(model, forwards)
    return Applied(model, [*forwards, *eager_forwards(model, paths, forwards)], None)


def _by_engine(units: Mapping[str, UnitPlan]) -> dict[EngineChoice, dict[str, UnitPlan]]:
    found: dict[EngineChoice, dict[str, UnitPlan]] = {}
    for path, unit in units.items():
        found.setdefault(unit.engine, {})[path] = unit
    return found


def _check_value_names(unit: nn.Module, path: str, actions: Mapping[str, str]) -> None:
    modules = {name for name, _ in unit.named_modules(remove_duplicate=False)}
    for value_name in actions:
        scope = module_of(value_name)
        if scope not in modules:
            close = difflib.get_close_matches(scope, modules, n=1)
            known = [value_name.replace(scope, match) for match in close] or sorted(modules)
            raise UnknownNameError(kind="value", name=value_name, where=unit_words(path), known=known)


def _check_outputs_stay(model: nn.Module, plan: Plan, modules: Mapping[str, nn.Module]) -> None:
    """Check that a unit whose output is dropped has its parameters when a later unit's backward asks for the output."""
    freed = freed_after_forward(model)
    for path, unit in plan.units.items():
        if unit.output is Action.RECOMPUTE and any(id(part) in freed for part in modules[path].modules()):
            raise PlanError(
                f"cannot apply the plan: it drops the output of {unit_words(path)}, whose parameters FSDP frees after "
                "forward; the next unit's backward would ask for the output before they are gathered again. Record the "
                'sharded model, whose plans keep it; or set output="keep" in the plan; or shard with '
                "reshard_after_forward=False, in FSDP1 with SHARD_GRAD_OP."
            )


def _check_not_applied(model: nn.Module, forwards: Iterable[PlacedForward]) -> None:
    planned = {id(forward.module) for forward in forwards}
    inside = {id(module) for forward in forwards for module in forward.module.modules()}
    applied = applied_to(model)
    for name, module in model.named_modules():
        own = vars(module).get("forward")
        is_placed = isinstance(own, PlacedForward) and not isinstance(own, EagerForward) and own.applied in applied
        if is_placed and id(module) in inside:
            raise already_applied(name, "a recollect plan", f"remove that plan first: {own.applied.removal}")
        if is_checkpoint_wrapper(module):
            raise already_applied(name, "torch's CheckpointWrapper", "build the model without checkpoint_wrapper")
        if getattr(module, "activation_checkpoint_interval", 0):
            remedy = "leave that out of PipelineModule and of the configuration, or call set_checkpoint_interval(0)"
            raise already_applied(name, "DeepSpeed's activation_checkpoint_interval", remedy)
        # In diffusers the model has the flag, not its blocks.
        if getattr(module, "gradient_checkpointing", False) is True and (
            id(module) in inside or any(id(part) in planned for part in module.modules())
        ):
            remedy = f"call model.{_switch_of(model)}() first"
            raise already_applied(name, "Hugging Face's gradient checkpointing", remedy)


def _switch_of(model: nn.Module) -> str:
    """Return the method that ends gradient checkpointing: which diffusers, and transformers since 5.23, name differently."""
    methods = ("disable_gradient_checkpointing", "activation_checkpointing_disable")
    there = (method for method in methods if any(hasattr(part, method) for part in model.modules()))
    return next(there, "gradient_checkpointing_disable")


def already_applied(path: str, by: str, remedy: str) -> AlreadyAppliedError:
    return AlreadyAppliedError(
        f"cannot apply a plan: {unit_words(path, 'module')} recomputes already, by {by}; a value would be recomputed twice. "
        f"To have recollect decide, {remedy}."
    )
