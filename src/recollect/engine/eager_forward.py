"""Runs the modules of a plan without the compiler where their user compiled them, and warns.

Dynamo would trace a compiled model up to each unit, break its graph there, and compile the code between them: other ops than
were recorded, with other bits. So the graph is broken around the modules that contain units, too. This does not
concern units that a plan compiles: the code between them runs eagerly, as it was recorded.
"""

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from recollect._torch_private import (
    compiled_function,
    compiler_around,
    has_compiled_forward,
    is_compiled_module,
    leave_graph,
    without_compiler,
)
from recollect.engine.own_checkpoints import running_unit
from recollect.engine.placed_forward import PlacedForward, placed_call, unit_modules
from recollect.engine.tape import Tape
from recollect.errors import BudgetWarning, ConfigError, ConfigWarning
from recollect.plans.paths import paths_above, unit_words
from recollect.warning import warn_user
from recollect.weak_map import WeakMap

# Models already reported as compiled.
_told = WeakMap[bool]()
# Models recorded outside the compiler for plans that will run their layers inside it.
_expected = WeakMap[bool]()


def eager_forwards(
    model: nn.Module,
    unit_paths: Iterable[str],
    placed: Iterable[PlacedForward],
    compiled_paths: Collection[str] = (),
) -> list[PlacedForward]:
    """Return forwards for the modules that contain units, and for units that have none since they keep everything.

    A compiled `forward` of a unit is left alone: it is kept as a whole. So are the modules inside units that a plan
    has compiled.
    """
    placed = list(placed)
    known = {id(forward.module) for forward in placed}
    known |= {id(part) for unit in unit_modules(model, compiled_paths).values() for part in unit.modules()}
    units = set(unit_paths) if known else set()
    above = {path for unit in units for path in ("", *paths_above(unit))} - units
    forwards = [EagerForward(model.get_submodule(path)) for path in sorted(above)]
    kept = {path: model.get_submodule(path) for path in sorted(units)}
    tapes = tuple(dict.fromkeys(forward.tape for forward in placed if hasattr(forward, "tape")))
    forwards += [KeptUnit(unit, path, tapes) for path, unit in kept.items() if not has_compiled_forward(unit)]
    return [forward for forward in forwards if id(forward.module) not in known and _may_place(forward.module)]


def _may_place(module: nn.Module) -> bool:
    """Whether a module has a forward, unlike a list of modules, and none of a different plan."""
    own = vars(module).get("forward")
    return not isinstance(own, PlacedForward) and (own is not None or type(module).forward is not nn.Module.forward)


class EagerForward(PlacedForward):
    """Runs a module without the compiler."""

    @placed_call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_on:
            look_for_compiler(self)
        if not self.recomputes():
            return self.forward(*args, **kwargs)
        return (compiled_function(self.forward) or self.forward)(*args, **kwargs)


class KeptUnit(EagerForward):
    """Does the same for a unit; where a unit on a tape calls it, its values are not taken for those of that unit."""

    def __init__(self, module: nn.Module, path: str, tapes: tuple[Tape, ...]) -> None:
        super().__init__(module)
        self.path = path
        self.tapes = tapes

    @placed_call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with running_unit():
            tape = next((one for one in self.tapes if one.mode is not None), None)
            if tape is None or not self.recomputes():
                return super().__call__(*args, **kwargs)
            return tape.run(self.path, super().__call__, args, kwargs)


def expect_compiler(model: nn.Module) -> None:
    """Do not warn that a compiled model is recorded uncompiled: its plan will run layers inside the compiler."""
    _expected[model] = True


def look_for_compiler(forward: PlacedForward) -> None:
    """Warn, once for a model, where a plan and `torch.compile` conflict; called in a module's first call.

    It is called in each one where `fullgraph=True` asked for one graph of a unit. That is about breaks in the unit's own code.
    """
    is_one_graph = compiler_around()
    if is_one_graph and type(forward) is EagerForward:
        raise ConfigError(
            settings={"fullgraph": True},
            reason=f"torch.compile was asked for one graph of {_compiled_of(forward)}, which a plan has run eagerly",
            advice="Compile its layers one by one, each with fullgraph=True; or leave out fullgraph=True, or the plan.",
        )
    forward.has_looked = leave_graph() < 0
    model, plan = forward.applied.model, forward.applied.plan
    has_own = compiled_function(forward.forward) is not None
    # A plan that has layers compiled was made to run the others uncompiled.
    is_expected = model in _expected or (plan is not None and plan.is_compiled)
    is_whole = has_own and not isinstance(forward, EagerForward) and without_compiler(forward.module) is forward.module
    if model in _told or (is_expected and not is_whole) or not (has_own or is_one_graph is not None):
        return
    _told[model] = True
    if is_whole:
        warn_user(
            f"recollect: the forward of {_compiled_of(forward)} is compiled, and stays so under a plan: all that it saves is "
            "kept, and what else it allocates is not seen. To have more recomputed, compile the module in place "
            "(module.compile()) and plan it with engine='compile', or compile modules inside it instead.",
            BudgetWarning,
        )
        return
    warn_user(
        f"recollect: torch.compile has no effect on {_compiled_of(forward)}, which a plan has run eagerly: with the "
        "gradients of the model without torch.compile, and the predicted slowdown is against that one. Have layers stay "
        "compiled, and keep what the plan keeps: recollect.fit(..., engine='compile'), or attach. Or leave torch.compile "
        "out; or compile modules inside the units, before the plan is made, and these stay compiled; or leave the plan out, "
        "and set torch._functorch.config.activation_memory_budget.",
        ConfigWarning,
    )


def _compiled_of(forward: PlacedForward) -> str:
    """Describe the compiled part: the outermost module, or the code that calls the model."""
    modules = dict(forward.applied.model.named_modules(remove_duplicate=False))
    path = next(path for path, module in modules.items() if module is forward.module)
    for outer in dict.fromkeys(("", *paths_above(path), path)):
        if is_compiled_module(modules[outer]) or (outer == path and compiled_function(forward.forward)):
            return unit_words(outer, "module")
    return f"what calls {unit_words(path, 'module')}"
