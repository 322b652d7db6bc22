"""Turn a recorded step into a different one: the next step, a larger one, or one with different gradients.

`out = model(**batch)` binds the output of this step only when forward has run, so until then the output of the last step, its
logits and caches, is still in memory. The recorded step had no step before it. Here it gets its own leftovers, as
every step does from the second one on. `Returns` notes when models return, and so when their outputs are replaced.

The profile of such a step (with gradients alive, or larger) is accurate enough to choose the values that the step drops
while it is recorded itself; its own profile then replaces this one.
"""

import itertools
import operator
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from recollect._torch_private import current_autograd_node, transforms_are_active, uncompiled
from recollect.engine.subclasses import strided_tensors
from recollect.plans.paths import paths_above
from recollect.profile import events
from recollect.profile.events import Event, Key, StepLog
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.recording.find_units import is_called
from recollect.recording.step_recorder import StepRecorder
from recollect.recording.trackers import RecordedCall, Tracked, tracker_of
from recollect.tensors import tensors_held

_Caller: TypeAlias = tuple[nn.Module, bool]
"""A module that is called, and whether gradients are on."""

# Of Hugging Face's outputs.
_CACHES = frozenset({"past_key_values", "cache"})


class Leftover(NamedTuple):
    """A storage that is alive when the recording ends: its bytes, and the position of the event that made it.

    `is_held`: by the model's code or the loop, not only by a graph that no backward used up, which holds what the plan says.
    """

    nbytes: int
    made_at: int
    is_held: bool


def leftovers(recorded: Iterable[Event], calls: Sequence[RecordedCall]) -> dict[Key, Leftover]:
    """Return the storages the events leave alive, including those in graphs that no backward used up."""
    values: dict[Key, None] = {}
    storages: dict[Key, int] = {}
    saved: dict[int, Key] = {}
    made_at: dict[Key, int] = {}
    for position, (code, *operands) in enumerate(recorded):
        if code in (events.ALLOC, events.SUM):
            storages[-1, operands[0]] = operands[-1]
            made_at[-1, operands[0]] = position
        elif code == events.FREE:
            storages.pop((-1, operands[0]), None)
        elif code == events.OP:
            call, index = operands
            op = calls[call].ops[index]
            if op.mutates:
                values.pop((call, op.inputs[0]), None)
            values.update(((call, value), None) for value in op.outputs)
            made_at.update(((call, value), position) for value in op.outputs)
        elif code == events.DIES:
            values.pop((operands[0], operands[1]), None)
        elif code == events.SAVE and calls[operands[0]].values[operands[1]].producer is not None:
            saved[operands[2]] = operands[0], operands[1]
        elif code == events.RELEASE:
            saved.pop(operands[0], None)
    alive = {**values, **dict.fromkeys(saved.values())}
    sizes = {key: calls[key[0]].values[key[1]].nbytes for key in alive} | storages
    return {key: Leftover(nbytes, made_at[key], key[0] < 0 or key in values) for key, nbytes in sizes.items()}


def with_last_step(recorded: Sequence[Event], last: Mapping[int, tuple[int, int]]) -> list[Event]:
    """Return the events, with storages of the step before: alive at the start, and until they are replaced.

    `last`: for each storage, by a number unused in the events: its bytes, and the position before which it dies.
    """
    ends: defaultdict[int, list[int]] = defaultdict(list)
    for number, (_, end) in last.items():
        ends[end].append(number)
    made: list[Event] = [(events.ALLOC, number, nbytes) for number, (nbytes, _) in last.items()]
    for position, event in enumerate(recorded):
        made += [(events.FREE, number) for number in ends.get(position, ())]
        made.append(event)
    return [*made, *((events.FREE, number) for number in ends.get(len(recorded), ()))]


class Phases:
    """The phases of a step, by position."""

    def __init__(self, recorded: Sequence[Event]) -> None:
        begins = [(position, event[1]) for position, event in enumerate(recorded) if event[0] == events.PHASE]
        self._begins = [position for position, _ in begins]
        self._end = len(recorded)
        self.first_backward = next((position for position, phase in begins if phase == events.BACKWARD), self._end)
        self._kinds = [phase for _, phase in begins]

    def ends_of_results(self, left: Iterable[Leftover]) -> Mapping[int, int]:
        """Return by the end of each backward where what the last step left of it ends.

        Gradients of several losses for the same parameters are taken to be in one list, which lives until all are made.
        """
        sizes: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for nbytes, made_at, _ in left:
            end = self.next_after(made_at)
            if self._kinds[bisect_left(self._begins, end) - 1] == events.BACKWARD:
                sizes[end][nbytes] += 1
        return {
            end: max(at for at, its in sizes.items() if at == end or (own.total() > 1 and own <= its))
            for end, own in sizes.items()
        }

    def next_after(self, position: int) -> int:
        """Return the position of the first phase that begins after a position; else the end."""
        following = bisect_right(self._begins, position)
        return self._begins[following] if following < len(self._begins) else self._end


def foreseen(profile: Profile, *, gradients_bytes: Sequence[int] = (), growth: float = 1.0) -> Profile:
    """Return the profile of a step like a recorded one, but larger, or with gradients alive when it begins.

    Tensors that backward makes and nobody frees are gradients. One alive when the step begins lives until the backward
    that makes its successor.

    `gradients_bytes`: of each gradient that is alive when the other step begins, but was not in the recorded one. `growth`:
    ratio of the other step's input elements to the recorded step's; gradients and the optimizer's tensors do not grow.
    """
    recorded = list(profile.log.events)
    made = _gradients_made(recorded)
    remaining = list(made.values())
    last: dict[int, tuple[int, int]] = {}
    first_number = _unused_number(recorded)
    for nbytes in gradients_bytes:
        # Among equally large gradients, those made last live longest.
        successor = next((gradient for gradient in reversed(remaining) if gradient[0] == nbytes), None)
        if successor is not None:
            remaining.remove(successor)
            last[first_number + len(last)] = successor
    if growth != 1.0:
        recorded = _grown(recorded, growth, made)
    log = StepLog(tuple(with_last_step(recorded, last)))
    return replace(profile, graphs=tuple(_grown_graph(graph, growth) for graph in profile.graphs), log=log)


def _unused_number(recorded: Sequence[Event]) -> int:
    return 1 + max((event[1] for event in recorded if event[0] in (events.ALLOC, events.FREE)), default=-1)


def _gradients_made(recorded: Sequence[Event]) -> Mapping[int, tuple[int, int]]:
    """Return the storages that backward makes and nobody frees: by number, their bytes and the start of that backward."""
    made: dict[int, tuple[int, int]] = {}
    begin, phase = 0, events.FORWARD
    for position, (code, *operands) in enumerate(recorded):
        if code == events.PHASE:
            begin, phase = position, operands[0]
        elif code == events.ALLOC and phase == events.BACKWARD:
            made[operands[0]] = operands[1], begin
        elif code == events.FREE:
            made.pop(operands[0], None)
    return made


def _grown(recorded: Sequence[Event], growth: float, gradients: Mapping[int, tuple[int, int]]) -> list[Event]:
    """Return the events with larger storages, except gradients (including the last step's) and the optimizer's."""
    gradient_sizes = {nbytes for nbytes, _ in gradients.values()}
    grown: list[Event] = []
    is_before, phase = True, events.FORWARD
    for event in recorded:
        is_before &= event[0] in (events.ALLOC, events.PHASE)
        if event[0] == events.PHASE:
            phase = event[1]
        elif event[0] == events.ALLOC and not (
            event[1] in gradients or phase == events.OPTIMIZER or (is_before and event[2] in gradient_sizes)
        ):
            event = (events.ALLOC, event[1], int(event[2] * growth))  # noqa: PLW2901
        grown.append(event)
    return grown


def _grown_graph(graph: UnitGraph, growth: float) -> UnitGraph:
    if growth == 1.0:
        return graph
    return replace(
        graph,
        values=tuple(replace(value, nbytes=int(value.nbytes * growth)) for value in graph.values),
        ops=tuple(replace(op, working_bytes=int(op.working_bytes * growth)) for op in graph.ops),
    )


def with_copies(profile: Profile) -> Profile:
    """Return a profile where the tape shares nothing with the model that lives into backward: keeping it costs bytes.

    A plan that keeps a value which the model itself holds on to, such as a cache of keys, shares it with the model, at no cost.
    The recording tape has a copy, which shows when the model releases it.

    It is for choosing a plan. If the plan drops such a value, its recomputed copy stays as long as the model holds
    the value; this is ignored.
    """
    recorded = list(profile.log.events)
    added: defaultdict[int, list[Event]] = defaultdict(list)
    replaced: dict[int, Event] = {}
    number = _unused_number(recorded)
    for (call, value), begin, end in _held(profile, recorded):
        nbytes = profile.graph_of(profile.calls[call]).values[value].nbytes
        added[begin] += [(events.DIES, call, value), (events.ALLOC, number, nbytes)]
        if end is not None:
            replaced[end] = events.FREE, number
        number += 1
    written: list[Event] = []
    for position, event in enumerate(recorded):
        written += [replaced.get(position, event), *added.get(position, ())]
    return replace(profile, log=StepLog(tuple(written)))


def _held(profile: Profile, recorded: Sequence[Event]) -> Iterator[tuple[tuple[int, int], int, int | None]]:
    """Yield values that the model holds into backward, with the place after the last read in a forward, and death, if any."""
    returns: dict[int, int] = {}
    ends: dict[tuple[int, int], int] = {}
    read: dict[tuple[int, int], int] = {}
    made: dict[tuple[int, int], None] = {}
    begins = [position for position, event in enumerate(recorded) if event[:2] == (events.PHASE, events.BACKWARD)]
    for position, (code, *operands) in enumerate(recorded):
        if code == events.OP:
            graph = profile.graph_of(profile.calls[operands[0]])
            made.update(((operands[0], value), None) for value in graph.ops[operands[1]].outputs)
        elif code == events.RETURN:
            returns[operands[0]] = position
            read.update(((source, value), position) for _, source, value in profile.calls[operands[0]].origins)
        elif code == events.SAVE:
            read[operands[0], operands[1]] = position
        elif code == events.DIES:
            ends[operands[0], operands[1]] = position
    for key in made:
        if profile.graph_of(profile.calls[key[0]]).values[key[1]].mutated_later or key[0] not in returns:
            continue
        begin, end = max(returns[key[0]], read.get(key, -1)), ends.get(key)
        if any(position > begin and (end is None or position < end) for position in begins):
            yield key, begin, end


def _nothing(*_: Any) -> None:
    pass


class _Hook:
    """Calls a method of a recording; does nothing in a copy of the module, for which all that it holds would be copied."""

    def __init__(self, method: Callable[..., object]) -> None:
        self._method = method

    @uncompiled
    def __call__(self, *given: Any) -> None:
        self._method(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, ((_nothing,), 0)


class Returns:
    """Records when the outermost calls of a model, or of the models in a list, return.

    Calls with and without gradients are different: with a model that is its own teacher, both outputs are held.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._outermost: nn.Module | None = None
        self.makes_cache = False
        # The log position where each one returned, and the call an output comes from.
        self._positions: dict[_Caller, list[int]] = {}
        self._outputs: dict[Key, tuple[_Caller, int]] = {}

    @contextmanager
    def seen_by_hooks(self, model: nn.Module, unit_paths: Collection[str]) -> Iterator[None]:
        with ExitStack() as stack:
            for module in entry_modules(model, unit_paths).values():
                stack.callback(module.register_forward_pre_hook(_Hook(self._begin)).remove)
                stack.callback(module.register_forward_hook(_Hook(self._end), always_call=True).remove)
            yield

    def run(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the replacement for a module's call, and note the call.

        This informs a recording that begins within a call: PyTorch has already looked up hooks by then.
        """
        self._begin(module, args)
        output = None
        try:
            output = function(*args, **kwargs)
        finally:
            self._end(module, args, output)
        return output

    def replaced_at(self, alive: Container[Key]) -> dict[Key, int]:
        """Return, for each output that the step leaves alive, where the log replaces the last step's.

        Among calls whose outputs are held, the outputs of the first are replaced when the module first returns, and so
        on: in accumulation, the last call's outputs by the first call's.
        """
        held = {key: where for key, where in self._outputs.items() if key in alive}
        numbers = {caller: sorted({n for other, n in held.values() if other == caller}) for caller in self._positions}
        return {key: self._positions[caller][numbers[caller].index(n)] for key, (caller, n) in held.items()}

    def deaths(self) -> Iterator[Event]:
        for call, number in self._outputs:
            yield (events.DIES, call, number) if call >= 0 else (events.FREE, number)

    @uncompiled
    def _begin(self, module: nn.Module, _args: Any) -> None:
        # Backward may run a module again; results of a function transform have no storage.
        if self._outermost is None and current_autograd_node() < 0 and not transforms_are_active():
            self._outermost = module
            self._recorder.begin_forward()

    @uncompiled
    def _end(self, module: nn.Module, _args: Any, output: Any) -> None:
        if self._outermost is not module or transforms_are_active():
            return
        self._outermost = None
        self.makes_cache |= isinstance(output, Mapping) and not _CACHES.isdisjoint(output.keys())
        caller = module, torch.is_grad_enabled()
        positions = self._positions.setdefault(caller, [])
        for tensor in strided_tensors(tensors_held(output)):
            tracker = tracker_of(tensor.untyped_storage())
            if isinstance(tracker, Tracked):
                self._outputs[tracker.key] = caller, len(positions)
        positions.append(len(self._recorder.events))


def entry_modules(model: nn.Module, unit_paths: Collection[str]) -> dict[str, nn.Module]:
    """Return the modules a training loop may call: the model and every module between it and a unit, by path.

    Nobody calls a list of modules, or a model without a forward: the models in it are called.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    paths = {"", *itertools.chain.from_iterable(paths_above(path) for path in unit_paths)}
    if type(model).forward is nn.Module.forward:
        paths.update(path for path, _ in model.named_children())
    return {path: modules[path] for path in sorted(paths) if is_called(modules[path])}
