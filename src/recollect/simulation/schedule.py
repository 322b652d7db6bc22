"""How the calls of an engine are played back: what a schedule is, and what it uses of the step that is played."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeAlias

from recollect.profile.graph import OpRecord
from recollect.profile.profile import Profile
from recollect.simulation.program import Key, Program

__all__ = ["Actions", "PlayedStep", "Saved", "Schedule"]

Actions: TypeAlias = Mapping[int, Callable[..., None]]
"""What to do for each code of a program, given its operands."""


class Saved(Protocol):
    """What autograd holds in place of a tensor."""

    def get(self) -> Any:
        """Return the bytes that backward asks for, once they are there."""


class PlayedStep(Protocol):
    """What a schedule, or an op that runs again, uses of `recollect.simulation.simulate.Playback`.

    Attributes:
        tensors: what the model's own code holds.
        handles: what autograd holds, with the call that saved it.
    """

    profile: Profile
    program: Program
    tensors: dict[Key, Any]
    handles: dict[int, tuple[Saved, int]]

    def make(self, key: Key, nbytes: int) -> Any:
        """Return what holds the bytes of a value, as long as somebody refers to it."""

    def generator_state(self, call: int, nbytes: int) -> Any:
        """Return what holds the state of a random generator for a call."""

    def work(self, op: OpRecord) -> None:
        """Run an op in its working memory."""

    def runs_again(self, call: int, op: OpRecord) -> None:
        """Count an op that runs a second time."""


class Schedule(Protocol):
    """Plays the calls whose units name one engine other than the tape, which the playback plays by itself."""

    def __init__(self, step: PlayedStep, calls: Collection[int]) -> None:
        """Play these calls of a step."""

    def actions(self, play: Actions) -> Actions:
        """Return the actions with those for these calls in place; `play` is what to do for all others."""
