"""Runs random ops so that a second run draws the same numbers, whatever other threads draw in the meantime.

PyTorch's default generators belong to the whole process: between reading one's state and running an op, a second thread
may draw from it, and one that is set back for a second run changes what other threads draw. So a second run draws from its own
generator. So does the first, if there are other threads; the shared generator then takes over its state. An
op that takes no generator has to use the shared one: its second run compares the state of that generator afterwards.

A custom autograd Function, which runs twice as a whole, draws the same numbers both times.
"""

import _thread
import ctypes
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from recollect._torch_private import is_capturing, is_fake_tensor, tree_leaves
from recollect.engine.captured import draws_again
from recollect.engine.facts import OpFacts, OpMode, facts_of
from recollect.errors import RandomDrawError
from recollect.tensors import tensors_in
from recollect.weak_map import WeakMap

# One draw at a time: planned models in several threads cannot disturb each other. The same thread may re-enter:
# a custom op can run a planned unit.
_TURN = threading.RLock()

# How often to repeat a second run that a different thread disturbed. It happens once in a hundred runs while that thread
# does nothing but draw.
_MOST_TRIES = 20

_own = threading.local()

# Of ops that take no generator, and for the shapes and constants among their arguments: whether they have drawn numbers.
_has_drawn: dict[Any, dict[tuple[Any, ...], bool]] = {}
# Of one op; for more, it counts as one that draws.
_MOST_KINDS = 256
# Functions in which kernels that no dispatch mode sees have drawn numbers.
_unseen_drawers = WeakMap[bool]()


class Draw:
    """State that one call of a random op needs to draw the same numbers again: a copy of its generator's, made now.

    `after`: the state in which the op left it; only for ops that cannot be given another generator.
    """

    __slots__ = ("after", "generator", "state")

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.state = generator.get_state()
        self.after: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + (0 if self.after is None else self.after.nbytes)

    def own_generator(self) -> torch.Generator:
        """Return a generator of this thread's, in the state that the op's had."""
        device = self.generator.device
        generators: dict[torch.device, torch.Generator] = vars(_own).setdefault("generators", {})
        generator = generators.get(device)
        if generator is None:
            generator = generators[device] = torch.Generator(device)
        generator.set_state(self.state)
        return generator

    def again(self, func: Any, args: Any, kwargs: dict[str, Any], *, may_repeat: bool = True) -> Any:
        """Run the op a second time; `may_repeat`: it writes to nothing, and may run once more if another thread disturbs it."""
        if self.after is None:
            return _run(func, args, kwargs, self.own_generator())
        # An op that leaves the state as it was draws nothing, even if a different thread drew while it ran forward.
        expected = {state_content(self.state), state_content(self.after)}
        with _TURN:
            for _ in range(_MOST_TRIES if may_repeat else 1):
                now = self.generator.get_state()
                self.generator.set_state(self.state)
                try:
                    output = func(*args, **kwargs)
                    found = self.generator.get_state()
                finally:
                    self.generator.set_state(now)
                if state_content(found) in expected:
                    return output
        raise RandomDrawError(op=str(func))

    def move_shared(self) -> None:
        """Leave the generator as the first run left it; call after a second run, for code that draws from it next."""
        after = self.after if self.after is not None else vars(_own)["generators"][self.generator.device].get_state()
        self.generator.set_state(after)


def first_run(facts: OpFacts, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Draw | None]:
    """Run a random op; return its output, and a record to draw the same numbers again, or None if it drew nothing."""
    if is_capturing():
        refuse_draws(facts, func, args, kwargs, "", str(func))
        return func(*args, **kwargs), None
    generator = _generator_of(facts, func, args, kwargs)
    if generator is None:
        return func(*args, **kwargs), None
    if not takes_generator(func):
        with _TURN:
            draw = Draw(generator)
            output = func(*args, **kwargs)
            after = generator.get_state()
        if not any(map(is_fake_tensor, tensors_in(args))):
            has_drawn = state_content(after) != state_content(draw.state)
            _note_draws(func, args, kwargs, has_drawn)
            if not has_drawn:
                return output, None
        draw.after = after
        return output, draw
    if not _thread._count():  # No other thread: nothing to guard against.
        draw = Draw(generator)
        return func(*args, **kwargs), draw
    with _TURN:
        draw = Draw(generator)
        own = draw.own_generator()
        output = _run(func, args, kwargs, own)
        generator.set_state(own.get_state())
    return output, draw


def may_draw(facts: OpFacts, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a random op may draw numbers, where its generator cannot be read: it has drawn some, or not run like this."""
    known = _has_drawn.get(func, {})
    return draws_numbers(facts, args, kwargs) and known.get(_kind_of(args, kwargs), True)


def refuse_draws(facts: OpFacts, func: Any, args: Any, kwargs: dict[str, Any], unit_path: str, what: str) -> None:
    """Refuse to recompute a random op whose first run is captured, unless it draws nothing."""
    if may_draw(facts, func, args, kwargs):
        raise draws_again(unit_path, what)


def _note_draws(func: Any, args: Any, kwargs: dict[str, Any], has_drawn: bool) -> None:
    known, kind = _has_drawn.setdefault(func, {}), _kind_of(args, kwargs)
    if kind in known or len(known) < _MOST_KINDS:
        known[kind] = known.get(kind, False) or has_drawn


def _kind_of(args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return tuple([getattr(leaf, "shape", leaf) for leaf in tree_leaves((args, kwargs))])


def takes_generator(func: Any) -> bool:
    return _place_of_generator(func) is not None


def draws_unknown(facts: OpFacts, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a random op reads a generator that the tape cannot set: a library's, or on a device other than CPU and CUDA."""
    if not draws_numbers(facts, args, kwargs):
        return False
    return facts.draws_elsewhere or _device(args, kwargs).type not in ("cpu", "cuda", "meta")


def _run(func: Any, args: Any, kwargs: dict[str, Any], generator: torch.Generator) -> Any:
    place = _place_of_generator(func)
    assert place is not None
    overload, position = place
    if position < len(args):
        return overload(*args[:position], generator, *args[position + 1 :], **kwargs)
    return overload(*args, **{**kwargs, "generator": generator})


@functools.cache
def _place_of_generator(func: Any) -> tuple[Any, int] | None:
    """Return the overload of this op that takes a generator, and the argument's position; None if there is none."""
    if not isinstance(func, torch._ops.OpOverload):
        return None
    packet = func.overloadpacket
    names = [argument.name for argument in func._schema.arguments]
    # `rand` and its kin have one overload without it, and one with it.
    for overload in (func, *(getattr(packet, name) for name in packet.overloads())):
        found = [argument.name for argument in overload._schema.arguments]
        if "generator" in found and (overload is func or [name for name in found if name != "generator"] == names):
            return overload, found.index("generator")
    return None


def _generator_of(facts: OpFacts, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Generator | None:
    """Return the generator that a random op is about to read; None if it reads none, or one that cannot be set."""
    if not draws_numbers(facts, args, kwargs):
        return None
    place = _place_of_generator(func)
    given = None if place is None else args[place[1]] if place[1] < len(args) else kwargs.get("generator")
    return given if given is not None else _default_generator(_device(args, kwargs))


def draws_numbers(facts: OpFacts, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a random op draws any numbers with these arguments: dropout of nothing does not."""
    position = facts.dropout_position
    if position is None:
        return True
    return bool(args[position] if position < len(args) else kwargs.get("dropout_p", 0.0))


def _device(args: Any, kwargs: dict[str, Any]) -> torch.device:
    device = kwargs.get("device")
    if device is None:
        device = next((a.device for a in args if isinstance(a, torch.Tensor)), None) or torch.get_default_device()
    return torch.device(device)


def _default_generator(device: torch.device) -> torch.Generator | None:
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda" and torch.cuda.is_available():
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return None


def state_content(state: torch.Tensor) -> bytes:
    """Read a state, which is in host memory, past all dispatch modes."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


class FunctionDraws:
    """The random numbers of one call of a custom autograd Function.

    Random ops are run again one by one, from their own generators. Kernels that no dispatch mode sees draw from a default
    generator, one of `unseen`: if they do, it is set back for the second run.

    Attributes:
        is_captured: it runs while a CUDA graph is captured, when no generator is read.
        is_unknown: it may have drawn numbers that it cannot draw again, since no generator was read.
    """

    def __init__(self, function: Any, unseen: Sequence[torch.Generator], *, is_captured: bool = False) -> None:
        self._function = function
        self.is_captured = is_captured
        self._seen: list[tuple[Any, Draw | None]] = []
        self._watched = [] if is_captured else unseen
        self._unseen: list[tuple[torch.Generator, torch.Tensor]] = []
        self.is_unknown = is_captured and function in _unseen_drawers

    @property
    def state_bytes(self) -> int:
        seen = sum(draw.nbytes for _, draw in self._seen if draw is not None)
        return seen + sum(state.nbytes for _, state in self._unseen)

    @contextmanager
    def first(self) -> Iterator[None]:
        """Note the draws while the Function runs, or while a further part of it does."""
        # As bytes, outside the device's allocator: most Functions do not need them later.
        states = {generator: state_content(generator.get_state()) for generator in self._watched}
        mode = _FirstRun(self._seen, dict(states))
        with mode:
            yield
        self.is_unknown |= mode.may_draw
        known = {generator for generator, _ in self._unseen}
        self._unseen += [
            (generator, torch.frombuffer(bytearray(content), dtype=torch.uint8))
            for generator, content in states.items()
            if generator not in known and mode.was_moved(generator)
        ]
        if self._unseen:
            _unseen_drawers[self._function] = True

    @contextmanager
    def second(self) -> Iterator[None]:
        """Have the Function draw the same numbers, and leave the generators as they are."""
        mode = _SecondRun(self._seen, moves_shared=bool(self._unseen))
        if not self._unseen:
            with mode:
                yield
            return
        with _TURN:
            present = [(generator, generator.get_state()) for generator, _ in self._unseen]
            for generator, state in self._unseen:
                generator.set_state(state)
            try:
                with mode:
                    yield
            finally:
                for generator, state in present:
                    generator.set_state(state)


class _RandomMode(OpMode):
    def run_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        facts = facts_of(func)
        if not facts.is_random or (facts.keeps and not takes_generator(func)):
            return func(*args, **kwargs)  # Collectives wait for each other: they must not also wait for a turn.
        return self.draw(func, args, kwargs)

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class _FirstRun(_RandomMode):
    """Runs random ops and notes what they drew; knows whether other code moved the default generators."""

    def __init__(self, seen: list[tuple[Any, Draw | None]], at: dict[torch.Generator, bytes]) -> None:
        super().__init__()
        self._seen = seen
        self._at = at
        self._moved: set[torch.Generator] = set()
        self.may_draw = False

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        if is_capturing():
            self.may_draw |= may_draw(facts_of(func), func, args, kwargs)
            return func(*args, **kwargs)
        output, draw = first_run(facts_of(func), func, args, kwargs)
        self._seen.append((func, draw))
        if draw is not None and draw.generator in self._at:
            if state_content(draw.state) != self._at[draw.generator]:
                self._moved.add(draw.generator)
            self._at[draw.generator] = state_content(draw.generator.get_state())
        return output

    def was_moved(self, generator: torch.Generator) -> bool:
        """Whether something other than the ops that were seen drew from a default generator; call when all has run."""
        return generator in self._moved or state_content(generator.get_state()) != self._at[generator]


class _SecondRun(_RandomMode):
    """Runs random ops with the numbers of the first run."""

    def __init__(self, seen: list[tuple[Any, Draw | None]], *, moves_shared: bool) -> None:
        super().__init__()
        self._pending = list(reversed(seen))
        self._moves_shared = moves_shared

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        before, draw = self._pending.pop() if self._pending else (None, None)
        if before is not func or draw is None:
            return func(*args, **kwargs)  # If a different op runs than before, `FunctionCall` checks the results.
        output = draw.again(func, args, kwargs, may_repeat=not facts_of(func).writes)
        if self._moves_shared:
            draw.move_shared()
        return output


def cuda_generators(tensors: Iterable[torch.Tensor]) -> list[torch.Generator]:
    """Return the default generators of the current CUDA device, if one is in use, and of those that tensors are on."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    found = {torch.cuda.current_device(), *(t.get_device() for t in tensors if t.is_cuda and not is_fake_tensor(t))}
    return [torch.cuda.default_generators[index] for index in sorted(found)]
