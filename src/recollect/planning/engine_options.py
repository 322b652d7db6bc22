"""The options of a unit that may run on any engine: inside `torch.compile`, or on the tape.

Seconds are relative to the compiled unit that keeps PyTorch's choice, which makes options of engines comparable.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from recollect.planning.hull import Option, Stored, unit_hull
from recollect.plans.action import Action, EngineChoice
from recollect.profile.graph import UnitGraph

_MOST_ON_TAPE = 12


@cache
def engine_options(graph: UnitGraph, *, output: Action = Action.KEEP) -> tuple[Option, ...]:
    """Return the options of a unit on all engines that it was recorded for, from the leanest to the step without a plan."""
    hull = unit_hull(graph, output=output)
    if output is not Action.KEEP or not graph.variants:
        return hull
    output_bytes = sum(value.nbytes for value in graph.values if value.is_output and value.producer is not None)
    eager_s = graph.beyond_default_s(graph.eager_s)
    compiled = [
        Option(
            stored=Stored.whole_values(variant.kept),
            recompute_ops=frozenset(),
            kept_bytes=variant.own_bytes + output_bytes,
            recompute_s=graph.beyond_default_s(variant.step_s),
            engine=EngineChoice.COMPILE,
            variant=number,
        )
        for number, variant in enumerate(graph.variants)
    ]
    on_tape = (
        hull if len(hull) <= _MOST_ON_TAPE else [hull[len(hull) * i // _MOST_ON_TAPE] for i in range(_MOST_ON_TAPE)]
    )
    eager = [replace(option, recompute_s=option.recompute_s + eager_s) for option in on_tape]
    # All: working sets differ between engines, so one that is slower at no fewer bytes may still lower the peak.
    return (*sorted([*compiled[1:], *eager], key=lambda option: (option.kept_bytes, -option.recompute_s)), compiled[0])
