"""Runs units on a tape, and has the modules inside them tell it which one is running."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from recollect._torch_functions import are_users_hooks_active
from recollect._torch_private import has_compiled_forward, is_compiled_module
from recollect.engine.eager_forward import look_for_compiler
from recollect.engine.offload.flight import HostUse
from recollect.engine.own_checkpoints import running_unit, tell_once
from recollect.engine.placed_forward import PlacedForward, placed_call, unit_modules
from recollect.engine.tape import Tape
from recollect.measuring.stopwatch import Stopwatch


def tape_forwards(model: nn.Module, unit_paths: Iterable[str], tape: Tape) -> list[PlacedForward]:
    units = unit_modules(model, unit_paths)
    unit_ids = {id(unit) for unit in units.values()}
    # A compiled forward is kept as a whole.
    seen = {path: unit for path, unit in units.items() if not has_compiled_forward(unit)}
    forwards = [UnitForward(unit, tape, path) for path, unit in units.items()]
    return [*forwards, *scope_forwards(seen, tape, unit_ids)]


def scope_forwards(units: Mapping[str, nn.Module], tape: Tape, unit_ids: Container[int]) -> list[ScopeForward]:
    """Return the forwards that tell a tape which module inside units is running, except modules with these ids.

    A module that units share, such as an activation, has a name in each.
    """
    forwards: dict[int, ScopeForward] = {}
    for path, unit in units.items():
        for name, module in plain_submodules(unit):
            if id(module) not in unit_ids:
                forwards.setdefault(id(module), ScopeForward(module, tape)).names.setdefault(path, name)
    return list(forwards.values())


def scopes_by_unit(units: Mapping[str, nn.Module], tape: Tape) -> dict[str, list[ScopeForward]]:
    """Return such forwards for each unit by itself, which are in place only while it runs on the tape."""
    unit_ids = {id(unit) for unit in units.values()}
    found = {path: scope_forwards({path: unit}, tape, unit_ids) for path, unit in units.items()}
    times = Counter(id(scope.module) for scopes in found.values() for scope in scopes)
    for scope in itertools.chain(*found.values()):
        scope.is_shared = times[id(scope.module)] > 1
    return found


def plain_submodules(unit: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the modules below a unit whose `forward` may be wrapped, with their paths in the unit.

    Scripted and compiled modules are left out, with everything inside them.
    """
    found: list[tuple[str, nn.Module]] = []
    for name, child in unit.named_children():
        if isinstance(child, torch.jit.ScriptModule) or is_compiled_module(child):
            continue
        path = f"{prefix}.{name}" if prefix else name
        found += [(path, child), *plain_submodules(child, path)]
    return found


def look_for_hooks() -> None:
    if are_users_hooks_active():
        tell_once(
            "hooks for saved tensors (torch.autograd.graph.saved_tensors_hooks, save_on_cpu) are active around layers that run "
            "by a plan. What these save does not pass through them: they neither move nor change it, and gradients are those "
            "without hooks. Leave them out (host_budget moves values to host memory), or give units=... without these layers."
        )


class UnitForward(PlacedForward):
    """Runs a unit on the tape."""

    def __init__(self, module: nn.Module, tape: Tape, path: str) -> None:
        super().__init__(module)
        self.tape = tape
        self.path = path

    def host_use(self) -> HostUse | None:
        return None if self.tape.offload is None else self.tape.offload.use()

    def time_reruns(self, watch: Stopwatch | None) -> None:
        self.tape.reruns = watch

    def tell_departures(self, departs: Callable[[str, str], object]) -> None:
        self.tape.tell_departures(departs)

    @placed_call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.has_looked:
            look_for_compiler(self)
            look_for_hooks()
        if not self.recomputes():
            return self.forward(*args, **kwargs)
        with running_unit():
            return self.tape.run(self.path, self.forward, args, kwargs)


class ScopeForward(PlacedForward):
    """Tells the tape which module inside a unit is running: values get the names that the plan uses."""

    is_shared = False
    """Whether a different unit has the module, too."""

    def __init__(self, module: nn.Module, tape: Tape) -> None:
        super().__init__(module)
        self.tape = tape
        self.names: dict[str, str] = {}
        """By unit."""

    @placed_call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode = self.tape.mode
        if not self.has_looked:
            look_for_compiler(self)
        if mode is None or mode.unit_path not in self.names:
            return self.forward(*args, **kwargs)
        return mode.run_module(self.names[mode.unit_path], self.forward, args, kwargs)
