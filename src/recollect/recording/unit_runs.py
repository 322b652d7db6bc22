"""Runs copies of units by themselves: on their device, to measure time and memory, or on fake tensors, to model both.

On fake tensors nothing is computed, and compiled code is what Inductor generates for the CPU: it allocates and frees, and calls
kernels that do nothing. Storages are followed from when they are made to their deaths. An op takes as long as a cost model
says; a fused kernel as long as reading and writing its tensors once.

Memory is traced between a source, which makes inputs, and a sink, which makes the gradients of what the unit returns. Nobody
else holds inputs or outputs between forward and backward: the unit holds all values that are alive there.
"""

import gc
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn

from recollect._torch_private import HigherOrderOperator, tree_leaves, tree_map
from recollect.costs.hardware import Hardware, Kind
from recollect.costs.op_work import touched_bytes, work_of
from recollect.costs.roofline import Work, seconds
from recollect.engine.facts import facts_of
from recollect.engine.subclasses import strided_tensors
from recollect.measuring.parts_trace import PartsTrace
from recollect.measuring.timing import timed, work_clock
from recollect.profile.profile import block_bytes
from recollect.profile.variant import VariantRecord
from recollect.recording.event_log import Death, settled
from recollect.recording.fake_model import fake_run
from recollect.recording.unit_samples import UnitSample
from recollect.tensors import tensors_in

Part = list[tuple[int, int]]
"""Events of the allocator: (address, bytes; 0 for a free)."""


def trace_unit(
    sample: UnitSample, forward: Callable[..., Any], device: torch.device, trace: PartsTrace | None = None
) -> VariantRecord:
    """Run a unit once, forward and backward, and return what it does to memory: a variant with nothing else filled in.

    `forward`: of a copy of the unit, whose parameters have no gradients yet. It has run before, and compiles no more.
    `trace`: by default of the device's allocator.
    """
    trace = trace or PartsTrace(device)
    run = _Run(trace)
    with trace.recording(), torch.enable_grad():
        args, kwargs = run.inputs_of(sample)
        trace.mark()
        with torch.autocast(device.type, dtype=sample.autocast, enabled=sample.autocast is not None):
            output = forward(*args, **kwargs)
        leaves = tensors_in(output)
        run.outputs = run.addresses(leaves, sample.output_values)
        trace.mark()
        end = _Sink.apply(run, *[leaf for leaf in leaves if leaf.requires_grad])  # type: ignore[no-untyped-call]
        del args, kwargs, output, leaves
        trace.mark()
        end.backward()
        run.finish()
    return run.found()


@dataclass(eq=False)
class _Run:
    """The run that is traced, in parts: inputs, forward, dropping inputs and outputs, gradients of outputs, backward, the rest.

    Attributes:
        inputs, outputs: the value of each tensor, by the address of its storage; -1 if it is none.
        gradients: addresses of the storages of outputs' gradients.
    """

    trace: PartsTrace
    inputs: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)
    gradients: set[int] = field(default_factory=set)
    is_over: bool = False

    def inputs_of(self, sample: UnitSample) -> tuple[Any, Any]:
        """Return the arguments once more, on storages that nobody else holds."""
        needed: list[torch.Tensor] = []
        args, kwargs = sample.inputs(needed)
        sourced = iter(_Source.apply(self, *needed) if needed else ())  # type: ignore[no-untyped-call]

        def private(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return next(sourced) if leaf.requires_grad else leaf.clone()

        args, kwargs = tree_map(private, (args, kwargs))
        self.inputs = self.addresses(tree_leaves((args, kwargs)), sample.input_values)
        return args, kwargs

    def addresses(self, leaves: Iterable[Any], values: Iterable[int]) -> dict[int, int]:
        """Return the value of each tensor among some leaves by the address of its storage."""
        return {
            self.trace.address_of(part.untyped_storage()): value
            for leaf, value in zip(leaves, values, strict=True)
            for part in strided_tensors([leaf])
        }

    def finish(self) -> None:
        """Note that backward is over, the first time."""
        if not self.is_over:
            self.is_over = True
            self.trace.mark()

    def found(self) -> VariantRecord:
        _, forward, dropping, gradients, backward, _ = self.trace.parts
        made, forward_bytes = _played(forward)
        for address, _ in dropping:
            made.pop(address, None)
        freed = {address for address, nbytes in dropping if not nbytes}
        values = {**self.outputs, **self.inputs}
        held = {address: value for address, value in values.items() if address not in freed}
        own = {address: nbytes for address, nbytes in made.items() if address not in values}
        sizes = {**own, **{address: nbytes for address, nbytes in gradients if address in self.gradients}}
        return VariantRecord(
            kept=(),
            held=tuple(sorted({value for value in held.values() if value >= 0})),
            own_bytes=sum(own.values()),
            forward_bytes=forward_bytes,
            backward=tuple(_stretches(backward, sizes, held)),
            step_s=0.0,
        )


def _played(part: Part) -> tuple[dict[int, int], int]:
    """Return the storages that a part made and did not free, by address, and the most bytes of its storages at any moment."""
    alive: dict[int, int] = {}
    total_bytes = most_bytes = 0
    for address, nbytes in part:
        total_bytes += nbytes - alive.pop(address, 0)
        most_bytes = max(most_bytes, total_bytes)
        if nbytes:
            alive[address] = nbytes
    return alive, most_bytes


def _stretches(part: Part, sizes: dict[int, int], held: dict[int, int]) -> Iterable[tuple[int, int, int]]:
    """Yield `VariantRecord.backward` from the events of backward.

    `sizes`: by address, the bytes of storages that exist when it begins and count when they are freed. `held`: values that
    end a stretch when they are freed, by address.
    """
    alive, waiting = dict(sizes), Counter(held.values())
    total_bytes = most_bytes = 0
    for address, nbytes in part:
        if not nbytes and address in held:
            value = held.pop(address)
            waiting[value] -= 1
            if value >= 0 and not waiting[value]:
                yield most_bytes, total_bytes, value
                total_bytes = most_bytes = 0
            continue
        total_bytes += nbytes - alive.pop(address, 0)
        most_bytes = max(most_bytes, total_bytes)
        if nbytes:
            alive[address] = nbytes
    if most_bytes or total_bytes:
        yield most_bytes, total_bytes, -1


class _Source(torch.autograd.Function):
    """Makes a unit's inputs; its backward begins where the unit's ends."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.run.finish()
        return (None, *(None for _ in gradients))


class _Sink(torch.autograd.Function):
    """Takes a unit's outputs; its backward makes their gradients, and the unit's backward begins."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.like = [torch.empty_like(output, device="meta") for output in outputs]
        ctx.device = outputs[0].device
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = [torch.ones_like(like, device=ctx.device) for like in ctx.like]
        trace = ctx.run.trace
        ctx.run.gradients = {trace.address_of(gradient.untyped_storage()) for gradient in gradients}
        trace.mark()
        return (None, *gradients)


# Where ways to run a unit are timed in turn: seconds of all rounds, and their number at least and at most.
_TIMED_S: Final = 3.0
_FEWEST_ROUNDS: Final = 3
_MOST_ROUNDS: Final = 15

# The slowest operations in a fused kernel, by calls in its code.
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

    @property
    def clock(self) -> Callable[[], float]:
        return work_clock(self.device)

    @contextmanager
    def copied(self, sample: UnitSample) -> Iterator[tuple[UnitSample, nn.Module]]:
        """Yield a sample to run within the block, and a copy of its module; restore the random generators afterwards."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            module = sample.copied_module()
            module.zero_grad(set_to_none=True)
            yield sample.whole(), module

    def time(
        self, sample: UnitSample, module: nn.Module, forward: Callable[..., Any] | None
    ) -> tuple[float, float] | None:
        """Return the seconds of forward and backward; None if there is nothing to differentiate."""
        device, clock = self.device, self.clock
        trained: list[Any] = [p for p in module.parameters() if p.requires_grad]
        args, kwargs = sample.inputs(trained)
        autocast = sample.autocast
        with torch.enable_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            output, forward_s = timed(lambda: (forward or module)(*args, **kwargs), device, clock=clock)
        ends = [t for t in tensors_in(output) if t.requires_grad]
        if not ends or not trained:
            return None
        with torch.enable_grad():
            end = _End.apply([torch.ones_like(end) for end in ends], *ends)  # type: ignore[no-untyped-call]
        _, backward_s = timed(lambda: torch.autograd.grad(end, trained, allow_unused=True), device, clock=clock)
        return forward_s, backward_s

    def rounds(self, round_s: float) -> int:
        return min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, int(_TIMED_S / max(1e-9, round_s))))

    def trace(self, sample: UnitSample, forward: Callable[..., Any]) -> VariantRecord:
        return trace_unit(sample, forward, self.device)


class ModelledRuns(UnitRuns):
    """Runs copies of units on fake tensors."""

    is_modelled = True

    def __init__(self, device: torch.device, hardware: Hardware, kernels: str) -> None:
        super().__init__(device)
        self._hardware, self._kernels = hardware, kernels
        self._seconds = 0.0
        self._storages: _Storages | None = None

    @property
    def clock(self) -> Callable[[], float]:
        return lambda: self._seconds

    @contextmanager
    def copied(self, sample: UnitSample) -> Iterator[tuple[UnitSample, nn.Module]]:
        from recollect._torch_compile import on_fake_tensors

        module = sample.copied_module(shares_parameters=True)
        batch = (sample.args, sample.kwargs)
        fakes = fake_run(module, batch, self.device, kernels=self._kernels, compiles=True, on_op=self._note_op)
        with fakes as (args, kwargs), on_fake_tensors(self._note_kernel):
            yield replace(sample, args=args, kwargs=kwargs), module

    def rounds(self, round_s: float) -> int:
        """Return 1: all are alike."""
        return 1

    def trace(self, sample: UnitSample, forward: Callable[..., Any]) -> VariantRecord:
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


class _Storages(PartsTrace):
    """Traces the storages that ops make, in parts, as `PartsTrace` does the allocator's memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.parts = [[]]
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


class _End(torch.autograd.Function):
    """A scalar whose backward hands on gradients; given gradients, `torch.autograd.grad` spends a second importing SymPy."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *ends: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return ends[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.gradients)
