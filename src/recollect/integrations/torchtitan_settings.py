"""Turn torchtitan's own policies of activation checkpointing into plans, and a plan into the nearest of them.

docs/megatron.md has what each policy recomputes. A value cannot be kept in part: a policy that keeps queries and recomputes
keys has no plan where they are one product. So `recollect plan --write torchtitan` records a model with a product for each
(`TransformerConfig.separate_projections`).

Read in torchtitan 0.3.0 (`distributed/activation_checkpoint.py`), which has no setting for every nth block.
"""

from typing import Final, Literal, get_args

from recollect.errors import ConfigError
from recollect.integrations.nearest import Nearest, nearest
from recollect.planning.classic import classic_plan
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.plans.value_names import module_of
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.simulation.predicted import predicted_plan

__all__ = ["TitanPolicy", "nearest_policy", "torchtitan_flags", "torchtitan_plan"]

TitanPolicy = Literal["none", "selective", "full"]

_PRODUCTS: Final = frozenset({"mm", "linear"})
_SAVED: Final = frozenset(
    {"addmm", "bmm", "convolution", "convolution_backward", "_scaled_mm", "max", "topk", "upsample_bilinear2d"}
    | {"_flash_attention_forward", "_efficient_attention_forward", "_scaled_dot_product_attention_math"}
    | {"_scaled_dot_product_fused_attention_overrideable", "flex_attention"}
    | {f"_scaled_dot_product_{k}_attention" for k in ("flash", "efficient", "cudnn")}
    # The CPU's represents the GPU's in a step recorded without one.
    | {"_scaled_dot_product_flash_attention_for_cpu"}
    | {"_c10d_functional:reduce_scatter_tensor", "_c10d_functional:all_to_all_single"}
)


def torchtitan_plan(profile: Profile, policy: TitanPolicy) -> Plan:
    """Return one of torchtitan's policies for the recorded step, as a plan with its predicted peak and slowdown.

    The policy is "none", "selective" or "full", with its default settings.

    Raises:
        ConfigError: an unknown word.

    Example:
        >>> from recollect.profile.events import StepLog
        >>> torchtitan_plan(Profile((), (), StepLog(), step_s=0.0), "full").note
        'torchtitan: full'
    """
    if policy not in get_args(TitanPolicy):
        raise ConfigError(
            settings={"activation_checkpoint": policy},
            reason="no plan says what it does",
            advice=f"Choose from {', '.join(get_args(TitanPolicy))}.",
        )
    if policy != "selective":
        return classic_plan(profile, "full" if policy == "full" else "keep_all").with_note(f"torchtitan: {policy}")
    graphs = {call.path: profile.graph_of(call) for call in profile.calls if call.repeated}
    made = {id(graph): _selective(graph) for graph in graphs.values()}
    plan = Plan({path: made[id(graph)] for path, graph in graphs.items()}, note="torchtitan: selective")
    return predicted_plan(profile, plan)


def nearest_policy(profile: Profile, plan: Plan) -> Nearest[TitanPolicy]:
    """Return the fastest of torchtitan's policies that fit the budget of a plan, and its loss against the plan.

    Peak and time assume that recollect carries it out; torchtitan itself runs a whole block again. A plan needs no
    such stand-in where `recollect.integrations.torchtitan.MemoryBudget` applies it, with `plan_file`.

    Raises:
        PlanError: the plan has no predicted peak.
        BudgetTooSmallError: none of the policies fits.

    Example:
        >>> import torch, recollect
        >>> from recollect.lab.models.architectures import llama_config
        >>> from recollect.lab.models.gpt import GPTModel
        >>> model = GPTModel(llama_config(num_layers=4, hidden_size=32, num_attention_heads=2, vocab_size=64))
        >>> tokens = torch.randint(0, 64, (4, 64))
        >>> profile = recollect.record(model, {"tokens": tokens, "labels": tokens}, fake=True)
        >>> found = nearest_policy(profile, recollect.plan(profile, "90%"))
        >>> torchtitan_flags(found.settings)
        'activation-checkpoint:selective'
    """
    return nearest(profile, plan, ((policy, torchtitan_plan(profile, policy)) for policy in get_args(TitanPolicy)))


def torchtitan_flags(policy: TitanPolicy) -> str:
    """Return a policy as a word of torchtitan's command line.

    Example:
        >>> torchtitan_flags("full")
        'activation-checkpoint:full'
    """
    return f"activation-checkpoint:{policy}"


def _selective(graph: UnitGraph) -> UnitPlan:
    actions: dict[str, Action] = {}
    num_products = 0
    for op in graph.ops:
        module = module_of(op.name)
        kind = op.name.removeprefix(f"{module}.").partition("#")[0]
        is_saved = kind in _SAVED
        if kind in _PRODUCTS and "moe.router.gate" not in op.name:
            num_products += 1
            is_saved = num_products % 2 == 1
        for index in op.outputs:
            value = graph.values[index]
            actions[value.name] = Action.KEEP if is_saved or value.must_keep else Action.RECOMPUTE
    return UnitPlan(actions)
