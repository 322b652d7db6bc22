"""Improve the best candidate of a model with values alive until the loss, by putting a price on the bytes kept in forward.

Drop the same outputs, and solve a chain that tells forward bytes from backward bytes.

At the loss, a unit costs only what it keeps besides these values (`planning/alive_until_loss.py`); in backward, all
that it keeps. The chain's program counts the bytes of backward; forward's bytes are a second constraint, moved into
the cost at a price to search for: Lagrangian relaxation, as in Everett, "Generalized Lagrange multiplier method for
solving problems of optimum allocation of resources", Operations Research 11(3), 1963. Identical units switch together
as the price rises, so between the last price that is too low and the first that is high enough, switch units one by
one, then fill the room that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recollect.planning.alive_until_loss import held_values, unheld_bytes, with_held
from recollect.planning.chain import Chain, cheapest
from recollect.planning.hull import Option
from recollect.planning.mix import Stage
from recollect.planning.option_table import Candidate, Choice, KnownCosts, OptionsOf, OptionTable
from recollect.planning.output_choices import single_outputs
from recollect.plans.action import Action
from recollect.profile.events import FORWARD
from recollect.profile.graph import UnitGraph
from recollect.simulation.peak_sums import PeakSums

_NUM_CELLS = 400
# Doublings or halvings of the first price to bracket the right one, then bisections of the bracket.
_MOST_DOUBLINGS = 24
_NUM_BISECTIONS = 5
# The most simulations for filling the room in a plan.
_MOST_FILLINGS = 12
# Weight of a byte of backward, relative to one of forward, when filling room.
_BACKWARD_WEIGHT = 0.3
_NO_LIMIT = 2**62
# Identical layers share simulations; more would only measure units that run once, whose options hardly matter.
_MOST_PROBES = 12


class PricedSearch:
    """Searches the priced chains of one profile, remembering the cost of every candidate."""

    def __init__(self, peak_sums: PeakSums, options_of: OptionsOf) -> None:
        self.profile = profile = peak_sums.profile
        self._peak_sums = peak_sums
        self._held = held_values(profile)
        held_of = dict(zip(profile.graphs, self._held, strict=True))

        def options_with_held(graph: UnitGraph, *, output: Action = Action.KEEP) -> tuple[Option, ...]:
            return with_held(graph, options_of(graph, output=output), held_of[graph], output=output)

        self._options_of = cache(options_with_held)
        self._chains: dict[frozenset[str], PricedChain] = {}

    @property
    def is_worthwhile(self) -> bool:
        """Return whether layers save values that are alive until the loss."""
        graphs = self.profile.graphs
        return any(
            graphs[call.graph].values[v].saved and not graphs[call.graph].values[v].is_output
            for call in self.profile.calls
            if call.repeated
            for v in self._held[call.graph]
        )

    def run(self, start: Candidate, budget_bytes: int) -> None:
        """Search for faster candidates that drop the same outputs as a given one."""
        dropped = start.table.drops_outputs
        if dropped not in self._chains:
            self._chains[dropped] = self._new_chain(dropped)
        chain = self._chains[dropped]
        best = chain.costs.candidate(chain.costs.table.choice_of(start.options))
        for found in chain.best(budget_bytes):
            if found.peak_bytes <= budget_bytes and found.recompute_s < best.recompute_s:
                best = found
        for _ in chain.better(best, budget_bytes):
            pass

    def known(self) -> Iterator[Candidate]:
        for chain in self._chains.values():
            yield from chain.costs.known()

    def _new_chain(self, dropped: frozenset[str]) -> PricedChain:
        table = OptionTable(
            self.profile,
            dropped_outputs=dropped,
            options_of=self._options_of,
            free_outputs=single_outputs(self.profile),
        )
        return PricedChain(KnownCosts(self._peak_sums, table), held=self._held, most_probes=_MOST_PROBES)


class _Unit(NamedTuple):
    """One position of the chain: a stage for each direction; forward keeps bytes besides values alive until the loss only."""

    backward: Stage
    forward: Stage


class PricedChain(Chain):
    """A `Chain` for a model with values alive until the loss.

    Complexity: about ten runs of the program for each one of `Chain`, with fewer cells.
    """

    def __init__(self, costs: KnownCosts, *, held: Sequence[frozenset[int]], most_probes: int) -> None:
        table = costs.table
        self._is_forward = [window.phase == FORWARD for window in costs.windows]
        graphs = table.profile.graphs
        self._unheld = [
            [unheld_bytes(graphs[row.graph], option, held[row.graph]) for option in row.options] for row in table.rows
        ]
        self._price_s = 0.0
        super().__init__(costs, most_probes=most_probes)

    def _earlier(self, choice: Choice) -> list[int]:
        # The corrections handle values that other passes keep.
        unheld = [0, *accumulate(self._unheld[row][choice[row]] for row in self.order)]
        return [
            unheld[max(0, position)] if is_forward else kept
            for (position, _), is_forward, kept in zip(
                self._places, self._is_forward, self._before(choice), strict=True
            )
        ]

    def better(self, start: Candidate, budget_bytes: int) -> Iterator[Candidate]:
        """Yield candidates, each filling the room left by the last one within the budget."""
        self._refused[:] = 0
        for _ in range(_MOST_FILLINGS):
            self.correct(start)
            filled = self._choice_of(_filled(self._units(), [start.choice[row] for row in self.order], budget_bytes))
            if filled == start.choice:
                break
            found = self.costs.candidate(filled)
            yield found
            if found.peak_bytes <= budget_bytes:
                start = found
            else:
                self._refused += np.maximum(0, np.array(found.cost.window_peaks) - budget_bytes)
        self._refused[:] = 0

    def _units(self) -> list[_Unit]:
        backward = self._stages(window for window, is_forward in enumerate(self._is_forward) if not is_forward)
        return [
            _Unit(stage, replace(forward, kept_bytes=np.array(self._unheld[row], dtype=np.int64)))
            for row, stage, forward in zip(self.order, backward, self.stages_of(FORWARD), strict=True)
        ]

    def _solve(self, budget_bytes: int) -> Choice | None:
        chosen = self._chosen(self._units(), budget_bytes)
        return None if chosen is None else self._choice_of(chosen)

    def _chosen(self, units: Sequence[_Unit], budget_bytes: int) -> list[int] | None:
        def at(price_s: float) -> list[int] | None:
            return cheapest(
                [_priced(unit, price_s, budget_bytes) for unit in units], budget_bytes, num_cells=_NUM_CELLS
            )

        free = at(0.0)
        if free is None or _fits_forward(units, free, budget_bytes):
            return free
        low, high, unfitting, fitting = self._bracket(
            at, lambda chosen: _fits_forward(units, chosen, budget_bytes), self._price_s or _usual_price_s(units), free
        )
        if fitting is None:
            return None
        for _ in range(_NUM_BISECTIONS):
            price_s = (low + high) / 2
            chosen = at(price_s)
            if chosen is not None and _fits_forward(units, chosen, budget_bytes):
                high, fitting = price_s, chosen
            else:
                low, unfitting = price_s, chosen or unfitting
        self._price_s = high
        return _filled(units, _mixed(units, fitting, unfitting, budget_bytes), budget_bytes)

    @staticmethod
    def _bracket(
        at: Callable[[float], list[int] | None],
        fits: Callable[[list[int]], bool],
        price_s: float,
        free: list[int],
    ) -> tuple[float, float, list[int], list[int] | None]:
        """Return a price that is too low, one that is high enough, and the choices at both."""
        low, high, unfitting, fitting = 0.0, 0.0, free, None
        for _ in range(_MOST_DOUBLINGS):
            chosen = at(price_s)
            if chosen is not None and fits(chosen):
                high, fitting = price_s, chosen
                if low:
                    break
                price_s /= 2
            else:
                low, unfitting = price_s, chosen or unfitting
                if high:
                    break
                price_s *= 2
        return low, high, unfitting, fitting


def _priced(unit: _Unit, price_s: float, budget_bytes: int) -> Stage:
    """Return the stage with the price of forward bytes in its cost, ruling out options too large for forward alone."""
    is_too_much = unit.forward.own_bytes > budget_bytes
    return replace(
        unit.backward,
        recompute_s=unit.backward.recompute_s + price_s * unit.forward.kept_bytes,
        own_bytes=np.where(is_too_much, _NO_LIMIT // 2, unit.backward.own_bytes),
    )


def _usual_price_s(units: Sequence[_Unit]) -> float:
    """Return the average seconds that a byte of forward saves, to start the price search with."""
    seconds = sum(float(np.ptp(unit.backward.recompute_s)) for unit in units)
    nbytes = sum(int(np.ptp(unit.forward.kept_bytes)) for unit in units)
    return seconds / nbytes if seconds > 0 and nbytes > 0 else 1.0


def _fits_forward(units: Sequence[_Unit], chosen: Sequence[int], budget_bytes: int) -> bool:
    kept_bytes = 0
    for unit, option in zip(units, chosen, strict=True):
        if kept_bytes + unit.forward.own_bytes[option] > budget_bytes:
            return False
        kept_bytes += int(unit.forward.kept_bytes[option])
    return True


def _mixed(units: Sequence[_Unit], fitting: list[int], unfitting: list[int], budget_bytes: int) -> list[int]:
    """Return the fitting choice, with units switched to the other choice while it still fits, last units first."""
    room = _Room(units, fitting, budget_bytes)
    for position in reversed(range(len(units))):
        option = unfitting[position]
        if room.saved_s(position)[option] > 0 and room.fits(position)[option]:
            room = _Room(units, [*room.chosen[:position], option, *room.chosen[position + 1 :]], budget_bytes)
    return room.chosen


def _filled(units: Sequence[_Unit], chosen: list[int], budget_bytes: int) -> list[int]:
    """Return the choice with units switched to faster options while there is room, most seconds per byte first."""
    smallest = min((int(b) for unit in units for b in np.diff(np.unique(unit.forward.kept_bytes))), default=1)
    while True:
        room = _Room(units, chosen, budget_bytes)
        best: tuple[float, int, int] | None = None
        for position, unit in enumerate(units):
            here = chosen[position]
            forward = np.maximum(0, unit.forward.kept_bytes - unit.forward.kept_bytes[here])
            backward = np.maximum(0, unit.backward.kept_bytes - unit.backward.kept_bytes[here])
            worth = room.saved_s(position) / (smallest + forward + _BACKWARD_WEIGHT * backward)
            worth[~room.fits(position)] = 0.0
            option = int(np.argmax(worth))
            if worth[option] > 0 and (best is None or worth[option] > best[0]):
                best = float(worth[option]), position, option
        if best is None:
            return chosen
        chosen = [*chosen[: best[1]], best[2], *chosen[best[1] + 1 :]]


class _Room:
    """The room for one unit to switch options while the others stay."""

    def __init__(self, units: Sequence[_Unit], chosen: list[int], budget_bytes: int) -> None:
        self.chosen = chosen
        self._units = units
        self._budget_bytes = budget_bytes
        # In backward, and in forward.
        self._bounds = [_before_and_after(stages, chosen, budget_bytes) for stages in zip(*units, strict=True)]

    def saved_s(self, position: int) -> NDArray[np.float64]:
        """Return the seconds that each option of a unit saves over the chosen one."""
        seconds = self._units[position].backward.recompute_s
        saved: NDArray[np.float64] = seconds[self.chosen[position]] - seconds
        return saved

    def fits(self, position: int) -> NDArray[np.bool_]:
        """Return whether each option of a unit fits the budget, here and in later units."""
        here = self.chosen[position]
        fits = np.ones(len(self._units[position].forward.kept_bytes), dtype=np.bool_)
        for stage, (before, after) in zip(self._units[position], self._bounds, strict=True):
            fits &= stage.own_bytes <= self._budget_bytes - before[position]
            fits &= stage.kept_bytes - stage.kept_bytes[here] <= after[position]
        return fits


def _before_and_after(stages: Sequence[Stage], chosen: Sequence[int], budget_bytes: int) -> tuple[list[int], list[int]]:
    """Return, for each stage, the bytes kept before it, and how many more it could keep so that all later ones fit."""
    before = [0, *accumulate(int(stage.kept_bytes[option]) for stage, option in zip(stages, chosen, strict=True))]
    free = [budget_bytes - start - int(s.own_bytes[o]) for start, s, o in zip(before, stages, chosen, strict=False)]
    after = [*accumulate(reversed(free[1:]), min)]
    return before, [*reversed(after), _NO_LIMIT]
