"""Runs copies of units alone: on their device, where time and memory are measured; or on fake tensors, where both are modelled.

On fake tensors nothing is computed, and compiled code is what Inductor generates for the CPU: it allocates and frees, and calls
kernels that do nothing. Storages are followed from when they are made to their deaths. An op takes as long as a cost model
says; a fused kernel as long as reading and writing its tensors once.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from recollect._torch_private import HigherOrderOperator, tree_leaves
from recollect.costs.hardware import Hardware, Kind
from recollect.costs.op_work import touched_bytes, work_of
from recollect.costs.roofline import Work, seconds
from recollect.engine.facts import facts_of
from recollect.measuring.timing import timed, work_clock
from recollect.profile.profile import block_bytes
from recollect.recording.event_log import Death, settled
from recollect.recording.fake_model import fake_run
from recollect.recording.unit_samples import UnitSample
from recollect.recording.unit_trace import Part, UnitTrace, trace_unit
from recollect.tensors import tensors_in

# Where ways to run a unit are timed in turn: seconds of all rounds, and their number at least and at most.
_TIMED_S: Final = 3.0
_FEWEST_ROUNDS: Final = 3
_MOST_ROUNDS: Final = 15

# What takes longest in a fused kernel, by calls in its code.
_KINDS: Final[tuple[tuple[re.Pattern[str], Kind], ...]] = (
    (re.compile(r"rand\w*_cpu\("), "random"),
    (re.compile(r"\b(exp|expm1|log|log1p|tanh|erf|sin|cos|sigmoid)\("), "transcendental"),
)


class UnitRuns:
    """Runs copies of units on their device, and measures them."""

    is_modelled = False
    """Whether nothing is computed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @contextmanager
    def copied(self, sample: UnitSample) -> Iterator[tuple[UnitSample, nn.Module]]:
        """Yield a sample to run within the block, and a copy of its module; restore the random generators afterwards.

        Raises:
            Exception: whatever the module's attributes raise when they are copied.
        """
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            module = sample.copied_module()
            module.zero_grad(set_to_none=True)
            yield sample.whole(), module

    def time(
        self, sample: UnitSample, module: nn.Module, forward: Callable[..., Any] | None
    ) -> tuple[float, float] | None:
        """Return the seconds of forward and backward; None if there is nothing to differentiate. See `time_run`."""
        return time_run(sample, module, self.device, forward)

    def rounds(self, round_s: float) -> int:
        return min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, int(_TIMED_S / max(1e-9, round_s))))

    def trace(self, sample: UnitSample, forward: Callable[..., Any]) -> UnitTrace:
        """Return what a run does to memory; see `trace_unit`."""
        return trace_unit(sample, forward, self.device)


class ModelledRuns(UnitRuns):
    """Runs copies of units on fake tensors."""

    is_modelled = True

    def __init__(self, device: torch.device, hardware: Hardware, kernels: str) -> None:
        super().__init__(device)
        self._hardware, self._kernels = hardware, kernels
        self._seconds = 0.0
        self._storages: _Storages | None = None

    @contextmanager
    def copied(self, sample: UnitSample) -> Iterator[tuple[UnitSample, nn.Module]]:
        from recollect._torch_compile import on_fake_tensors

        module = sample.copied_module(shares_parameters=True)
        batch = (sample.args, sample.kwargs)
        fakes = fake_run(module, batch, self.device, kernels=self._kernels, compiles=True, on_op=self._note_op)
        with fakes as (args, kwargs), on_fake_tensors(self._note_kernel):
            yield replace(sample, args=args, kwargs=kwargs), module

    def time(
        self, sample: UnitSample, module: nn.Module, forward: Callable[..., Any] | None
    ) -> tuple[float, float] | None:
        """Return the modelled seconds of forward and backward."""
        return time_run(sample, module, self.device, forward, clock=lambda: self._seconds)

    def rounds(self, round_s: float) -> int:
        """Return 1: all are alike."""
        return 1

    def trace(self, sample: UnitSample, forward: Callable[..., Any]) -> UnitTrace:
        self._storages = _Storages(self.device)
        try:
            return trace_unit(sample, forward, self.device, self._storages)
        finally:
            self._storages = None

    def _note_op(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not isinstance(func, HigherOrderOperator):
            self._seconds += seconds(work_of(func, facts_of(func), args, kwargs, output), self._hardware)
        if self._storages is not None:
            self._storages.note((args, kwargs), output)

    def _note_kernel(self, code: str, args: Any) -> None:
        tensors = {id(tensor.untyped_storage()): tensor for tensor in tensors_in(args)}.values()
        moved_bytes = sum(map(touched_bytes, tensors))
        kind: Kind = next((kind for pattern, kind in _KINDS if pattern.search(code)), "elementwise")
        work = Work(kind, float(moved_bytes), float(max((t.numel() for t in tensors), default=0)))
        self._seconds += seconds(work, self._hardware)


class _Storages:
    """Traces the storages that ops make, in parts, as `PartsTrace` does the allocator's memory."""

    def __init__(self, device: torch.device) -> None:
        self.parts: list[Part] = [[]]
        self._device = device
        self._alive: dict[int, Death] = {}
        # Of the last part.
        self._events: list[Any] = []

    def mark(self) -> None:
        self._settle()
        self.parts.append([])

    def _settle(self) -> None:
        fresh = self._events[:]
        del self._events[: len(fresh)]
        self.parts[-1] += ((address, nbytes) for address, nbytes in settled(fresh))

    def address_of(self, storage: torch.UntypedStorage) -> int:
        """Return a number that no other storage has while this one is alive; fake ones have no memory."""
        return id(storage)

    @contextmanager
    def recording(self) -> Iterator[None]:
        gc.collect()  # Garbage in reference cycles would be freed at some moment of the block.
        yield
        self._settle()
        self._alive.clear()

    def note(self, arguments: Any, output: Any) -> None:
        given = {self.address_of(tensor.untyped_storage()) for tensor in tensors_in(arguments)}
        for tensor in tensors_in(output):
            storage = tensor.untyped_storage()
            address = self.address_of(storage)
            known = self._alive.get(address)
            if address not in given and (known is None or known() is None):
                death = self._alive[address] = Death(storage, self._events.append)
                death.means = (address, 0)
                self._events.append((address, block_bytes(storage.nbytes(), self._device.type)))


def time_run(
    sample: UnitSample,
    module: nn.Module,
    device: torch.device,
    forward: Callable[..., Any] | None = None,
    clock: Callable[[], float] | None = None,
) -> tuple[float, float] | None:
    """Return the seconds of a unit's forward and backward; None if there is nothing to differentiate."""
    clock = clock or work_clock(device)
    trained: list[Any] = [p for p in module.parameters() if p.requires_grad]
    args, kwargs = sample.inputs(trained)
    autocast = sample.autocast
    with torch.enable_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        output, forward_s = timed(lambda: (forward or module)(*args, **kwargs), device, clock=clock)
    ends = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not ends or not trained:
        return None
    with torch.enable_grad():
        end = _End.apply([torch.ones_like(end) for end in ends], *ends)  # type: ignore[no-untyped-call]
    _, backward_s = timed(lambda: torch.autograd.grad(end, trained, allow_unused=True), device, clock=clock)
    return forward_s, backward_s


class _End(torch.autograd.Function):
    """A scalar whose backward hands on gradients; given gradients, `torch.autograd.grad` spends a second importing SymPy."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *ends: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return ends[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.gradients)
