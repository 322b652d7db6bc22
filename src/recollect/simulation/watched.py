"""Plays a step back in such a way that a subclass hears of all bytes that are made and freed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from recollect.simulation.call_actions import CallActions, calls_on_tape
from recollect.simulation.playback import Owner, Playback, Token
from recollect.simulation.program import Program

__all__ = ["EveryToken", "WatchedPlayback"]

_Made = TypeVar("_Made")


class EveryToken(Program):
    """Gives every value its own token, even where counting bytes would do."""

    def counted(self, call: int, dropped: frozenset[int]) -> frozenset[int]:
        """Return that no values of a call need only be counted."""
        return frozenset()


class _WatchedToken(Token):
    __slots__ = ("made", "watch")

    def __init__(self, playback: WatchedPlayback[Any], nbytes: int, owner: Owner) -> None:
        super().__init__(playback, nbytes, owner)
        self.watch = playback
        self.made = playback.begin(owner, nbytes)

    def __del__(self) -> None:
        super().__del__()
        self.watch.end(self.made)


class WatchedPlayback(Playback, Generic[_Made]):
    """Plays a step back, and says when bytes are made and freed.

    Args:
        program: of the recorded step.
        decisions: one for each of the step's calls, in order.
    """

    token_type = _WatchedToken

    def __init__(self, program: EveryToken, decisions: Sequence[CallActions]) -> None:
        super().__init__(program, dict(enumerate(decisions)), calls_on_tape(decisions))

    @abstractmethod
    def begin(self, owner: Owner, nbytes: int) -> _Made:
        """Take note that bytes are made; return what `end` is to be told of them."""

    @abstractmethod
    def end(self, made: _Made) -> None:
        """Take note that they are freed."""
