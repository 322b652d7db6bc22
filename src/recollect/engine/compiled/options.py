"""Options with which a user's own `torch.compile` of a whole model carries out a plan."""

from typing import Any

from recollect.arguments import check_kind
from recollect.errors import PlanError
from recollect.plans.action import Action
from recollect.plans.paths import unit_words
from recollect.plans.plan import Plan


def compile_options(plan: Plan) -> dict[str, Any]:
    """Return options with which `torch.compile` of a whole model keeps and recomputes values as a plan says.

    Without them it makes one graph of all layers and decides by itself. Outputs of units are kept; ops outside units are left
    to PyTorch. `recollect.apply` is not needed then: it compiles each unit by itself instead, which peaks a little lower.
    Predicted peaks are for the latter.

    Args:
        plan: for the model. Its units may name the engine "tape" or "compile"; one without actions is left to PyTorch.

    Returns:
        For `torch.compile(model, options=...)`. Nothing is compiled yet.

    Raises:
        ArgumentError: it is not a plan.
        PlanError: a unit drops its output, or its values are offloaded or held as parts; or the plan computes the loss in
            chunks.

    Warns:
        PlanMismatchWarning, when it is compiled: the code lacks a value that the plan names; or the plan cannot be carried
            out, and PyTorch decides. There is none if the code comes from a cache on disk.

    Example:
        >>> import recollect
        >>> plan = recollect.Plan({"0": recollect.UnitPlan({"gelu": "recompute"})})
        >>> options = recollect.compile_options(plan)
        >>> sorted(options)
        ['custom_partitioner_fn', 'emulate_precision_casts']
    """
    check_kind("compile_options(plan)", "plan", plan, Plan, "recollect.Plan")
    if plan.loss_chunks > 1:
        raise PlanError(
            f"cannot compile by the plan: it computes the loss in {plan.loss_chunks} chunks, expected 1: recollect.apply does "
            "that. Make a plan without chunks."
        )
    actions: dict[str, Action] = {}
    for path, unit in plan.units.items():
        others = {*unit.actions.values(), unit.output} - {Action.KEEP, Action.RECOMPUTE}
        if unit.output is Action.RECOMPUTE or others:
            raise PlanError(
                f"cannot compile by the plan: {unit_words(path)} drops its output, or has values that are offloaded or held as "
                "parts; expected values that are kept or recomputed. Use recollect.apply(model, plan)."
            )
        actions |= {f"{path}.{name}" if path else name: action for name, action in unit.actions.items()}
    # Here: it imports the compiler.
    from recollect._torch_compile import ROUNDED_AS_IN_MEMORY
    from recollect.engine.compiled.partitioner import PlanPartitioner

    return {
        **ROUNDED_AS_IN_MEMORY,
        "custom_partitioner_fn": PlanPartitioner(
            actions, units=tuple(path for path, unit in plan.units.items() if unit.actions)
        ),
    }
