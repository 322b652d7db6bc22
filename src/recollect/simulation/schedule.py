"""Defines a schedule, which plays back the calls of one engine, and the parts of a playback that it may use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeAlias

from recollect.profile.graph import OpRecord
from recollect.profile.profile import Profile
from recollect.simulation.program import Key, Program

__all__ = ["Actions", "PlayedStep", "Saved", "Schedule"]

Actions: TypeAlias = Mapping[int, Callable[..., None]]
"""A handler for each instruction code of a program, called with the operands."""


class Saved(Protocol):
    """What autograd holds in place of a tensor."""

    def get(self) -> Any:
        """Return the bytes that backward asks for, computing them first if needed."""


class PlayedStep(Protocol):
    """The part of `recollect.simulation.simulate.Playback` that schedules and re-run ops use.

    Attributes:
        tensors: what the model's own code holds.
        handles: what autograd holds, with the call that saved it.
    """

    profile: Profile
    program: Program
    tensors: dict[Key, Any]
    handles: dict[int, tuple[Saved, int]]

    def make(self, key: Key, nbytes: int) -> Any:
        """Return an object that holds a value's bytes for as long as anything refers to it."""

    def generator_state(self, call: int, nbytes: int) -> Any:
        """Return an object that holds the state of a random generator for a call."""

    def work(self, op: OpRecord) -> None:
        """Run an op in its workspace."""

    def runs_again(self, call: int, op: OpRecord) -> None:
        """Count an op that runs a second time."""


class Schedule(Protocol):
    """Plays the calls of one engine other than the tape; the playback itself plays the tape."""

    def __init__(self, step: PlayedStep, calls: Collection[int]) -> None:
        """Play these calls of a step."""

    def actions(self, play: Actions) -> Actions:
        """Return the actions with those for these calls replaced; `play` handles all other calls."""
