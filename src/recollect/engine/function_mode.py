"""Makes each call of a custom autograd Function one op of the tape: its recipe runs the Function's forward again.

`function_run.py` decides which Functions may run again; `function_call.py` runs them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from recollect._torch_functions import FunctionWatcher
from recollect._torch_parallel import passes_ops_on
from recollect.engine.captured import draws_again
from recollect.engine.facts import OpFacts
from recollect.engine.function_call import FunctionCall
from recollect.engine.function_run import FunctionRun, FunctionWatch
from recollect.engine.opcall import current_settings
from recollect.engine.policy import OpActions, TapeState
from recollect.engine.tape_mode import TapeMode
from recollect.engine.together import group_of
from recollect.engine.unseen_writes import forget_overwritten
from recollect.engine.values import StorageRecord, TapeValue, layout_of, snapshot_leaves, watch
from recollect.plans.action import Action
from recollect.replay import Node


class FunctionMode(TapeMode):
    """The mode of one call of a unit, which also sees the calls of Functions."""

    def __init__(self, tape: TapeState, unit_path: str) -> None:
        super().__init__(tape, unit_path)
        self.function: FunctionRun | None = None

    def run_module(self, module_path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module of the unit; one that runs inside a Function has state that a second run might change."""
        if self.function is not None:
            self.function.keep("it runs a module")
        return super().run_module(module_path, forward, args, kwargs)

    def watch_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FunctionWatcher | None:
        if not self.is_watching or self.function is not None:
            return None
        if passes_ops_on(function):
            return CollectiveFunction(self)
        replays = self.tape.agreement is not None
        given = (*args, *kwargs.values())
        run = FunctionRun(function, given, replays_collectives=replays, is_captured=self.is_captured)
        if kwargs:
            run.keep("it takes arguments by name")
        for tensor in run.wrote_unseen:
            snapshot_leaves(tensor.untyped_storage())
        self._forget_overwritten(run)
        self._meet_owners(run)
        return _WatchedFunction(self, run)

    def _meet_owners(self, run: FunctionRun) -> None:
        """Tell the ranks that have parts of its parameters of the plan; keep its results if there is none."""
        for group in filter(None, map(group_of, run.partitioned)):
            if self.tape.agreement is None:
                run.keep("ranks that have parts of its parameters may run under other plans")
            else:
                self.tape.agreement.meet(group)

    def end_function(self, run: FunctionRun) -> None:
        self._forget_overwritten(run)
        if self.tape.agreement is not None:
            for group in run.groups:
                self.tape.agreement.meet(group)
        if not run.kept_because and run.made:
            self._drop(run)

    def _forget_overwritten(self, run: FunctionRun) -> None:
        for tensor in run.wrote_unseen:
            self._writes.add((self.unit_path, self.scope))
            writer = f"the autograd Function {run.function.__name__}"
            forget_overwritten(tensor, writer, (self.unit_path, self.scope, ""))

    def function_actions(self, run: FunctionRun, call: FunctionCall) -> OpActions:
        return self._op_actions(OpFacts(name=run.name, num_returns=run.num_storages), True)

    def _drop(self, run: FunctionRun) -> None:
        """Drop the results of a call: make one value for each of them, and a record for each storage."""
        call = run.recipe(current_settings(self._modes_around), self.tape.agreement)
        actions = self.function_actions(run, call)
        self.told(OpFacts(name=run.name, num_returns=run.num_storages), [made.tensor for made in run.made])
        if not actions:
            return
        if run.draws.is_unknown:
            raise draws_again(self.unit_path, run.name)
        values = [self._argument(tensor, run.name) for tensor in run.arguments.tensors]
        values += [self._other(tensor, run.name) for tensor in run.others]
        run.arguments.release()
        node = Node(call, values, recipes=self.call)
        outputs: list[TapeValue | None] = [None] * run.num_slots
        records: dict[int, StorageRecord] = {}
        for made in run.made:
            action = actions[made.storage] if len(actions) > 1 else actions[0]
            facts = OpFacts(name=run.name, num_returns=run.num_storages)
            if action is Action.SHARD:
                self.hold_part(made.tensor, facts, made.storage)
            elif action is Action.OFFLOAD:
                self.send_away(made.tensor, facts, made.storage)
            if action is not Action.RECOMPUTE:
                continue
            record = records.get(made.storage)
            if record is None:
                value = outputs[made.slot] = TapeValue(None, node)
                record = records[made.storage] = self.note_recipe(made.tensor, value)
                self.compare(made.tensor, made.tensor.untyped_storage(), record.layout)
            elif run.is_saved(made) and layout_of(made.tensor) not in (record.layout, *record.views):
                # A view that the recipe makes, too: nothing else has to hold its base.
                value = outputs[made.slot] = record.views[layout_of(made.tensor)] = TapeValue(None, node)
                value.is_viewed = record.base.is_viewed = True
        for output in outputs:
            node.add_output(output)

    def _argument(self, tensor: torch.Tensor, name: str) -> TapeValue:
        storage = tensor.untyped_storage()
        known = self.known_value(tensor, storage)
        if known is None:
            known = self._other(tensor, name)
            watch(known, storage)
        return known

    def _other(self, tensor: torch.Tensor, name: str) -> TapeValue:
        """Return a value that the recipe does not pass on, for its check that the tensor has not changed."""
        held, version = self.tape.alias(tensor, True)
        return TapeValue(held, None, version, (self.unit_path, self.scope, name))


class CollectiveFunction:
    """Runs a Function of PyTorch's around collectives: its ops are recorded like any others."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode

    def run(self, code: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._mode.is_in_collective = True
        try:
            return code(*args, **kwargs)
        finally:
            self._mode.is_in_collective = False

    def end(self, output: Any, saved: list[torch.Tensor], has_written: bool) -> None:
        pass


class _WatchedFunction:
    def __init__(self, mode: FunctionMode, run: FunctionRun) -> None:
        self._mode = mode
        self._run = run
        self._is_seen = not run.kept_because

    def run(self, code: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        if not self._is_seen:
            return code(*args, **kwargs)
        self._mode.function = run
        try:
            with run.draws.first(), FunctionWatch(run), _without_autocast_cache(run):
                return code(*args, **kwargs)
        finally:
            self._mode.function = None

    def end(self, output: Any, saved: list[torch.Tensor], has_written: bool) -> None:
        if self._is_seen:
            self._run.end(output, saved, has_written)
        self._run.compare_arguments()
        self._mode.end_function(self._run)


@contextmanager
def _without_autocast_cache(run: FunctionRun) -> Iterator[None]:
    """Let a forward cast its weights itself, as it will when it runs again: a cached one would be an argument not seen."""
    if not run.autocast or not torch.is_autocast_cache_enabled():
        yield
        return
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(True)
