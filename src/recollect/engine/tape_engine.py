"""Makes the tape an engine: runs units on it, and has the modules inside them tell it which one is running.

`ENGINES` lists all engines: each carries out the plans of the units that name it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from recollect._torch_private import has_compiled_forward, is_compiled_module, uncompiled
from recollect.engine.compiled.compiled_engine import compiled_forwards
from recollect.engine.eager_forward import look_for_compiler
from recollect.engine.offload.flight import HostUse, Offload
from recollect.engine.own_checkpoints import running_unit
from recollect.engine.placed_forward import PlacedForward, unit_module
from recollect.engine.policy import PlanPolicy
from recollect.engine.tape import Tape
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
    """Return forwards that run units on one tape, which keeps or drops value by value; see `recollect.engine.tape`.

    Units that recompute nothing run as before.

    Raises:
        OffloadError: the plan offloads values, and host memory is too small, or no carrier copies from the device.
    """
    # A unit that keeps everything still belongs on the tape if another unit may have dropped its input, holds a part, or
    # offloads, since each unit is an edge at which copies leave and come back.
    offloads = any(unit.trips for unit in units.values())
    drops_outputs = offloads or any(
        unit.output is Action.RECOMPUTE or Action.SHARD in unit.actions.values() for unit in units.values()
    )
    paths = [path for path, unit in units.items() if unit.recomputes_anything or drops_outputs]
    shards = shards_of(model)
    _check_shards(units, shards)
    offload = Offload(model, units, host_bytes) if offloads else None
    tape = Tape(PlanPolicy(units), agreement=agreement, shards=shards, offload=offload)
    return tape_forwards(model, paths, tape)


def _check_shards(units: Mapping[str, UnitPlan], shards: Shards | None) -> None:
    for path, unit in units.items():
        name = next((name for name, action in unit.actions.items() if action is Action.SHARD), None)
        if name is not None and shards is None:
            raise PlanError(
                f"cannot apply the plan: {unit_words(path)} holds {name!r} as parts, one on each rank, and nothing says on "
                "which ranks. Call recollect.distribute_saved_activations(model, group) first."
            )


def tape_forwards(model: nn.Module, unit_paths: Iterable[str], tape: Tape) -> list[PlacedForward]:
    """Return the forwards that run units on a tape.

    Raises:
        UnknownNameError: the model has no such unit.
    """
    units = {path: unit_module(model, path) for path in unit_paths}
    unit_ids = {id(unit) for unit in units.values()}
    forwards: list[PlacedForward] = []
    for path, unit in units.items():
        forwards.append(_UnitForward(unit, tape, path))
        if has_compiled_forward(unit):
            continue  # A compiled forward is kept as a whole.
        forwards += [
            _ScopeForward(module, tape, name) for name, module in _plain_submodules(unit) if id(module) not in unit_ids
        ]
    return forwards


def _plain_submodules(unit: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the modules below a unit whose `forward` may be wrapped, with their paths in the unit.

    Scripted and compiled modules are left out, with everything inside them.
    """
    found: list[tuple[str, nn.Module]] = []
    for name, child in unit.named_children():
        if isinstance(child, torch.jit.ScriptModule) or is_compiled_module(child):
            continue
        path = f"{prefix}.{name}" if prefix else name
        found += [(path, child), *_plain_submodules(child, path)]
    return found


class _UnitForward(PlacedForward):
    """Runs a unit on the tape."""

    def __init__(self, module: nn.Module, tape: Tape, path: str) -> None:
        super().__init__(module)
        self.tape = tape
        self.path = path

    def host_use(self) -> HostUse | None:
        return None if self.tape.offload is None else self.tape.offload.use()

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.recomputes():
            return self.forward(*args, **kwargs)
        if not self.has_looked:
            look_for_compiler(self)
        with running_unit():
            return self.tape.run(self.path, self.forward, args, kwargs)


class _ScopeForward(PlacedForward):
    """Tells the tape which module inside a unit is running, so that values get the names that the plan uses."""

    def __init__(self, module: nn.Module, tape: Tape, scope: str) -> None:
        super().__init__(module)
        self.tape = tape
        self.scope = scope

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode = self.tape.mode
        if mode is None:
            return self.forward(*args, **kwargs)
        if not self.has_looked:
            look_for_compiler(self)
        return mode.run_module(self.scope, self.forward, args, kwargs)


ENGINES: Final[Mapping[EngineChoice, Engine]] = {
    EngineChoice.TAPE: planned_forwards,
    EngineChoice.COMPILE: compiled_forwards,
}
"""The one place to register a new engine."""
