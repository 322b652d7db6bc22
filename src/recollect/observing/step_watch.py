"""Watches a step: which ops of each unit run again in backward, and which bytes of it stay until then.

It needs no knowledge of who recomputes or offloads. While backward runs, gradient formulas run with gradients
switched off; ops that run with gradients switched on are forward, again. It belongs to the unit whose module runs, or else to
the unit that made the node of the graph that asked for it. A storage that is alive when backward begins is kept. Of a
backward that keeps its graph (`retain_graph`, `create_graph`), only what modules run again is seen.
"""

import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from recollect._torch_functions import saves_on_cpu
from recollect._torch_private import current_autograd_node, current_backward, keeps_graph, next_autograd_node
from recollect.engine.facts import OpMode
from recollect.measuring.deaths import is_of_the_allocator
from recollect.measuring.meter import storage_bytes, storages_of
from recollect.recording.find_units import Unit
from recollect.tensors import tensors_in
from recollect.weak_map import WeakMap

OUTSIDE = "all else"


class StepWatch(OpMode):
    """Sees the ops of a step, and the modules that run them.

    Attributes:
        counts: by the path of a unit, or `OUTSIDE`, the numbers of a `UnitCoverage`, by name.
        without_gradients: by path, calls in forward under `torch.no_grad`, as in a reentrant checkpoint.
        under_save_on_cpu: paths of units with `save_on_cpu` around some of it.
    """

    def __init__(self, model: nn.Module, units: Iterable[Unit], device: torch.device) -> None:
        super().__init__()
        self.counts: dict[str, Counter[str]] = {path: Counter() for path in (*(unit.path for unit in units), OUTSIDE)}
        self.without_gradients: Counter[str] = Counter()
        self.under_save_on_cpu: set[str] = set()
        self._model = model
        self._device = device
        self._unit_of = {id(module): unit.path for unit in units for module in unit.module.modules()}
        self._running: list[tuple[nn.Module, str]] = []
        # Where the nodes of each stretch of forward begin in the order of all nodes, and whose they are.
        self._first_nodes, self._owners = [0], [OUTSIDE]
        # The owner of each storage, and how it counts; None once it is counted.
        self._made = WeakMap[tuple[str, str] | None]()
        self._has_uncounted = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        # Hooks on all modules: the model's own lists of hooks stay as they are.
        hooks = nn.modules.module
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            with self, warnings.catch_warnings():
                # They fire twice for modules that `torch.compile` wrapped, which is not a second call here.
                warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks")
                yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, _args: Any) -> None:
        unit = self._unit_of.get(id(module))
        if unit is None:
            return
        if current_backward() < 0 and self._current != unit:
            self.counts[unit]["calls"] += 1
            self.without_gradients[unit] += not torch.is_grad_enabled()
        self._running.append((module, unit))
        self._begin_stretch()

    def _leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if self._running and self._running[-1][0] is module:
            self._running.pop()
            self._begin_stretch()

    @property
    def _current(self) -> str:
        return self._running[-1][1] if self._running else OUTSIDE

    def _begin_stretch(self) -> None:
        if current_backward() < 0:
            self._first_nodes.append(next_autograd_node())
            self._owners.append(self._current)

    def run_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        is_forward = current_backward() < 0
        if not is_forward:
            self._count_kept()
        # Formulas that are to be differentiated themselves (`create_graph`) have gradients switched on, too.
        runs_again = not is_forward and torch.is_grad_enabled() and (not keeps_graph() or bool(self._running))
        result = func(*args, **kwargs)
        if self.is_foreign() or not (is_forward or runs_again):
            return result
        given, results = tensors_in((args, kwargs)), tensors_in(result)
        old = set(map(id, storages_of(given)))
        made = [tensor for tensor in results if not old.intersection(map(id, storages_of([tensor])))]
        is_counted = bool(results) and not getattr(func, "is_view", False)
        if is_forward:
            self.counts[self._current]["ops"] += is_counted
            self._note(given, made)
        elif is_counted:
            node = bisect_right(self._first_nodes, current_autograd_node())
            unit = self._current if self._running else self._owners[max(0, node - 1)]
            self.counts[unit].update(recomputed_ops=1, recomputed_bytes=storage_bytes(made))
        return result

    def _note(self, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """Note the storages that an op of forward made, and those that something made which modes do not see."""
        if saves_on_cpu():
            self.under_save_on_cpu.add(self._current)
        is_copy = self._device.type != "cpu" and any(tensor.device.type == self._device.type for tensor in given)
        for tensor in (*made, *(tensor for tensor in given if tensor.grad_fn is not None)):
            is_on_host = is_copy and tensor.device.type == "cpu" and tensor.is_floating_point()
            if tensor.device.type == self._device.type or is_on_host:
                for storage in storages_of([tensor]):
                    # A mapped file is host memory, such as a plan's for what it offloads on the CPU.
                    if storage not in self._made and is_of_the_allocator(storage):
                        self._made[storage] = (self._current, "offloaded_bytes" if is_on_host else "kept_bytes")
                        self._has_uncounted = True

    def _count_kept(self) -> None:
        if not self._has_uncounted:
            return
        self._has_uncounted = False
        # FSDP gathers parameters while units run.
        own = set(map(id, storages_of([*self._model.parameters(), *self._model.buffers()])))
        for storage, noted in self._made.items():
            if noted is not None and id(storage) not in own:
                self.counts[noted[0]][noted[1]] += storage.nbytes()
                self._made[storage] = None
