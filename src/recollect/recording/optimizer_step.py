"""Record the memory of an optimizer step: the state it will hold, and the tensors that it makes and frees.

A probe of the optimizer, of the same class and with the same settings, steps over its own parameters. The real optimizer is
not touched, nor are objects that it refers to; its state is known before its first step.

If the step is one of PyTorch's, the probe's parameters are tiny and on the same device. Each parameter shape is represented by
a unique number of elements: the size of a tensor that the probe makes reveals its parameter. Other optimizers may treat small
parameters differently (8-bit optimizers leave them in full precision), so their probes get fake parameters of the real
sizes; if fake tensors do not work, tiny ones. Compiled steps run uncompiled.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from recollect._torch_dtensor import local_part
from recollect._torch_fsdp import GatheredParameters
from recollect._torch_private import FakeTensorMode, TorchDispatchMode, without_global_hooks
from recollect.engine.captured import told_of_capture
from recollect.measuring.meter import storages_of
from recollect.profile import events
from recollect.profile.profile import block_bytes
from recollect.recording.event_log import Death, settled
from recollect.recording.optimizers import (
    Optimizers,
    on_device,
    optimizers_in,
    present_state_bytes,
    state_tensors,
    tensors_in_state,
)
from recollect.recording.trackers import TrackedOther
from recollect.tensors import tensors_in
from recollect.warning import warn_user

_TRACKER = "_recollect_optimizer_tracker"

# The memory of L-BFGS, in vectors as long as all parameters together. Of the state: the last direction and gradient.
_LAST = 2
# While it runs the model: the gradient before; in a line search also the parameters where it began, and the gradients
# there and at both ends of the bracket.
_HELD, _HELD_IN_SEARCH = 1, 5
# Between runs: the gradient, its change, the parameters' change, and the results of the two loops over the history.
_MADE = 5


@dataclass(frozen=True)
class OptimizerStep:
    """`state_bytes`: state after the first step. `events`: (ALLOC, number, bytes) and (FREE, number) of a later step."""

    state_bytes: int
    events: tuple[tuple[int, ...], ...]

    def with_room(self, nbytes: int) -> tuple[tuple[int, ...], ...]:
        """Return the events with some more bytes alive throughout; without events, none."""
        if not self.events or not nbytes:
            return self.events
        number = self._next_number()
        return ((events.ALLOC, number, nbytes), *self.events, (events.FREE, number))

    def then(self, other: OptimizerStep) -> OptimizerStep:
        first = self._next_number()
        later = tuple((code, first + number, *size) for code, number, *size in other.events)
        return OptimizerStep(self.state_bytes + other.state_bytes, self.events + later)

    def _next_number(self) -> int:
        return 1 + max((event[1] for event in self.events), default=-1)


def reductions_of(model: torch.nn.Module) -> OptimizerStep:
    """Return the bytes FSDP2 needs to reduce whole gradients at the end of a step, one parameter group at a time."""
    found: list[tuple[int, ...]] = []
    for number, nbytes in enumerate(GatheredParameters(model).reductions_bytes):
        found += [(events.ALLOC, number, nbytes), (events.FREE, number)]
    return OptimizerStep(0, tuple(found))


def record_optimizer_step(optimizers: Optimizers, device: torch.device) -> OptimizerStep:
    """Return the memory events and the state of a step of the optimizers, one after the other; they are not stepped.

    If each trained parameter already has state, that state counts. `device`: where the parameters are, or will be if they are
    fake.
    """
    total = OptimizerStep(0, ())
    for optimizer in optimizers_in(optimizers):
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if not trained:
            continue
        step = _recorded(optimizer, device)
        if all(tensors_in_state(optimizer.state.get(parameter)) for parameter in trained):
            step = replace(step, state_bytes=present_state_bytes(optimizer, device))
        total = total.then(step)
    return total


def still_to_come(optimizers: Optimizers, device: torch.device) -> OptimizerStep:
    """Return the memory of an optimizer step beyond the one that ran: with the history of L-BFGS full.

    All others have their state once they have stepped.
    """
    total = OptimizerStep(0, ())
    for optimizer in optimizers_in(optimizers):
        if isinstance(optimizer, torch.optim.LBFGS):
            full = _recorded(optimizer, device)
            missing_bytes = max(0, full.state_bytes - present_state_bytes(optimizer, device))
            total = total.then(replace(full, state_bytes=missing_bytes))
    return total


def _recorded(optimizer: torch.optim.Optimizer, device: torch.device) -> OptimizerStep:
    if isinstance(optimizer, torch.optim.LBFGS):
        return _lbfgs_step(optimizer, device)
    is_pytorchs = type(optimizer).step.__module__.startswith("torch.")
    try:
        # Compilation would take time, and compiled code hides the tensors that it makes.
        with torch.compiler.set_stance("force_eager"):
            if is_pytorchs:
                return _with_tiny_sizes(optimizer, device)
            try:
                return _with_real_sizes(optimizer, device)
            except Exception:  # Its kernels may not work on fake tensors.
                return _with_tiny_sizes(optimizer, device)
    except Exception as error:  # A foreign optimizer may raise anything.
        return _from_present_state(optimizer, device, error)


def _lbfgs_step(optimizer: torch.optim.LBFGS, device: torch.device) -> OptimizerStep:
    """Return the bytes it holds while the model runs, with its history full, and the events of an update.

    Its step runs the model itself, so a step of it cannot be tried out.
    """
    (group,) = optimizer.param_groups
    parts = [local_part(parameter) for parameter in group["params"] if parameter.requires_grad]
    vector_bytes = sum(part.numel() for part in parts) * max(part.element_size() for part in parts)
    block = block_bytes(vector_bytes, device.type)
    held = _HELD_IN_SEARCH if group["line_search_fn"] else _HELD
    made = [
        (code, number, *size) for code, size in ((events.ALLOC, (block,)), (events.FREE, ())) for number in range(_MADE)
    ]
    return OptimizerStep((_LAST + 2 * group["history_size"] + held) * block, tuple(made))


def _with_tiny_sizes(optimizer: torch.optim.Optimizer, device: torch.device) -> OptimizerStep:
    shapes = _TinyShapes()

    def stand_in(parameter: torch.Tensor) -> torch.Tensor:
        return torch.zeros(shapes.tiny(parameter.shape), dtype=parameter.dtype, device=device, requires_grad=True)

    probe = make_probe(optimizer, stand_in)
    events = _tried_out(probe, _Watcher(device, lambda tensor, _: shapes.real_bytes(tensor)))
    state = {id(tensor): tensor for tensor in on_device(state_tensors(probe), device)}
    nbytes = [block_bytes(shapes.real_bytes(tensor), device.type) for tensor in state.values()]
    return OptimizerStep(sum(nbytes), events)


def _with_real_sizes(optimizer: torch.optim.Optimizer, device: torch.device) -> OptimizerStep:
    fakes = _AnyNumber(allow_non_fake_inputs=True)

    def stand_in(parameter: torch.Tensor) -> torch.Tensor:
        with fakes:
            return torch.zeros(parameter.shape, dtype=parameter.dtype, device=device, requires_grad=True)

    probe = make_probe(optimizer, stand_in)
    for group in probe.param_groups:
        # PyTorch's default, which it does not choose for fake tensors.
        if device.type == "cuda" and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    events = _tried_out(probe, _Watcher(device, lambda _, storage: storage.nbytes()), fakes)
    return OptimizerStep(present_state_bytes(probe, device), events)


def _tried_out(
    probe: torch.optim.Optimizer, watcher: _Watcher, mode: AbstractContextManager[Any] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Step a probe twice, since the first step makes its state; return the events of the second."""
    closure = inspect.signature(type(probe).step).parameters.get("closure")
    closures: list[Any] = [lambda: 1.0] if closure is not None and closure.default is closure.empty else []
    is_sparse = isinstance(probe, torch.optim.SparseAdam)
    if hasattr(probe, "train"):  # Schedule-free optimizers must be in their training mode to step.
        probe.train()
    # Optimizers refuse to step while a graph is captured, unless they are `capturable`.
    with mode or nullcontext(), told_of_capture(False), without_global_hooks():
        _give_gradients(probe, is_sparse=is_sparse)
        probe.step(*closures)
        _give_gradients(probe, is_sparse=is_sparse)
        with watcher:
            probe.step(*closures)
    return tuple(settled(watcher.events))


def _from_present_state(optimizer: torch.optim.Optimizer, device: torch.device, error: Exception) -> OptimizerStep:
    state_bytes = present_state_bytes(optimizer, device)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    largest_bytes = max((p.numel() * p.element_size() for p in parameters), default=0)
    warn_user(
        f"cannot try out a step of {type(optimizer).__name__} ({type(error).__name__}: {error}). Counted the "
        f"{state_bytes} bytes of state that it has now and {largest_bytes} bytes of workspace; if it has not stepped "
        "yet, take one step before recording.",
    )
    return OptimizerStep(state_bytes, ((events.ALLOC, 0, largest_bytes), (events.FREE, 0)))


class _Watcher(TorchDispatchMode):
    """Logs the storages that a step makes and frees on a device, at their real sizes."""

    def __init__(self, device: torch.device, bytes_of: Callable[[torch.Tensor, torch.UntypedStorage], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Any] = []
        self._deaths: list[Death] = []
        self._device = device
        self._bytes_of = bytes_of

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        known = storages_of(_strided((args, kwargs)))
        for tensor in on_device(_strided(output), self._device):
            for storage in storages_of([tensor]):
                if hasattr(storage, _TRACKER) or any(storage is other for other in known):
                    continue
                number = len(self._deaths)
                self._deaths.append(Death(storage, self.events.append))
                self._deaths[-1].means = TrackedOther(number, -1)
                setattr(storage, _TRACKER, number)
                self.events.append((events.ALLOC, number, self._bytes_of(tensor, storage)))
        return output


def _strided(tree: Any) -> list[torch.Tensor]:
    """Return the tensors that have a storage; the parts of sparse ones show when they are used."""
    return [tensor for tensor in tensors_in(tree) if tensor.layout is torch.strided]


def make_probe(
    optimizer: torch.optim.Optimizer, stand_in: Callable[[torch.Tensor], torch.Tensor]
) -> torch.optim.Optimizer:
    """Return an optimizer with the settings of this one, without state, over stand-ins for its trained parameters.

    It is constructed from the parameter groups, or copied if its class does not allow that.
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
                # PyTorch's default for sharded parameters; on CUDA it would step all stand-ins at once, in more memory.
                settings["foreach"] = False
            groups.append({**settings, "params": trained})
    try:
        probe = _constructed(optimizer, groups)
    except Exception:  # A foreign constructor may raise anything.
        probe = _copied(optimizer, groups, stand_ins)
    _give_overrides(probe, getattr(optimizer, "mng", None), stand_ins)
    return probe


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
    """Copy everything an optimizer refers to, except its state, with stand-ins for its parameters."""
    memo: dict[int, Any] = dict(stand_ins)
    for inner in (optimizer, *(v for v in vars(optimizer).values() if isinstance(v, torch.optim.Optimizer))):
        memo[id(inner.state)] = defaultdict(dict)
    probe: torch.optim.Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = probe
    for name, value in vars(optimizer).items():
        # Schedulers and gradient scalers replace methods by functions, which would reach the optimizer itself.
        shadows_method = callable(value) and callable(getattr(type(optimizer), name, None))
        if shadows_method:
            continue
        is_hooks = isinstance(value, OrderedDict) and name.endswith("_hooks")
        vars(probe)[name] = OrderedDict() if is_hooks else copy.deepcopy(value, memo)
    if "param_groups" in vars(probe):  # Otherwise they belong to an optimizer inside it.
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


class _AnyNumber(FakeTensorMode):
    """Fake tensors that give an optimizer a number when asked: always 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def _give_gradients(probe: torch.optim.Optimizer, *, is_sparse: bool) -> None:
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


class _TinyShapes:
    """Maps parameter shapes to tiny shapes, whose numbers of elements identify them."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._shapes: dict[tuple[int, ...], list[int]] = {}
        # Products of two primes are not prime, so parameters, their rows, their columns and the squares of these cannot be
        # confused; and none is 1, the size of the scalars that optimizers keep.
        self._primes = (n for n in count(2) if all(n % d for d in range(2, math.isqrt(n) + 1)))

    def tiny(self, shape: torch.Size) -> list[int]:
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
        return self.sizes.get(tensor.numel(), tensor.numel()) * tensor.element_size()
