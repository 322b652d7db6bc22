"""Has a module that runs twice draw the same numbers both times, from generators of PyTorch, Python and NumPy."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from recollect._torch_private import desugars, raises_version_first
from recollect.engine.draws import Draw, first_run, random_turn, state_content, takes_generator
from recollect.engine.facts import facts_of
from recollect.engine.op_mode import OpMode
from recollect.engine.values import snapshot_targets


class RegionDraws:
    """The random numbers of one call of a region, or of a custom autograd Function.

    Random ops are run again one by one, from generators of their own. Code that no dispatch mode sees (compiled regions) draws
    from the default generators: if it does, they are set back for the second run.

    Args:
        unseen_on_cpu: whether code out of sight may draw on the CPU; to tell takes a few KiB for a moment.
    """

    def __init__(self, *, unseen_on_cpu: bool = True) -> None:
        self._seen: list[tuple[Any, Draw | None]] = []
        self._unseen: list[tuple[torch.Generator, torch.Tensor]] = []
        self._unseen_on_cpu = unseen_on_cpu

    @property
    def state_bytes(self) -> int:
        """Bytes of the generators' states that are held; 0 if nothing was drawn."""
        seen = sum(draw.nbytes for _, draw in self._seen if draw is not None)
        return seen + sum(state.nbytes for _, state in self._unseen)

    @contextmanager
    def first(self) -> Iterator[None]:
        """Note what is drawn while the module runs, or a part of it that follows on another."""
        # As bytes, which take no memory of the device's allocator: most regions do not need them later.
        states = {
            generator: state_content(generator.get_state())
            for generator in _default_generators()
            if self._unseen_on_cpu or generator.device.type != "cpu"
        }
        mode = _FirstRun(self._seen, dict(states))
        with mode:
            yield
        known = {generator for generator, _ in self._unseen}
        self._unseen += [
            (generator, torch.frombuffer(bytearray(content), dtype=torch.uint8))
            for generator, content in states.items()
            if generator not in known and mode.was_moved(generator)
        ]

    @contextmanager
    def second(self) -> Iterator[None]:
        """Have the module draw the same numbers, and leave the generators as they are."""
        mode = _SecondRun(self._seen, moves_shared=bool(self._unseen))
        if not self._unseen:
            with mode:
                yield
            return
        with random_turn():
            present = [(generator, generator.get_state()) for generator, _ in self._unseen]
            for generator, state in self._unseen:
                generator.set_state(state)
            try:
                with mode:
                    yield
            finally:
                for generator, state in present:
                    generator.set_state(state)


class _RegionMode(OpMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(desugars(kind) for kind in types):
            return NotImplemented
        facts = facts_of(func)
        if facts.writes:
            # Regions hold what they read as it was (`region_state.py`).
            targets = [target for target in facts.written_by(args, kwargs) if target.layout is torch.strided]
            snapshot_targets(targets, is_raised=raises_version_first(func))
        if not facts.is_random or (facts.keeps and not takes_generator(func)):
            return func(*args, **kwargs)  # Collectives wait for each other: they may not wait for a turn, too.
        return self.draw(func, args, kwargs)

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a random op."""
        raise NotImplementedError


class _FirstRun(_RegionMode):
    """Runs random ops and notes what they drew; knows whether anybody else moved the default generators."""

    def __init__(self, seen: list[tuple[Any, Draw | None]], at: dict[torch.Generator, bytes]) -> None:
        super().__init__()
        self._seen = seen
        self._at = at
        self._moved: set[torch.Generator] = set()

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
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


class _SecondRun(_RegionMode):
    """Runs random ops with the numbers of the first run."""

    def __init__(self, seen: list[tuple[Any, Draw | None]], *, moves_shared: bool) -> None:
        super().__init__()
        self._pending = list(reversed(seen))
        self._moves_shared = moves_shared

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        before, draw = self._pending.pop() if self._pending else (None, None)
        if before is not func or draw is None:
            return func(*args, **kwargs)  # If another op runs than before, `checkpoint` says so.
        output = draw.again(func, args, kwargs, may_repeat=not facts_of(func).writes)
        if self._moves_shared:
            draw.move_shared()
        return output


def _default_generators() -> list[torch.Generator]:
    found = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


class HostDraws:
    """What one call of a region draws from `random` and, where the program uses it, from `numpy.random`."""

    def __init__(self) -> None:
        self._states = host_states()

    def forward_has_run(self) -> None:
        """Let go of the states if nothing was drawn; call after the first run."""
        if _host_content(host_states()) == _host_content(self._states):
            self._states = None, None

    @contextmanager
    def second(self) -> Iterator[None]:
        """Have the same numbers drawn again, and leave the generators as they are."""
        if self._states[0] is None:
            yield
            return
        present = host_states()
        set_host_states(self._states)
        try:
            yield
        finally:
            set_host_states(present)


def host_states() -> tuple[Any, Any]:
    """Return the states of the generators of the whole process: Python's, and NumPy's if the program uses it."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _host_content(states: tuple[Any, Any]) -> tuple[Any, ...]:
    python, numpy = states
    # The second entry of NumPy's is an array, which does not compare.
    return python, None if numpy is None else (numpy[1].tobytes(), *numpy[2:])


def set_host_states(states: tuple[Any, Any]) -> None:
    """Set the generators of the whole process to these states."""
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])
