"""Make a probe of an optimizer: the same class and settings over other, perhaps tiny, parameters, to try out a step of it.

The optimizer itself is not touched, and neither is what it refers to.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import torch

from recollect._torch_private import FakeTensorMode

# Makes the parameter that stands in for a trained one.
StandIn = Callable[[torch.Tensor], torch.Tensor]


def make_probe(optimizer: torch.optim.Optimizer, stand_in: StandIn) -> torch.optim.Optimizer:
    """Return an optimizer with the settings of this one, without state, over stand-ins for its trained parameters.

    It is constructed anew from the parameter groups, and where its class does not allow that, copied.
    """
    stand_ins: dict[int, torch.Tensor] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in stand_ins:
                made = stand_in(local_part(parameter))
                stand_ins[id(parameter)] = made.requires_grad_(parameter.requires_grad)
        trained = [stand_ins[id(parameter)] for parameter in group["params"] if parameter.requires_grad]
        if trained:
            settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            if settings.get("foreach", False) is None and any(local_part(p) is not p for p in group["params"]):
                # PyTorch's default for sharded parameters; of stand-ins on CUDA it would step all at once, in more memory.
                settings["foreach"] = False
            groups.append({**settings, "params": trained})
    try:
        probe = _constructed(optimizer, groups)
    except Exception:  # A foreign constructor may raise anything.
        probe = _copied(optimizer, groups, stand_ins)
    _give_overrides(probe, getattr(optimizer, "mng", None), stand_ins)
    return probe


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this process has of a parameter that is sharded over several."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


def _constructed(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    accepted = inspect.signature(type(optimizer).__init__).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    probe = type(optimizer)(groups, **defaults)
    # Settings that are no defaults of a parameter group.
    for name, value in vars(optimizer).items():
        if name not in ("defaults", "param_groups", "state") and _is_plain(value):
            setattr(probe, name, copy.deepcopy(value))
    return probe


def _is_plain(value: Any, depth: int = 2) -> bool:
    """Return whether a value is made of nothing but numbers and texts."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return True
    if depth == 0 or callable(value) or isinstance(value, (torch.Tensor, torch.optim.Optimizer)):
        return False
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item, depth - 1) for item in value)
    items = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    return items is not None and all(isinstance(k, str) and _is_plain(v, depth - 1) for k, v in items.items())


def _copied(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], stand_ins: Mapping[int, torch.Tensor]
) -> torch.optim.Optimizer:
    """Copy all that an optimizer refers to, but for its state and with stand-ins for its parameters."""
    memo: dict[int, Any] = dict(stand_ins)
    for inner in (optimizer, *(v for v in vars(optimizer).values() if isinstance(v, torch.optim.Optimizer))):
        memo[id(inner.state)] = defaultdict(dict)
    probe: torch.optim.Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = probe
    for name, value in vars(optimizer).items():
        # Schedulers and gradient scalers put functions in the place of methods, which would reach the optimizer itself.
        shadows_method = callable(value) and callable(getattr(type(optimizer), name, None))
        if shadows_method:
            continue
        is_hooks = isinstance(value, OrderedDict) and name.endswith("_hooks")
        vars(probe)[name] = OrderedDict() if is_hooks else copy.deepcopy(value, memo)
    if "param_groups" in vars(probe):  # Otherwise they are those of an optimizer in it.
        probe.param_groups = groups
    return probe


def _give_overrides(probe: Any, manager: Any, stand_ins: Mapping[int, torch.Tensor]) -> None:
    """Give the probe the settings of single parameters that bitsandbytes' manager has, by `id` or by module."""
    if not hasattr(manager, "pid2config") or not hasattr(manager, "module_weight_config_triple"):
        return
    settings = dict(manager.pid2config)
    settings |= {id(getattr(module, name)): found for module, name, found in manager.module_weight_config_triple}
    probe.mng = copy.copy(manager)
    probe.mng.pid2config = {id(stand_ins[key]): found for key, found in settings.items() if key in stand_ins}
    probe.mng.index2config, probe.mng.module_weight_config_triple = {}, []


class AnyNumber(FakeTensorMode):
    """Fake tensors of which an optimizer may ask a number: it is always 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def give_gradients(probe: torch.optim.Optimizer, *, is_sparse: bool) -> None:
    """Give each parameter a gradient: of ones, or with a single row."""
    for group in probe.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            if is_sparse:
                row = torch.zeros(1, 1, dtype=torch.int64, device=parameter.device)
                ones = torch.ones_like(parameter[:1])
                parameter.grad = torch.sparse_coo_tensor(row, ones, parameter.shape, check_invariants=False)
            else:
                parameter.grad = torch.ones_like(parameter)


class TinyShapes:
    """Maps parameter shapes to tiny shapes, whose numbers of elements identify them."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._shapes: dict[tuple[int, ...], list[int]] = {}
        # Products of two primes are not prime, so parameters, their rows, their columns and the squares of these cannot be
        # confused; and none is 1, the size of the scalars that optimizers keep.
        self._primes = (n for n in count(2) if all(n % d for d in range(2, math.isqrt(n) + 1)))

    def tiny(self, shape: torch.Size) -> list[int]:
        """Return the tiny shape that represents a parameter's shape."""
        if shape not in self._shapes:
            numel = shape.numel()
            if len(shape) < 2:
                code = [next(self._primes)]
            else:
                # Of two dimensions the longer one stays the longer: Muon transposes by it.
                smaller, larger = next(self._primes), next(self._primes)
                last = [larger, smaller] if shape[-2] > shape[-1] else [smaller, larger]
                code = [1] * (len(shape) - 2) + last
                # Adafactor keeps a row and a column of a matrix instead of the whole; Muon multiplies it by its transpose.
                for tiny, other in ((code[-2], shape[-1]), (code[-1], shape[-2])):
                    self.sizes[tiny] = numel // max(other, 1)
                    self.sizes[tiny * tiny] = self.sizes[tiny] ** 2
            self.sizes[math.prod(code)] = numel
            self._shapes[shape] = code
        return self._shapes[shape]

    def real_bytes(self, tensor: torch.Tensor) -> int:
        """Return the bytes of the tensor that a tensor of the probe stands for."""
        return self.sizes.get(tensor.numel(), tensor.numel()) * tensor.element_size()
