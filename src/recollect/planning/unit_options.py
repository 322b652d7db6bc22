"""Find more options for one unit than its convex hull has, to fill gaps in the budget between hull options.

Vary each hull option by one value, kept instead of dropped or dropped instead of kept; and by one module, whose values
are all kept so that the tape need not watch it. Keep the options that no other dominates in kept bytes, recompute
seconds, and workspace (bytes of recomputed values, which the unit needs in backward).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from recollect.planning.hull import Evaluator, Option, unit_hull
from recollect.plans.action import Action
from recollect.plans.value_names import module_of
from recollect.profile.graph import UnitGraph

__all__ = ["unit_options", "working_bytes"]


def unit_options(graph: UnitGraph, *, output: Action = Action.KEEP, most_options: int = 64) -> tuple[Option, ...]:
    """Return options for one unit, including its hull, from the leanest to the fattest.

    Args:
        graph: the unit.
        output: "keep" if the unit's output stays in memory anyway.
        most_options: the most to return, unless the hull alone has more.

    Complexity: one pass over the unit for each hull option and value.
    """
    hull = unit_hull(graph, output=output)
    # The hull without overhead of the tape adds corners: small savings that the overhead per module hides.
    free = hull if not graph.module_tape_s else unit_hull(replace(graph, tape_s=0.0, module_tape_s=()), output=output)
    corners = [*hull, *(option for option in free if option not in hull)]
    produced = _produced(graph)
    useful = {v for option in corners for v in option.keep} | {i for i in produced if graph.values[i].saved}
    variations = itertools.chain(
        (option.keep for option in corners),
        (option.keep ^ {value} for option in corners for value in sorted(useful & produced)),
        (keep for option in corners for keep in _without_modules(graph, option)),
    )
    rest = _undominated(graph, _evaluated(graph, variations, hull, output))
    return _thinned(rest, frozenset(option.keep for option in hull), most_options)


def _without_modules(graph: UnitGraph, option: Option) -> Iterator[frozenset[int]]:
    """Yield the kept values if one of the recomputing modules keeps its values instead."""
    computed: dict[str, set[int]] = {}
    for op in sorted(option.recompute_ops):
        computed.setdefault(module_of(graph.ops[op].name), set()).update(graph.ops[op].outputs)
    yield from (option.keep | values for values in computed.values())


def _produced(graph: UnitGraph) -> frozenset[int]:
    return frozenset(i for i, value in enumerate(graph.values) if value.producer is not None)


def _evaluated(
    graph: UnitGraph, keeps: Iterable[frozenset[int]], hull: tuple[Option, ...], output: Action
) -> list[Option]:
    """Return the options of the hull and those that keep these values, without duplicates."""
    seen = {option.keep: option for option in hull}
    evaluator = Evaluator(graph, output=output)
    for keep in keeps:
        option = evaluator.option(keep)
        if not any(graph.values[v].mutated_later and not graph.values[v].saved for v in option.keep):
            seen.setdefault(option.keep, option)
    return list(seen.values())


def _undominated(graph: UnitGraph, options: Iterable[Option]) -> list[Option]:
    """Return the options that no other dominates, in order of bytes."""
    measured = [(option.kept_bytes, option.recompute_s, working_bytes(graph, option), option) for option in options]
    measured.sort(key=lambda m: m[:3])
    kept: list[tuple[int, float, int, Option]] = []
    for candidate in measured:
        if not any(other[1] <= candidate[1] and other[2] <= candidate[2] for other in kept):
            kept.append(candidate)
    return [option for *_, option in kept]


def working_bytes(graph: UnitGraph, option: Option) -> int:
    """Return the bytes of all values that an option recomputes."""
    return sum(graph.values[v].nbytes for op in option.recompute_ops for v in graph.ops[op].outputs)


def _thinned(options: list[Option], hull: frozenset[frozenset[int]], most_options: int) -> tuple[Option, ...]:
    """Return at most `most_options` options, evenly spread; those of the hull always stay."""
    others = [option for option in options if option.keep not in hull]
    room = max(0, most_options - (len(options) - len(others)))
    if len(others) > room:
        others = [others[len(others) * i // room] for i in range(room)]
    chosen = {option.keep for option in others} | hull
    return tuple(option for option in options if option.keep in chosen)
