"""Units whose ops belong to modules that cost the tape something to watch."""

import random
from dataclasses import replace

from recollect.profile.graph import UnitGraph

NUM_MODULES = 3


def on_modules(graph: UnitGraph, rng: random.Random, *, most_s: float = 8.0) -> UnitGraph:
    """The same unit, its ops in modules at random; in whole seconds, so that sums are exact."""
    modules = [f"m{rng.randrange(NUM_MODULES)}" for _ in graph.ops]
    ops = tuple(replace(op, name=f"{module}.{op.name}") for op, module in zip(graph.ops, modules, strict=True))
    values = tuple(
        value if value.producer is None else replace(value, name=f"{modules[value.producer]}.{value.name}")
        for value in graph.values
    )
    # One module is free, as those are that are watched in any case.
    module_tape_s = tuple((f"m{index}", float(rng.randint(0, round(most_s)))) for index in range(NUM_MODULES - 1))
    return UnitGraph(values, ops, tape_s=float(rng.choice((0, 0, 1, 5))), module_tape_s=module_tape_s)
