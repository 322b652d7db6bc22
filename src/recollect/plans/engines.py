"""Defines a unit's choice of engine: one small frozen class for each engine, and its word in JSON.

`recollect.engine.tape_engine` maps each choice to the code that carries it out, `recollect.simulation.simulate` to the
code that simulates it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias

from recollect.errors import PlanError


@dataclass(frozen=True, slots=True)
class Tape:
    """Keep or drop value by value: what the plan drops is recomputed, op by op, when backward asks for it."""

    word: ClassVar[EngineWord] = "tape"

    def __str__(self) -> str:
        return self.word


@dataclass(frozen=True, slots=True)
class Region:
    """Run the whole module again when backward first asks for something; its inputs and output are kept.

    For modules that the tape cannot see into. The module's Python runs twice; its buffers, attributes and random numbers are
    the second time what they were the first, but what it does outside itself happens twice.
    """

    word: ClassVar[EngineWord] = "region"

    def __str__(self) -> str:
        return self.word


EngineWord: TypeAlias = Literal["tape", "region"]
EngineChoice: TypeAlias = Tape | Region

_BY_WORD: Final[dict[str, EngineChoice]] = {choice.word: choice for choice in (Tape(), Region())}
ENGINE_WORDS: Final = tuple(_BY_WORD)


def engine_choice(engine: EngineChoice | str) -> EngineChoice:
    """Return the engine that a word stands for, or the argument itself if it is an engine already.

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
