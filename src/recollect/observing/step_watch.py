"""Watches a step: which ops of each unit run again in backward, and which bytes of it stay until then.

Nothing needs to be known of whoever recomputes or offloads. While backward runs, gradient formulas run with gradients
switched off; what runs with gradients switched on is forward, again. It belongs to the unit whose module runs, or else to
the unit that made the node of the graph that asked for it. A storage that is alive when backward begins is kept. Of a
backward that keeps its graph (`retain_graph`, `create_graph`), only what modules run again is seen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from recollect._torch_functions import saves_on_cpu
from recollect._torch_private import current_autograd_node, current_backward, desugars, keeps_graph, next_autograd_node
from recollect.engine.facts import OpMode
from recollect.measuring.deaths import is_of_the_allocator
from recollect.measuring.meter import storages_of
from recollect.recording.find_units import Unit
from recollect.tensors import tensors_in


@dataclass(eq=False, slots=True)
class Seen:
    """What was seen of a unit, or of all that is outside of units."""

    calls: int = 0
    """In forward."""
    calls_without_gradients: int = 0
    """Of these, under `torch.no_grad`, as a reentrant checkpoint runs forward."""
    ops: int = 0
    """Run in forward; views do not count."""
    recomputed_ops: int = 0
    """Run again in backward, likewise."""
    recomputed_bytes: int = 0
    """Made by these."""
    kept_bytes: int = 0
    """Made in forward, and alive on the device when backward begins."""
    offloaded_bytes: int = 0
    """Copies in host memory that are alive then."""
    is_under_save_on_cpu: bool = False
    """Whether `save_on_cpu` was around some of it."""


@dataclass(slots=True)
class _Made:
    """A storage that forward made."""

    by: Seen
    is_on_host: bool
    is_counted: bool = False


class StepWatch(OpMode):
    """Sees the ops of a step, and the modules that run them.

    Args:
        model: the model.
        units: its units.
        device: where it computes.

    Attributes:
        seen: what was seen of each unit, by its path.
        outside: the same for all other ops of forward, such as the loss.
    """

    def __init__(self, model: nn.Module, units: Iterable[Unit], device: torch.device) -> None:
        super().__init__()
        self.seen = {unit.path: Seen() for unit in units}
        self.outside = Seen()
        self._model = model
        self._device = device
        self._unit_of: dict[int, Seen] = {}
        for unit in units:
            for module in unit.module.modules():
                self._unit_of.setdefault(id(module), self.seen[unit.path])
        self._running: list[tuple[nn.Module, Seen]] = []
        # Where the nodes of each stretch of forward begin in the order of all nodes, and whose they are.
        self._first_nodes, self._owners = [0], [self.outside]
        self._made: WeakKeyDictionary[torch.UntypedStorage, _Made] = WeakKeyDictionary()
        self._has_uncounted = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the ops and modules of a block."""
        # Hooks on all modules: the model's own lists of hooks stay as they are.
        hooks = nn.modules.module
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            with self:
                yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, _args: Any) -> None:
        unit = self._unit_of.get(id(module))
        if unit is None:
            return
        if current_backward() < 0 and self._current is not unit:
            unit.calls += 1
            unit.calls_without_gradients += not torch.is_grad_enabled()
        self._running.append((module, unit))
        self._begin_stretch()

    def _leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if self._running and self._running[-1][0] is module:
            self._running.pop()
            self._begin_stretch()

    @property
    def _current(self) -> Seen:
        return self._running[-1][1] if self._running else self.outside

    def _begin_stretch(self) -> None:
        if current_backward() < 0:
            self._first_nodes.append(next_autograd_node())
            self._owners.append(self._current)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(desugars(kind) for kind in types):
            return NotImplemented
        is_forward = current_backward() < 0
        if not is_forward:
            self._count_kept()
        runs_again = not is_forward and self._runs_again()
        result = func(*args, **(kwargs or {}))
        if self.is_foreign() or not (is_forward or runs_again):
            return result
        given, made = tensors_in((args, kwargs)), tensors_in(result)
        is_counted = bool(made) and not getattr(func, "is_view", False)
        if is_forward:
            self._current.ops += is_counted
            self._note(self._current, given, made)
        elif is_counted:
            unit = self._current if self._running else self._owner_of(current_autograd_node())
            old = set(map(id, storages_of(given)))
            unit.recomputed_ops += 1
            unit.recomputed_bytes += sum(s.nbytes() for s in storages_of(made) if id(s) not in old)
        return result

    def _note(self, unit: Seen, given: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Note the storages that an op of forward made, and those that something made which modes do not see."""
        unit.is_under_save_on_cpu |= saves_on_cpu()
        is_copy = self._device.type != "cpu" and any(tensor.device.type == self._device.type for tensor in given)
        for tensor in (*results, *(tensor for tensor in given if tensor.grad_fn is not None)):
            is_on_host = is_copy and tensor.device.type == "cpu" and tensor.is_floating_point()
            if tensor.device.type == self._device.type or is_on_host:
                for storage in storages_of([tensor]):
                    # A mapped file is host memory, such as a plan's for what it offloads on the CPU.
                    if storage not in self._made and is_of_the_allocator(storage):
                        self._made[storage] = _Made(unit, is_on_host)
                        self._has_uncounted = True

    def _count_kept(self) -> None:
        """Count what is alive, once a backward has begun."""
        if not self._has_uncounted:
            return
        self._has_uncounted = False
        # FSDP gathers parameters while units run.
        own = set(map(id, storages_of([*self._model.parameters(), *self._model.buffers()])))
        for storage, made in list(self._made.items()):
            if not made.is_counted and id(storage) not in own:
                made.is_counted = True
                made.by.kept_bytes += 0 if made.is_on_host else storage.nbytes()
                made.by.offloaded_bytes += storage.nbytes() if made.is_on_host else 0

    def _runs_again(self) -> bool:
        """Whether the op that runs in backward is one of forward, not of a gradient's formula."""
        # Formulas that are to be differentiated themselves (`create_graph`) have gradients switched on, too.
        return torch.is_grad_enabled() and (not keeps_graph() or bool(self._running))

    def _owner_of(self, node: int) -> Seen:
        return self._owners[max(0, bisect_right(self._first_nodes, node) - 1)]
