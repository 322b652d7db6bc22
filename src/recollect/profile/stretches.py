"""Splits a step where nothing waits for backward, and describes each stretch such that equal ones compare equal."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from recollect.profile import events
from recollect.profile.events import Key
from recollect.profile.profile import Profile


@dataclass(slots=True)
class Held:
    """Bytes that the model's own code holds, as allocated, and where in the log it takes and frees them."""

    nbytes: int
    birth: int
    death: int = 2**62


@dataclass(slots=True)
class Stretch:
    """Events between two moments at which a forward or an optimizer step begins while nothing waits for backward."""

    start: int
    end: int
    """Positions in the log, the second excluded."""
    calls: range
    form: tuple[object, ...] = ()
    """Its events; equal for stretches that differ in names only."""
    held: Mapping[Key, Held] = field(default_factory=dict)
    """Storages held by the model's own code when it begins."""
    start_bytes: int = 0
    reads_calls: set[int] = field(default_factory=set)
    """Calls of earlier stretches whose values its units read."""


class StepReader:
    """Follows a step, with names for calls and storages that do not depend on their place in the step."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._found: list[Stretch] = []
        self._position = 0
        self._num_calls = 0
        self._waiting: set[int] = set()
        self._held: dict[Key, Held] = {}
        self._held_bytes = 0
        # For each storage and handle, the stretch and its number there; for each call, the stretch.
        self._storages: dict[int, tuple[int, int]] = {}
        self._handles: dict[int, int] = {}
        self._homes: list[int] = []
        # Of the stretch that is being read.
        self._steps: list[object] = []
        self._num_storages = 0
        self._freed: set[int] = set()
        self._let_go_of: list[tuple[Key, Held]] = []
        # Of the stretch before it.
        self._last: tuple[list[object], list[object]] = [], []

    def read(self) -> list[Stretch]:
        """Return the stretches of the step in order; together they are the whole log."""
        handlers: dict[int, Callable[..., object]] = {
            events.ALLOC: self._alloc, events.FREE: self._free, events.OP: self._op, events.DIES: self._dies,
            events.SAVE: self._save, events.RELEASE: self._release, events.WORK: self._work, events.PHASE: self._phase,
            **{code: partial(self._asks, code) for code in (events.USE, events.PEEK, events.GIVE_BACK)},
            **{code: partial(self._of_call, code) for code in events.OF_CALLS},
        }  # fmt: skip
        self._begin()
        for _ in self._profile.log.play(handlers):
            self._position += 1
        self._end()
        return self._found

    def _begin(self) -> None:
        self._found.append(
            Stretch(self._position, self._position, range(0), held=dict(self._held), start_bytes=self._held_bytes)
        )
        self._steps = []
        self._handles = {}
        self._num_storages = 0
        self._freed = set()
        self._let_go_of = []

    def _end(self) -> None:
        stretch = self._found[-1]
        stretch.end = self._position
        stretch.calls = range(len(self._homes), self._num_calls)
        calls: list[object] = [self._form_of_call(call) for call in stretch.calls]
        self._homes += [len(self._found) - 1] * len(stretch.calls)
        steps, (last_steps, last_calls) = self._steps, self._last
        self._last = steps, calls
        if calls and calls == last_calls and len(steps) > len(last_steps) and steps[: len(last_steps)] == last_steps:
            # Events after the last micro-step, such as the end of its variables, do not belong to it.
            self._last = last_steps, calls
            tail = self._tail(stretch.start + len(last_steps))
            tail.form = tuple(steps[len(last_steps) :])
            stretch.end = tail.start
            self._found.append(tail)
        stretch.form = (*self._last[0], *calls)

    def _tail(self, start: int) -> Stretch:
        now = [*self._held.items(), *self._let_go_of]
        held = {item: found for item, found in now if found.birth < start <= found.death}
        start_bytes = sum(self._profile.block_bytes(found.nbytes) for found in held.values())
        return Stretch(
            start, self._position, range(self._num_calls, self._num_calls), held=held, start_bytes=start_bytes
        )

    def _form_of_call(self, index: int) -> object:
        stretch, call = self._found[-1], self._profile.calls[index]
        stretch.reads_calls.update(source for _, source, _ in call.origins if source not in stretch.calls)
        origins = tuple((value, *self._call_name(source), there) for value, source, there in call.origins)
        outside = tuple((value, *self._storage_name(storage)) for value, storage in call.outside)
        return call.path, call.graph, call.repeated, call.chained, call.num_runs, origins, outside

    def _call_name(self, call: int) -> tuple[object, ...]:
        first = len(self._homes)
        return (call - first,) if call >= first else ("earlier", call)

    def _storage_name(self, storage: int) -> tuple[object, ...]:
        """Name a storage by its number in its stretch: the age of the stretch, if it dies here, or else which one."""
        here = len(self._found) - 1
        home, number = self._storages.get(storage, (-1, storage))
        if home == here:
            return (number,)
        return ("ago", here - home, number) if storage in self._freed else ("earlier", storage)

    def _phase(self, phase: int) -> None:
        if phase in (events.FORWARD, events.OPTIMIZER) and not self._waiting and self._position:
            self._end()
            self._begin()
        self._steps.append((events.PHASE, phase))

    def _alloc(self, storage: int, nbytes: int) -> None:
        self._storages[storage] = len(self._found) - 1, self._num_storages
        self._num_storages += 1
        self._hold((-1, storage), nbytes)
        self._steps.append((events.ALLOC, nbytes))

    def _free(self, storage: int) -> None:
        self._freed.add(storage)
        self._let_go((-1, storage))
        self._steps.append((events.FREE, *self._storage_name(storage)))

    def _work(self, nbytes: int, _time_ns: int = 0) -> None:
        self._steps.append((events.WORK, nbytes))

    def _op(self, call: int, index: int) -> None:
        name = self._runs(call)
        graph = self._profile.graph_of(self._profile.calls[call])
        op = graph.ops[index]
        if op.mutates:
            written = self._let_go((call, op.inputs[0]))
            if written is not None:
                self._hold((call, op.outputs[0]), written.nbytes)
        else:
            for value in op.outputs:
                self._hold((call, value), graph.values[value].nbytes)
        self._steps.append((events.OP, *name, index))

    def _runs(self, call: int) -> tuple[object, ...]:
        self._num_calls = max(self._num_calls, call + 1)
        return self._call_name(call)

    def _dies(self, call: int, value: int) -> None:
        self._let_go((call, value))
        first = len(self._homes)
        if call >= first:
            self._steps.append((events.DIES, call - first, value))
            return
        home = self._homes[call]
        number = call - self._found[home].calls.start
        graph = self._profile.calls[call].graph
        self._steps.append((events.DIES, "ago", len(self._found) - 1 - home, number, graph, value))

    def _save(self, call: int, value: int, handle: int, saver: int) -> None:
        self._waiting.add(handle)
        self._handles[handle] = len(self._handles)
        names = []
        for index in (call, saver):
            names.append(self._runs(index))
            if index < len(self._homes):
                self._found[-1].reads_calls.add(index)
        self._steps.append((events.SAVE, *names, value, self._handles[handle]))

    def _asks(self, code: int, handle: int) -> None:
        self._steps.append((code, self._handles.get(handle, ("earlier", handle))))

    def _release(self, handle: int) -> None:
        self._waiting.discard(handle)
        self._asks(events.RELEASE, handle)

    def _of_call(self, code: int, call: int) -> None:
        self._steps.append((code, *self._runs(call)))

    def _hold(self, item: Key, nbytes: int) -> None:
        self._held[item] = Held(nbytes, birth=self._position)
        self._held_bytes += self._profile.block_bytes(nbytes)

    def _let_go(self, item: Key) -> Held | None:
        held = self._held.pop(item, None)
        if held is not None:
            held.death = self._position
            self._held_bytes -= self._profile.block_bytes(held.nbytes)
            self._let_go_of.append((item, held))
        return held
