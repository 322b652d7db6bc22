"""Makes the tape an engine, which carries out the plans of units by running them on it.

`ENGINES` lists all engines: each carries out the plans of the units that name it.
"""

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from torch import nn

from recollect.engine.compiled.compiled_engine import compiled_forwards
from recollect.engine.graph.graph_engine import graph_forwards
from recollect.engine.offload.flight import Offload
from recollect.engine.placed_forward import PlacedForward, unit_module
from recollect.engine.policy import PlanPolicy
from recollect.engine.tape import Tape
from recollect.engine.tape_forwards import tape_forwards
from recollect.engine.together import Agreement, Shards, shards_of
from recollect.errors import PlanError
from recollect.plans.action import Action, EngineChoice
from recollect.plans.paths import unit_words
from recollect.plans.unit_plan import UnitPlan

Engine: TypeAlias = Callable[[nn.Module, Mapping[str, UnitPlan], Agreement, int | None], list[PlacedForward]]
"""Returns the replacements for the modules' `forward` of units, without placing them on the model yet.

It takes the whole model; all of the plan's units that name this engine, by path, in forward order; the agreement of all ranks
to run the whole plan; and the host memory that offloaded values need, None if unknown. It raises
`UnknownNameError` for an unknown unit.
"""


def planned_forwards(
    model: nn.Module, units: Mapping[str, UnitPlan], agreement: Agreement, host_bytes: int | None
) -> list[PlacedForward]:
    """Return forwards that run units on one tape, value by value; units that recompute nothing run as before."""
    # A unit that keeps everything still belongs on the tape if a different unit may have dropped its input, holds a part, or
    # offloads, since each unit is an edge at which copies leave and come back.
    offloads = any(unit.trips for unit in units.values())
    drops_outputs = offloads or any(
        unit.output is Action.RECOMPUTE or Action.SHARD in unit.actions.values() for unit in units.values()
    )
    # And one whose modules did not run when it was recorded may run them in a later step.
    skips = {path for path, unit in units.items() if unit.may_be_of_a_skip and [*unit_module(model, path).children()]}
    paths = [path for path, unit in units.items() if unit.recomputes_anything or drops_outputs or path in skips]
    shards = shards_of(model)
    _check_shards(units, shards)
    offload = Offload(model, units, host_bytes) if offloads else None
    policy = PlanPolicy({path: units[path] for path in paths})
    tape = Tape(policy, agreement=agreement, shards=shards, offload=offload)
    return tape_forwards(model, paths, tape)


def _check_shards(units: Mapping[str, UnitPlan], shards: Shards | None) -> None:
    for path, unit in units.items():
        name = next((name for name, action in unit.actions.items() if action is Action.SHARD), None)
        if name is not None and shards is None:
            raise PlanError(
                f"cannot apply the plan: {unit_words(path)} holds {name!r} as parts, one on each rank, and nothing says on "
                "which ranks. Call recollect.distribute_saved_activations(model, group) first."
            )


ENGINES: Final[Mapping[EngineChoice, Engine]] = {
    EngineChoice.TAPE: planned_forwards,
    EngineChoice.GRAPH: graph_forwards,
    EngineChoice.COMPILE: compiled_forwards,
}
"""The one place to register a new engine."""
