"""Which engine carries out a unit's plan: one small frozen class for each, and the word that stands for it in JSON.

`recollect.engine.registry` says which code carries it out, `recollect.simulation.schedules` which plays it in the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias

from recollect.errors import PlanError

__all__ = ["ENGINE_WORDS", "EngineChoice", "EngineWord", "Region", "Tape", "engine_choice"]


@dataclass(frozen=True, slots=True)
class Tape:
    """Decide value by value: what the plan drops is computed again, op by op, when backward asks for it."""

    word: ClassVar[EngineWord] = "tape"

    def __str__(self) -> str:
        return self.word


@dataclass(frozen=True, slots=True)
class Region:
    """Run the whole module again when backward first asks for something; its inputs and its output are kept.

    For modules that the tape cannot see into. What the module's Python does besides, it does twice.
    """

    word: ClassVar[EngineWord] = "region"

    def __str__(self) -> str:
        return self.word


EngineWord: TypeAlias = Literal["tape", "region"]
EngineChoice: TypeAlias = Tape | Region

_BY_WORD: Final[dict[str, EngineChoice]] = {choice.word: choice for choice in (Tape(), Region())}
ENGINE_WORDS: Final = tuple(_BY_WORD)


def engine_choice(engine: EngineChoice | str) -> EngineChoice:
    """Return the engine that a word stands for; what is an engine already stays.

    Raises:
        PlanError: no engine has this name.

    Example:
        >>> engine_choice("region")
        Region()
    """
    if isinstance(engine, EngineChoice):
        return engine
    if engine not in ENGINE_WORDS:
        raise PlanError(f"engine: got {engine!r}, expected {' or '.join(map(repr, ENGINE_WORDS))}")
    return _BY_WORD[engine]
