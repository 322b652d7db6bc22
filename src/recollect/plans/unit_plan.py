"""Defines `UnitPlan`: the action for each value of one unit, by name; and the parts that processes have to agree on."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from recollect.errors import PlanError
from recollect.plans.action import OUTPUT_ACTIONS, Action, EngineChoice
from recollect.plans.trip import Trip, checked_trip
from recollect.plans.value_names import collective_kind, module_of

_Word = TypeVar("_Word", Action, EngineChoice)


@dataclass(frozen=True, init=False)
class UnitPlan:
    """The values that one unit keeps.

    Attributes:
        actions: the action for each value, by name, in forward order. May be given as actions or their words.
        output: `Action.RECOMPUTE` if the unit's output is dropped too, and recomputed from an earlier unit's input; else
            `Action.KEEP`: as a part, if the action of its value is `Action.SHARD`.
        engine: `EngineChoice.TAPE` follows `actions`; `EngineChoice.COMPILE` follows them inside `torch.compile`, and keeps the
            output; without actions it keeps PyTorch's choice. May be an engine or its word, "tape" or "compile".
        trips: when each value with `Action.OFFLOAD` leaves and comes back; `Trip()` for those that are not named.

    Raises:
        PlanError: an unknown word; an impossible trip, or one of a value that is not offloaded; or a value is offloaded in a
            unit off the tape; or a compiled unit drops its output, or holds values as parts.

    Example:
        >>> unit = UnitPlan({"norm.mul": "recompute", "up.mm": "keep"})
        >>> unit.recomputes_anything
        True
        >>> unit.actions["norm.mul"] is Action.RECOMPUTE
        True
    """

    actions: Mapping[str, Action]
    output: Action
    engine: EngineChoice
    trips: Mapping[str, Trip]

    def __init__(
        self,
        actions: Mapping[str, Action | str],
        output: Action | str = Action.KEEP,
        engine: EngineChoice | str = EngineChoice.TAPE,
        trips: Mapping[str, Trip] = MappingProxyType({}),  # noqa: B008, it is frozen
    ) -> None:
        # Fast path for values that are already actions: the planner makes many unit plans.
        checked = {n: a if type(a) is Action else _chosen(f"value {n!r}", a, tuple(Action)) for n, a in actions.items()}
        object.__setattr__(self, "actions", MappingProxyType(checked))
        object.__setattr__(self, "output", _chosen("output", output, OUTPUT_ACTIONS))
        object.__setattr__(self, "engine", _chosen("engine", engine, tuple(EngineChoice)))
        object.__setattr__(self, "trips", MappingProxyType(_trips(checked, trips)))
        if self.trips and self.engine is not EngineChoice.TAPE:
            name = next(iter(self.trips))
            raise PlanError(
                f"engine: got {self.engine.value!r} with {name!r} offloaded, expected 'tape': other engines copy nothing to "
                "host memory. Leave out one of them."
            )
        if self.engine in (EngineChoice.COMPILE, EngineChoice.GRAPH) and not self.keeps_whole:
            raise PlanError(
                f"engine: got {self.engine.value!r} for a unit that drops its output or holds values as parts, expected "
                "'tape': compiled and traced code keeps what a unit returns, and whole values. Leave out one of them."
            )

    def __hash__(self) -> int:
        return hash((frozenset(self.actions.items()), self.output, self.engine, frozenset(self.trips.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        # A mappingproxy cannot be pickled or deep-copied.
        return UnitPlan, (dict(self.actions), self.output, self.engine, dict(self.trips))

    @property
    def keeps_whole(self) -> bool:
        """Whether the output is kept, and no value is held as a part."""
        return self.output is Action.KEEP and Action.SHARD not in self.actions.values()

    @property
    def recomputes_anything(self) -> bool:
        """Whether anything is recomputed, held as a part, or away from the device in between."""
        return {self.output, *self.actions.values()} != {Action.KEEP}

    @property
    def may_be_of_a_skip(self) -> bool:
        """Whether no module inside the unit ran when it was recorded, as where stochastic depth passed its input on."""
        return not self.recomputes_anything and not any(map(module_of, self.actions))


def _trips(actions: Mapping[str, Action], given: Mapping[str, Trip]) -> dict[str, Trip]:
    for name in given:
        if actions.get(name) is not Action.OFFLOAD:
            raise PlanError(f"trip of value {name!r}: got one, expected none, as the value is not offloaded")
    return {
        name: checked_trip(f"trip of value {name!r}", given.get(name, Trip()))
        for name, action in actions.items()
        if action is Action.OFFLOAD
    }


def _chosen(what: str, word: str, allowed: Sequence[_Word]) -> _Word:
    for choice in allowed:
        if choice == word:
            return choice
    raise PlanError(f"{what}: got {word!r}, expected {' or '.join(repr(str(other)) for other in allowed)}")


def digest_of(units: Mapping[str, UnitPlan], loss_chunks: int = 1) -> str:
    """Return a text that is equal for equal unit plans, in every process: their actions, without predictions."""
    rows = [
        (path, str(unit.engine), str(unit.output), sorted(_words(unit).items())) for path, unit in sorted(units.items())
    ]
    return hashlib.sha256(repr((rows, loss_chunks)).encode()).hexdigest()[:12]


def _words(unit: UnitPlan) -> dict[str, str]:
    """Return the action for each value, in words; for an offloaded one, also when."""
    words = {name: str(action) for name, action in unit.actions.items()}
    return words | {name: f"{words[name]} {tuple(trip)}" for name, trip in unit.trips.items()}


def needs_all_ranks(units: Mapping[str, UnitPlan]) -> bool:
    """Return whether a rank needs the others to carry a plan out: to run a collective again, or to gather a value's parts."""
    return any(
        action is Action.SHARD or (action is Action.RECOMPUTE and bool(collective_kind(name)))
        for unit in units.values()
        for name, action in unit.actions.items()
    )
