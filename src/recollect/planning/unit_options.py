"""Find more options for one unit than its convex hull has, to fill gaps in the budget between hull options.

Vary each hull option by one value, kept instead of dropped or dropped instead of kept; and by one module, whose values
are all kept so that the tape need not watch it. Keep the options that no other dominates in kept bytes, recompute
seconds, and workspace (bytes of recomputed values, which the unit needs in backward).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from recollect.planning.hull import Evaluator, Option, unit_hull
from recollect.planning.stored import Stored
from recollect.plans.action import Action
from recollect.plans.value_names import module_of
from recollect.profile.graph import UnitGraph

# Ops of the units that all variations go through: a second or two.
_OPS_OF_ALL_VARIATIONS = 600_000
_FEWEST_VARIATIONS = 128
# Vary each hull option by at least so many values, before varying more of them.
_FEWEST_VALUES = 32


def unit_options(graph: UnitGraph, *, output: Action = Action.KEEP, most_options: int = 64) -> tuple[Option, ...]:
    """Return options for one unit, including its hull, from the leanest to the fattest.

    Args:
        graph: the unit.
        output: "keep" if the unit's output stays in memory anyway.
        most_options: the most to return, unless the hull alone has more.

    Complexity: one pass over the unit for each hull option and value; in units of more than a few hundred ops, for some
        hull options and the largest values only.
    """
    hull = unit_hull(graph, output=output)
    # The hull without overhead of the tape adds corners: small savings that the overhead per module hides.
    free = hull if not graph.module_tape_s else unit_hull(replace(graph, tape_s=0.0, module_tape_s=()), output=output)
    corners = [*hull, *(option for option in free if option not in hull)]
    produced = frozenset(i for i, value in enumerate(graph.values) if value.producer is not None)
    useful = {v for option in corners for v in option.stored.values} | {i for i in produced if graph.values[i].saved}
    most_variations = max(_FEWEST_VARIATIONS, _OPS_OF_ALL_VARIATIONS // max(1, len(graph.ops)))
    varied = _spread(corners, most_variations // _FEWEST_VALUES)
    values = _largest(graph, useful & produced, most_variations // len(varied))
    can_be_parts = {part.value for part in graph.parts}
    parts = [value for value in values if value in can_be_parts]
    variations = itertools.chain(
        (option.stored for option in corners),
        (
            stored
            for option in varied
            for stored in (*map(option.stored.toggled, values), *map(option.stored.toggled_part, parts))
        ),
        itertools.islice((stored for option in varied for stored in _without_modules(graph, option)), most_variations),
    )
    rest = _undominated(graph, _evaluated(graph, variations, hull, output))
    return _thinned(rest, frozenset(option.stored for option in hull), most_options)


def _spread(options: Sequence[Option], most: int) -> Sequence[Option]:
    """Return at most so many of the options, evenly spread."""
    return options if len(options) <= most else [options[len(options) * i // most] for i in range(most)]


def _largest(graph: UnitGraph, values: Collection[int], most: int) -> list[int]:
    """Return at most so many of the values, the largest, in order."""
    return sorted(sorted(values, key=lambda v: (-graph.values[v].nbytes, v))[:most])


def _without_modules(graph: UnitGraph, option: Option) -> Iterator[Stored]:
    """Yield the stored values if one of the recomputing modules keeps its values instead."""
    computed: dict[str, set[int]] = {}
    for op in sorted(option.recompute_ops):
        computed.setdefault(module_of(graph.ops[op].name), set()).update(graph.ops[op].outputs)
    yield from map(option.stored.with_whole, computed.values())


def _evaluated(
    graph: UnitGraph, variations: Iterable[Stored], hull: tuple[Option, ...], output: Action
) -> list[Option]:
    """Return the options of the hull and those that store these values, without duplicates."""
    seen = {option.stored: option for option in hull}
    evaluator = Evaluator(graph, output=output)
    lost = {i for i, value in enumerate(graph.values) if value.mutated_later and not value.saved}
    for stored in variations:
        option = evaluator.option(*stored)
        if lost.isdisjoint(option.stored.whole):
            seen.setdefault(option.stored, option)
    return list(seen.values())


def _undominated(graph: UnitGraph, options: Iterable[Option]) -> list[Option]:
    """Return the options that no other dominates, in order of bytes."""
    made_bytes = [sum(graph.values[v].nbytes for v in op.outputs) for op in graph.ops]
    measured = [
        (
            option.kept_bytes,
            option.recompute_s,
            sum(map(made_bytes.__getitem__, option.recompute_ops))
            + sum(graph.values[value].nbytes for value in option.stored.parts),
            option,
        )
        for option in options
    ]
    measured.sort(key=lambda m: m[:3])
    # Of those so far, in order of seconds: each one with fewer working bytes than all that are faster.
    seconds: list[float] = []
    working: list[int] = []
    kept: list[Option] = []
    for _, recompute_s, own_bytes, option in measured:
        after = bisect_right(seconds, recompute_s)
        if after and working[after - 1] <= own_bytes:
            continue
        kept.append(option)
        end = after
        while end < len(seconds) and working[end] >= own_bytes:
            end += 1
        seconds[after:end], working[after:end] = [recompute_s], [own_bytes]
    return kept


def working_bytes(graph: UnitGraph, option: Option) -> int:
    """Return the bytes of all values that an option recomputes."""
    return sum(graph.values[v].nbytes for op in option.recompute_ops for v in graph.ops[op].outputs)


def _thinned(options: list[Option], hull: frozenset[Stored], most_options: int) -> tuple[Option, ...]:
    """Return at most `most_options` options, evenly spread; the hull's own always stay."""
    others = [option for option in options if option.stored not in hull]
    room = max(0, most_options - (len(options) - len(others)))
    chosen = {option.stored for option in _spread(others, room)} | hull
    return tuple(option for option in options if option.stored in chosen)
