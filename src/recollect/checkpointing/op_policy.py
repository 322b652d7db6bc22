"""Asks a policy, op by op, what to save: the functions that PyTorch's selective checkpointing takes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from recollect._torch_functions import selective_policy
from recollect.engine.facts import OpFacts
from recollect.engine.function_mode import FunctionMode
from recollect.engine.policy import DropAll
from recollect.engine.subclasses import strided_tensors
from recollect.engine.tape import Tape
from recollect.engine.tape_state import OpActions
from recollect.engine.values import forget_record, laid_out, record_of, watch
from recollect.errors import ConfigError, NotYetError
from recollect.plans.value_names import result_names, value_stem

__all__ = ["Contexts", "PolicyFunction", "PolicyTape", "contexts_with"]

PolicyFunction = Callable[..., CheckpointPolicy | bool]
"""`policy(context, op, *args, **kwargs)`, as PyTorch's selective checkpointing calls it; a bool says whether to save."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""What PyTorch enters around the first and the second run of a checkpointed function."""

_SAVES: Final = frozenset({"MUST_SAVE", "PREFER_SAVE"})
_RECOMPUTES: Final = frozenset({"MUST_RECOMPUTE", "PREFER_RECOMPUTE"})
_NO_NAMES: Final[tuple[str, ...]] = ()


def contexts_with(policy_fn: PolicyFunction | Sequence[Any]) -> Callable[[], Contexts]:
    """Return a `context_fn` with this policy, or one that saves what these ops make."""
    given = policy_fn if callable(policy_fn) else list(policy_fn)
    create_selective_checkpoint_contexts(given)  # To raise its errors here.
    return functools.partial(create_selective_checkpoint_contexts, given)


class PolicyTape(Tape):
    """A tape that keeps what a policy saves, and drops everything else that it can.

    Args:
        context_fn: as for PyTorch's `checkpoint`; called for each run of a unit, since a policy may count. Of what it returns
            only the policy is used, which is asked after each op, with its results in `context.op_output`.

    Attributes:
        kept: names of the values that the policy saved, by unit path.

    Raises:
        ConfigError: it is no `create_selective_checkpoint_contexts`.
    """

    def __init__(self, context_fn: Callable[[], Contexts]) -> None:
        super().__init__(DropAll(), runs_to_settle=sys.maxsize)
        self.context_fn = context_fn
        self.kept: dict[str, set[str]] = {}
        self.new_policy()

    def new_policy(self) -> PolicyFunction:
        """Return a policy for one run of a unit."""
        policy = selective_policy(self.context_fn()[0])
        if policy is None:
            raise ConfigError(
                settings={"context_fn": self.context_fn},
                reason="it asks for something around a second run, and on the tape there is none",
                advice="Pass one that returns create_selective_checkpoint_contexts(policy).",
            )
        return policy

    def new_mode(self, unit_path: str) -> FunctionMode:
        """Return a mode for one call of a unit, which asks the policy."""
        return _PolicyMode(self, unit_path)


class _PolicyMode(FunctionMode):
    """Lets the tape drop what an op makes, and forgets the recipe if the policy saves it."""

    def __init__(self, tape: PolicyTape, unit_path: str) -> None:
        super().__init__(tape, unit_path)
        self._policy = tape.new_policy()
        self._kept = tape.kept
        # What the results of the running op are called.
        self._names: tuple[str, ...] = _NO_NAMES
        # What made a storage, so that a saved view keeps that; an identity used again is entered again.
        self._makers: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._names = _NO_NAMES
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if output is NotImplemented or func in SAC_IGNORED_OPS:
            return output
        tensors = list(strided_tensors(output))
        names = self._names
        if names:
            for index, tensor in enumerate(tensors):
                self._makers[id(tensor.untyped_storage())] = names[index] if index < len(names) else names[0]
        if self._saves(func, args, kwargs or {}, output):
            if self.function is not None:
                self.function.keep("a policy saves what one of its ops makes")
            for tensor in tensors:
                self._keep(tensor, is_view=not names)
        return output

    def _keep(self, tensor: torch.Tensor, *, is_view: bool) -> None:
        """Keep what is in a tensor's storage."""
        storage = tensor.untyped_storage()
        maker = self._makers.get(id(storage))
        if maker is not None:
            self._kept.setdefault(self.unit_path, set()).add(maker)
        record = record_of(storage)
        forget_record(storage)
        # By the time that a view is saved, autograd may hold the recipe of what it looks at.
        if is_view and record is not None and record.is_current(tensor._version) and record.base.tensor is None:
            held, version = self.tape.alias(tensor, False)
            record.base.hold(laid_out(held, record.layout), version)
            record.base.label = (self.unit_path, self.scope, "")
            watch(record.base, storage)

    def _op_actions(self, facts: OpFacts, asks: bool) -> OpActions:
        stem = value_stem(self.scope, facts.name, self.counts.get((self.unit_path, self.scope, facts.name), 0))
        self._names = result_names(stem, 1 if facts.writes else facts.num_returns)
        return super()._op_actions(facts, asks)

    def _saves(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> bool:
        """Ask the policy about an op that has just run."""
        context = SelectiveCheckpointContext(is_recompute=False)
        context.op_output = output  # PyTorch 2.11 does not take it as an argument.
        answer = self._policy(context, func, *args, **kwargs)
        if isinstance(answer, bool):
            return answer
        name = getattr(answer, "name", "")
        if name in _SAVES:
            return True
        if name in _RECOMPUTES:
            return False
        if name.endswith("CPU_OFFLOAD"):
            raise NotYetError(
                settings={str(func): answer},
                needs="a copy of the op's result in host memory",
                advice="Return CheckpointPolicy.MUST_SAVE, or PREFER_RECOMPUTE, which is what PyTorch makes of it "
                "where nothing is compiled.",
            )
        raise ConfigError(
            settings={str(func): answer},
            reason="the policy returned no CheckpointPolicy",
            advice="Return one of torch.utils.checkpoint.CheckpointPolicy, or True to save.",
        )
