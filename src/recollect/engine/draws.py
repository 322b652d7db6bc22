"""Runs random ops so that a second run draws the same numbers, whatever other threads draw in the meantime.

PyTorch's default generators belong to the whole process: between reading one's state and running an op, another thread
may draw from it, and one that is set back for a second run changes what other threads draw. So a second run draws from a
generator of its own. So does the first, if there are other threads; the shared generator then takes over its state. An
op that takes no generator has to use the shared one: its second run compares where that stands afterwards.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import threading
from contextlib import AbstractContextManager
from typing import Any

import torch

from recollect._torch_private import is_fake_tensor
from recollect.engine.facts import OpFacts
from recollect.errors import RandomDrawError
from recollect.tensors import tensors_in

# One draw at a time, so that planned models in several threads cannot disturb each other. The same thread may come
# again: a custom op can run a planned unit.
_TURN = threading.RLock()

# How often to repeat a second run that another thread disturbed. One run in a hundred is, while that thread does
# nothing but draw.
_MOST_TRIES = 20

_own = threading.local()


class Draw:
    """What one call of a random op needs to draw the same numbers again.

    Args:
        generator: the generator that the op reads. Its state is copied now.
        after: the state in which the op left it; only for ops that cannot be given another generator.
    """

    __slots__ = ("after", "generator", "state")

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.state = generator.get_state()
        self.after: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the states held."""
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
        """Run the op a second time.

        Args:
            func: the op.
            args: its arguments, equal to the first run's.
            kwargs: the same by keyword.
            may_repeat: the op writes to nothing, so that it may run once more if another thread disturbs it.

        Raises:
            RandomDrawError: the op drew other random numbers than in forward.
        """
        if self.after is None:
            return _run(func, args, kwargs, self.own_generator())
        # An op that leaves the state as it was draws nothing, even if another thread drew while it ran forward.
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


def random_turn() -> AbstractContextManager[Any]:
    """Keep other threads from running random ops through this file; the default generators may be changed meanwhile."""
    return _TURN


def first_run(facts: OpFacts, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Draw | None]:
    """Run a random op; return its output, and what it takes to draw the same again, or None if it drew nothing."""
    generator = _generator_of(facts, func, args, kwargs)
    if generator is None:
        return func(*args, **kwargs), None
    if not takes_generator(func):
        with _TURN:
            draw = Draw(generator)
            output = func(*args, **kwargs)
            after = generator.get_state()
        if state_content(after) == state_content(draw.state) and not any(map(is_fake_tensor, tensors_in(args))):
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


def takes_generator(func: Any) -> bool:
    """Whether an op can be told which generator to draw from."""
    return _place_of_generator(func) is not None


def draws_unknown(facts: OpFacts, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a random op reads a generator that the tape cannot set: that of a device other than CPU and CUDA."""
    return _draws(facts, args, kwargs) and _device(args, kwargs).type not in ("cpu", "cuda", "meta")


def _run(func: Any, args: Any, kwargs: dict[str, Any], generator: torch.Generator) -> Any:
    """Run an op with this generator in place of the one in its arguments."""
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
    if not _draws(facts, args, kwargs):
        return None
    place = _place_of_generator(func)
    given = None if place is None else args[place[1]] if place[1] < len(args) else kwargs.get("generator")
    return given if given is not None else _default_generator(_device(args, kwargs))


def _draws(facts: OpFacts, args: Any, kwargs: dict[str, Any]) -> bool:
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
