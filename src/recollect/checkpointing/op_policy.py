"""Asks a policy of PyTorch's selective checkpointing, op by op, what to save, and turns a policy into a plan."""

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from recollect._torch_functions import selective_policy
from recollect.applying import apply_policy
from recollect.arguments import check_kind
from recollect.engine.draws import Draw, refuse_draws
from recollect.engine.facts import OpFacts, facts_of
from recollect.engine.function_mode import FunctionMode
from recollect.engine.offload.flight import Offload
from recollect.engine.policy import DropAll
from recollect.engine.subclasses import strided_tensors
from recollect.engine.tape import Tape
from recollect.engine.values import forget_record, laid_out, record_of, watch
from recollect.errors import ConfigError
from recollect.planning.trips import scheduled
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.plans.value_names import result_names, value_stem
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.recording.fake_model import fake_run
from recollect.recording.model_step import call_model, device_of
from recollect.recording.restored_state import undisturbed
from recollect.simulation.decisions import keep_all_unit
from recollect.simulation.predicted import predicted_plan
from recollect.simulation.windows import returning_values

PolicyFunction = Callable[..., CheckpointPolicy | bool]
"""`policy(context, op, *args, **kwargs)`, as PyTorch's selective checkpointing calls it; a bool means whether to save."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""The contexts that PyTorch enters around the first and second runs of a checkpointed function."""

_ACTIONS: Final = {"SAVE": Action.KEEP, "RECOMPUTE": Action.RECOMPUTE, "CPU_OFFLOAD": Action.OFFLOAD}


def contexts_with(policy_fn: PolicyFunction | Sequence[Any]) -> Callable[[], Contexts]:
    """Return a `context_fn` with this policy, or one that saves the results of these ops."""
    given = policy_fn if callable(policy_fn) else list(policy_fn)
    create_selective_checkpoint_contexts(given)  # To raise its errors here.
    return functools.partial(create_selective_checkpoint_contexts, given)


class PolicyTape(Tape):
    """A tape that keeps or offloads the values that a policy names, and drops all others that it can.

    Args:
        context_fn: as for PyTorch's `checkpoint`; called for each run of a unit, since a policy may count. Of its result
            only the policy is used, which is asked after each op, with its results in `context.op_output`.
        only_asks: no backward will run, and nothing has to be copied to host memory.

    Attributes:
        kept, offloaded: names of the values that the policy saved, and offloaded, by unit path.
    """

    def __init__(self, context_fn: Callable[[], Contexts], *, only_asks: bool = False) -> None:
        super().__init__(DropAll(), runs_to_settle=sys.maxsize)
        self.context_fn = context_fn
        self.only_asks = only_asks
        self.may_offload = True
        self.kept: dict[str, set[str]] = {}
        self.offloaded: dict[str, set[str]] = {}
        self.new_policy()

    def new_policy(self) -> PolicyFunction:
        policy = selective_policy(self.context_fn()[0])
        if policy is None:
            raise ConfigError(
                settings={"context_fn": self.context_fn},
                reason="it asks for something around a second run, and on the tape there is none",
                advice="Pass one that returns create_selective_checkpoint_contexts(policy).",
            )
        return policy

    def new_mode(self, unit_path: str) -> FunctionMode:
        return _PolicyMode(self, unit_path)


class _PolicyMode(FunctionMode):
    """Lets the tape drop an op's results, and forgets the recipes of those that the policy saves or offloads."""

    def __init__(self, tape: PolicyTape, unit_path: str) -> None:
        super().__init__(tape, unit_path)
        self._policy = tape.new_policy()
        self._asking = tape
        # The op that made a storage: a saved view keeps it; an identity used again is entered again.
        self._makers: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = facts_of(func)
        key = self.unit_path, self.scope, facts.name
        count = self.counts.get(key, 0)
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if output is NotImplemented or func in SAC_IGNORED_OPS:
            return output
        tensors = list(strided_tensors(output))
        # Of its results, if the tape gave it a name.
        names: tuple[str, ...] = ()
        if self.counts.get(key, 0) > count:
            names = result_names(value_stem(self.scope, facts.name, count), 1 if facts.writes else facts.num_returns)
            for index, tensor in enumerate(tensors):
                self._makers[id(tensor.untyped_storage())] = names[index] if index < len(names) else names[0]
        action = self._asked(func, args, kwargs or {}, output)
        if action is Action.RECOMPUTE:
            if self.is_captured and facts.is_random and any(record_of(one.untyped_storage()) for one in tensors):
                refuse_draws(facts, func, args, kwargs or {}, self.unit_path, next(iter(names), facts.name))
            return output
        if self.function is not None:
            self.function.keep("a policy saves what one of its ops makes")
        is_made_here = bool(names) and not facts.writes and self.function is None
        for index, tensor in enumerate(tensors):
            self._keep(tensor, is_view=not names)
            if action is Action.OFFLOAD and is_made_here:
                self._offload(tensor, facts, index, names)
        return output

    def run_once(self, facts: OpFacts, func: Any, args: Any, kwargs: Any) -> tuple[Any, Draw | None]:
        # In a captured step, random ops are refused once the policy has been asked.
        return (func(*args, **kwargs), None) if self.is_captured else super().run_once(facts, func, args, kwargs)

    def _offload(self, tensor: torch.Tensor, facts: OpFacts, index: int, names: tuple[str, ...]) -> None:
        tape = self._asking
        tape.offloaded.setdefault(self.unit_path, set()).add(names[index] if index < len(names) else names[0])
        if tape.only_asks:
            return
        if self.place is None:
            tape.offload = _offload_from(tensor.device)
            self.place = tape.offload.begin_call(is_inside=False)
        self.send_away(tensor, facts, index)

    def _keep(self, tensor: torch.Tensor, *, is_view: bool) -> None:
        storage = tensor.untyped_storage()
        maker = self._makers.get(id(storage))
        if maker is not None:
            self._asking.kept.setdefault(self.unit_path, set()).add(maker)
        record = record_of(storage)
        forget_record(storage)
        # By the time a view is saved, autograd may hold the recipe of its base.
        if is_view and record is not None and record.is_current(tensor._version) and record.base.tensor is None:
            held, version = self.tape.alias(tensor, False)
            record.base.hold(laid_out(held, record.layout), version)
            record.base.label = (self.unit_path, self.scope, "")
            watch(record.base, storage)

    def _asked(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Action:
        context = SelectiveCheckpointContext(is_recompute=False)
        context.op_output = output  # PyTorch 2.11 does not take it as an argument.
        answer = self._policy(context, func, *args, **kwargs)
        if isinstance(answer, bool):
            return Action.KEEP if answer else Action.RECOMPUTE
        action = _ACTIONS.get(getattr(answer, "name", "").partition("_")[2])
        if action is None:
            raise ConfigError(
                settings={str(func): answer},
                reason="the policy returned no CheckpointPolicy",
                advice="Return one of torch.utils.checkpoint.CheckpointPolicy, or True to save.",
            )
        return action


@functools.cache
def _offload_from(device: torch.device) -> Offload:
    """Return the state that calls outside any plan share for offloading from a device."""
    return Offload(None, {}, None, device=device)


def policy_plan(
    profile: Profile,
    model: nn.Module,
    batch: Any,
    policy_fn: PolicyFunction | Sequence[Any] | None = None,
    *,
    context_fn: Callable[[], Contexts] | None = None,
) -> Plan:
    """Return a policy of PyTorch's selective checkpointing as a plan, with its predicted peak.

    The model runs forward once, and the policy is asked about each op of its layers. Values that it offloads
    (`MUST_CPU_OFFLOAD`, `PREFER_CPU_OFFLOAD`) go to host memory if backward needs them. Everything else is recomputed,
    except for values that cannot be (a router's choices). A layer has one plan for all its calls: a value saved or offloaded in
    one call is saved or offloaded in all of them.

    Args:
        profile: the recorded step.
        model: the model that was recorded. It is left unchanged; for a fake profile nothing is computed.
        batch: the recorded batch.
        policy_fn: `policy(context, op, *args, **kwargs)`, which returns a `torch.utils.checkpoint.CheckpointPolicy`, or a list
            of ops to save.
        context_fn: in place of it, as for `torch.utils.checkpoint.checkpoint`: returns
            `create_selective_checkpoint_contexts(policy)`. Called for each layer, for a policy that counts.

    Returns:
        A plan without a budget.

    Raises:
        ArgumentError: the profile is not a profile.
        ConfigError: none or both of `policy_fn` and `context_fn`; or the latter has no policy.
        UnknownNameError: the model is not the recorded one.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        >>> x = torch.randn(8, 32)
        >>> profile = recollect.record(model, x, loss_fn=torch.sum, fake=True)
        >>> plan = policy_plan(profile, model, x, [torch.ops.aten.addmm.default])
        >>> print(plan.units["0"].actions["2.addmm"])
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
    # Run the layers forward as they were recorded, and leave no traces.
    with ExitStack() as stack:
        if profile.fake:
            run = fake_run(model, batch, device_of(model, batch), kernels=profile.kernels)
            batch = stack.enter_context(run)
        else:
            stack.enter_context(undisturbed(model))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(apply_policy(model, list(graphs), tape))
        call_model(model, batch)
    none: set[str] = set()
    offloaded = {path: names & _returning(profile, path) for path, names in tape.offloaded.items()}
    units = {path: _unit(graph, tape.kept.get(path, none), offloaded.get(path, none)) for path, graph in graphs.items()}
    if any(offloaded.values()):
        # Units that a plan does not name do not count on a trip.
        units = {call.path: units.get(call.path) or keep_all_unit(profile.graph_of(call)) for call in profile.calls}
    plan = Plan(units, note="selective checkpointing by a policy")
    return predicted_plan(profile, scheduled(profile, plan))


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
    computed = [value for _, value in graph.made]
    stays = {value.name for value in computed if value.must_keep} | kept
    actions = {value.name: Action.KEEP if value.name in stays else Action.RECOMPUTE for value in computed}
    return UnitPlan(actions | dict.fromkeys(actions.keys() & offloaded, Action.OFFLOAD))
