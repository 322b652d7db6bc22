"""Trace the memory of one run of a unit, forward and backward, as bytes that it adds to a step.

The unit runs between a source, which makes its inputs, and a sink, which makes the gradients of what it returns. Nobody else
holds inputs or outputs between forward and backward, so that the unit holds all values that are alive there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from recollect._torch_private import tree_leaves, tree_map
from recollect.engine.subclasses import strided_tensors
from recollect.measuring.parts_trace import PartsTrace
from recollect.recording.unit_samples import UnitSample

Part = list[tuple[int, int]]
"""Events of the allocator: (address, bytes; 0 for a free)."""


class Trace(Protocol):
    """Traces memory in parts: `PartsTrace`."""

    parts: list[Part]

    def mark(self) -> None:
        """End a part."""

    def recording(self) -> AbstractContextManager[None]:
        """Trace the block."""

    def address_of(self, storage: torch.UntypedStorage) -> int:
        """Return the address of a storage in the events."""


@dataclass(frozen=True)
class UnitTrace:
    """What one run of a unit does to memory; see `VariantRecord` for the fields."""

    held: tuple[int, ...]
    own_bytes: int
    forward_bytes: int
    backward: tuple[tuple[int, int, int], ...]


def trace_unit(
    sample: UnitSample, forward: Callable[..., Any], device: torch.device, trace: Trace | None = None
) -> UnitTrace:
    """Run a unit once, forward and backward, and return what it does to memory.

    Args:
        sample: what the unit gets.
        forward: of a copy of the unit, whose parameters have no gradients yet. It has run before, so that it compiles no more.
        device: where it runs.
        trace: a new one; by default of the device's allocator.

    Raises:
        MeterError: on the CPU, under another profiler.
        Exception: whatever the unit raises.
    """
    trace = trace or PartsTrace(device)
    run = _Run(trace)
    with trace.recording(), torch.enable_grad():
        args, kwargs = run.inputs_of(sample)
        trace.mark()
        with torch.autocast(device.type, dtype=sample.autocast, enabled=sample.autocast is not None):
            output = forward(*args, **kwargs)
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
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

    trace: Trace
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

    def found(self) -> UnitTrace:
        _, forward, dropping, gradients, backward, _ = self.trace.parts
        made, forward_bytes = _played(forward)
        for address, _ in dropping:
            made.pop(address, None)
        freed = {address for address, nbytes in dropping if not nbytes}
        values = {**self.outputs, **self.inputs}
        held = {address: value for address, value in values.items() if address not in freed}
        own = {address: nbytes for address, nbytes in made.items() if address not in values}
        sizes = {**own, **{address: nbytes for address, nbytes in gradients if address in self.gradients}}
        return UnitTrace(
            held=tuple(sorted({value for value in held.values() if value >= 0})),
            own_bytes=sum(own.values()),
            forward_bytes=forward_bytes,
            backward=tuple(_stretches(backward, sizes, held)),
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
    """Yield `VariantRecord.backward`.

    Args:
        part: the events of backward.
        sizes: by address, the bytes of storages that exist when it begins and count when they are freed.
        held: values that end a stretch when they are freed, by address.
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
