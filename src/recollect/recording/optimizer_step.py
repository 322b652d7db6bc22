"""Record the memory of an optimizer step: the state it will hold, and the tensors that it makes and frees.

A twin of the optimizer, on the same device and with the same settings, steps over tiny parameters. Each parameter shape is
represented by a unique number of elements, so that a tensor that the twin makes reveals whose size it has. The real optimizer
is not touched, and its state is known before its first step.
"""

from __future__ import annotations

import inspect
import math
import warnings
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from recollect._torch_private import TorchDispatchMode, tree_leaves
from recollect.profile import events
from recollect.profile.allocator_blocks import block_bytes

_TRACKER = "_recollect_optimizer_tracker"


@dataclass(frozen=True)
class OptimizerStep:
    """`state_bytes`: state after the first step. `events`: (ALLOC, number, bytes) and (FREE, number) of a later step."""

    state_bytes: int
    events: tuple[tuple[int, ...], ...]

    def with_room(self, nbytes: int) -> tuple[tuple[int, ...], ...]:
        """Return the events with some more bytes alive throughout; without events, none."""
        if not self.events or not nbytes:
            return self.events
        number = 1 + max(event[1] for event in self.events)
        return ((events.ALLOC, number, nbytes), *self.events, (events.FREE, number))


def record_optimizer_step(optimizer: torch.optim.Optimizer | None, device: torch.device) -> OptimizerStep:
    """Return the memory events and the state of a step of this optimizer.

    Args:
        optimizer: not changed, not stepped; None for none.
        device: where the parameters are, or will be if they are fake.

    Warns:
        UserWarning: the optimizer's class cannot be constructed from its parameter groups. Its present state counts
            instead, and temporaries are assumed to be as large as the largest parameter.
    """
    parameters = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer is None or not any(parameter.requires_grad for parameter in parameters):
        return OptimizerStep(0, ())
    try:
        twin, sizes = _make_twin(optimizer, device)
        _give_gradients(twin)
        twin.step()
    except Exception as error:  # A foreign optimizer may raise anything.
        return _from_present_state(optimizer, error)
    state = {id(t): t for t in tree_leaves([dict(s) for s in twin.state.values()]) if isinstance(t, torch.Tensor)}
    # Some optimizers keep step counts in tensors on the CPU.
    on_device = [tensor for tensor in state.values() if tensor.device.type == device.type]
    state_bytes = sum(block_bytes(_real_bytes(tensor, sizes), device.type) for tensor in on_device)
    watcher = _Watcher(sizes)
    _give_gradients(twin)
    with watcher:
        twin.step()
    watcher.is_over = True
    return OptimizerStep(state_bytes, tuple(watcher.events))


class _Code:
    """Maps parameter shapes to tiny shapes, whose numbers of elements identify them."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._shapes: dict[tuple[int, ...], list[int]] = {}
        # Products of two different primes are not prime, so parameters, their rows and their columns cannot be confused;
        # and none is 1, the size of the scalars that optimizers keep.
        self._primes = (n for n in count(2) if all(n % d for d in range(2, math.isqrt(n) + 1)))

    def tiny(self, shape: torch.Size) -> list[int]:
        """Return the tiny shape that represents a parameter's shape."""
        if shape not in self._shapes:
            numel = shape.numel()
            if len(shape) < 2:
                code = [next(self._primes)]
            else:
                code = [1] * (len(shape) - 2) + [next(self._primes), next(self._primes)]
                # Adafactor keeps a row and a column of a matrix instead of the whole.
                self.sizes[code[-2]] = numel // max(shape[-1], 1)
                self.sizes[code[-1]] = numel // max(shape[-2], 1)
            self.sizes[math.prod(code)] = numel
            self._shapes[shape] = code
        return self._shapes[shape]


def _make_twin(optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[torch.optim.Optimizer, dict[int, int]]:
    shapes = _Code()
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        tiny = [torch.zeros(shapes.tiny(p.shape), dtype=p.dtype, device=device, requires_grad=True) for p in trained]
        if tiny:
            groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": tiny})
    accepted = inspect.signature(type(optimizer).__init__).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    return type(optimizer)(groups, **defaults), shapes.sizes


def _give_gradients(twin: torch.optim.Optimizer) -> None:
    for group in twin.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)


def _real_bytes(tensor: torch.Tensor, sizes: dict[int, int]) -> int:
    return sizes.get(tensor.numel(), tensor.numel()) * tensor.element_size()


def _from_present_state(optimizer: torch.optim.Optimizer, error: Exception) -> OptimizerStep:
    state = [t for t in tree_leaves([dict(s) for s in optimizer.state.values()]) if isinstance(t, torch.Tensor)]
    state_bytes = sum(t.numel() * t.element_size() for t in state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    largest_bytes = max((p.numel() * p.element_size() for p in parameters), default=0)
    warnings.warn(
        f"cannot try out a step of {type(optimizer).__name__} ({type(error).__name__}: {error}). Counted the "
        f"{state_bytes} bytes of state that it has now and {largest_bytes} bytes of workspace; if it has not stepped "
        "yet, take one step before recording.",
        stacklevel=4,
    )
    return OptimizerStep(state_bytes, ((events.ALLOC, 0, largest_bytes), (events.FREE, 0)))


class _Watcher(TorchDispatchMode):
    """Logs the storages that a step makes and frees, at their real sizes."""

    def __init__(self, sizes: dict[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes = sizes
        self.events: list[tuple[int, ...]] = []
        self.is_over = False
        self._num_storages = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        known = [t.untyped_storage() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for tensor in tree_leaves(output):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if hasattr(storage, _TRACKER) or any(storage is other for other in known):
                continue
            setattr(storage, _TRACKER, _Tracker(self, self._num_storages))
            self.events.append((events.ALLOC, self._num_storages, _real_bytes(tensor, self.sizes)))
            self._num_storages += 1
        return output


class _Tracker:
    __slots__ = ("number", "watcher")

    def __init__(self, watcher: _Watcher, number: int) -> None:
        self.watcher = watcher
        self.number = number

    def __del__(self) -> None:
        if not self.watcher.is_over:
            self.watcher.events.append((events.FREE, self.number))
