"""Turns a policy of PyTorch's selective checkpointing into a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from recollect.applying import apply_policy
from recollect.arguments import check_kind
from recollect.checkpointing.op_policy import Contexts, PolicyFunction, PolicyTape, contexts_with
from recollect.errors import ConfigError
from recollect.planning.trips import scheduled
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.recording.fake_model import fake_run
from recollect.recording.model_step import call_model, device_of
from recollect.recording.restored_state import undisturbed
from recollect.simulation.decisions import keep_all_unit
from recollect.simulation.simulate import predicted_plan
from recollect.simulation.windows import returning_values


def policy_plan(
    profile: Profile,
    model: nn.Module,
    batch: Any,
    policy_fn: PolicyFunction | Sequence[Any] | None = None,
    *,
    context_fn: Callable[[], Contexts] | None = None,
) -> Plan:
    """Return what a policy of PyTorch's selective checkpointing keeps and drops, as a plan, with its predicted peak.

    The model runs forward once, and the policy is asked about each op of its layers. What it offloads (`MUST_CPU_OFFLOAD`,
    `PREFER_CPU_OFFLOAD`) goes to host memory, if backward asks for it. All else that it does not save is recomputed, but for
    what cannot be (a router's choices). Layers share one plan for all of their calls: what is saved or offloaded in one of
    them is in all.

    Args:
        profile: the recorded step.
        model: the model that was recorded. It is left as it is; for a fake profile nothing is computed.
        batch: what to call it with; the recorded one.
        policy_fn: `policy(context, op, *args, **kwargs)`, which returns a `torch.utils.checkpoint.CheckpointPolicy`, or a list
            of ops to save.
        context_fn: in place of it, what `torch.utils.checkpoint.checkpoint` takes: returns
            `create_selective_checkpoint_contexts(policy)`. Called for each layer, for a policy that counts.

    Returns:
        A plan without a budget.

    Raises:
        ArgumentError: the profile is no profile.
        ConfigError: none or both of `policy_fn` and `context_fn`; or the latter has no policy.
        UnknownNameError: the model is not the recorded one.

    Example:
        >>> import torch, recollect
        >>> from recollect.lab.models.architectures import llama_config
        >>> from recollect.lab.models.gpt import GPTModel
        >>> model = GPTModel(llama_config(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64))
        >>> tokens = torch.randint(0, 64, (1, 16))
        >>> batch = {"tokens": tokens, "labels": tokens}
        >>> profile = recollect.record(model, batch, fake=True)
        >>> plan = policy_plan(profile, model, batch, [torch.ops.aten.mm.default])
        >>> print(plan.units["decoder.layers.0"].actions["mlp.linear_fc2.mm"])
        keep
    """
    check_kind("policy_plan(profile, model, batch, policy_fn)", "profile", profile, Profile, "recollect.Profile")
    if (policy_fn is None) is (context_fn is None):
        raise ConfigError(
            settings={"policy_fn": policy_fn, "context_fn": context_fn},
            reason="a plan has one policy",
            advice="Pass one of them.",
        )
    if policy_fn is not None:
        context_fn = contexts_with(policy_fn)
    assert context_fn is not None
    graphs = {call.path: profile.graph_of(call) for call in profile.calls if call.repeated}
    tape = PolicyTape(context_fn, only_asks=True)
    _run_forward(model, batch, list(graphs), tape, is_fake=profile.fake)
    none: set[str] = set()
    offloaded = {path: names & _returning(profile, path) for path, names in tape.offloaded.items()}
    units = {path: _unit(graph, tape.kept.get(path, none), offloaded.get(path, none)) for path, graph in graphs.items()}
    if any(offloaded.values()):
        # Units that a plan does not name do not count on a trip.
        units = {call.path: units.get(call.path) or keep_all_unit(profile.graph_of(call)) for call in profile.calls}
    plan = Plan(units, note="selective checkpointing by a policy")
    return predicted_plan(profile, scheduled(profile, plan))


def _run_forward(model: nn.Module, batch: Any, paths: list[str], tape: PolicyTape, *, is_fake: bool) -> None:
    """Run a model's layers forward on a tape, and leave no traces."""
    with ExitStack() as stack:
        if is_fake:
            batch = stack.enter_context(fake_run(model, batch, device_of(model, batch)))
        else:
            stack.enter_context(undisturbed(model))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(apply_policy(model, paths, tape))
        call_model(model, batch)


def _returning(profile: Profile, path: str) -> set[str]:
    """Return the names of a unit's values that backward asks for in each of its runs."""
    found = returning_values(profile)
    return set.intersection(
        *(
            {value.name for v, value in enumerate(profile.graph_of(profile.calls[call]).values) if (call, v) in found}
            for call in profile.calls_by_path[path]
        )
    )


def _unit(graph: UnitGraph, kept: set[str], offloaded: set[str]) -> UnitPlan:
    computed = [value for value in graph.values if value.producer is not None]
    stays = {value.name for value in computed if value.must_keep} | kept
    actions = {value.name: Action.KEEP if value.name in stays else Action.RECOMPUTE for value in computed}
    return UnitPlan(actions | dict.fromkeys(actions.keys() & offloaded, Action.OFFLOAD))
