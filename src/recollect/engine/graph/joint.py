"""Writes a trace down as a joint record: numbers, without torch, from which programs are cut and played."""

from collections.abc import Callable
from typing import Any, Final

import torch

from recollect.engine.draws import takes_generator
from recollect.engine.graph.trace import ADDS, BackwardTrace, Trace
from recollect.engine.graph.traced_op import TracedOp, TracedTensor
from recollect.profile.joint import JointOp, JointRecord

# From torch 2.12 on, a Function may take its incoming gradients in a list, and free each after its last reader.
TAKES_LIST: Final = hasattr(torch.autograd.Function, "boxed_grads_call")


class Joint:
    """A trace and its record.

    Attributes:
        ops: of forward and of backward, in the order of the record.
        tensors: in its order.
    """

    def __init__(
        self, trace: Trace, backward: BackwardTrace, working_bytes: Callable[[TracedOp], int] = lambda _: 0
    ) -> None:
        """Write a trace down; `working_bytes` tells the peak growth of an op while it runs."""
        self.ops: list[TracedOp] = [*trace.ops, *backward.ops]
        self._numbers: dict[TracedTensor, int] = {}
        self._storages: dict[int, int] = {}
        self._working_bytes = working_bytes
        inputs = tuple(map(self.number, trace.inputs))
        tangents = tuple(map(self.number, backward.tangents))
        ops = tuple(map(self._written_down, self.ops))
        outputs = tuple(map(self.number, trace.outputs))
        gradients = tuple(tuple(map(self.number, contributions)) for contributions in backward.gradients)
        self.tensors = list(self._numbers)
        sizes = {self._storages[tensor.storage]: tensor.storage_bytes for tensor in self.tensors}
        self.record = JointRecord(
            storages=tuple(sizes[number] for number in range(len(self._storages))),
            tensors=tuple(self._storages[tensor.storage] for tensor in self.tensors),
            ops=ops,
            num_forward=len(trace.ops),
            inputs=inputs,
            outputs=outputs,
            tangents=tangents,
            gradients=gradients,
            parameters=tuple(
                index for index, needs_grad in enumerate(trace.needs_grad) if needs_grad and trace.is_parameter[index]
            ),
            input_values=(-1,) * len(inputs),
            holds_tangents=not TAKES_LIST,
        )

    def number(self, tensor: TracedTensor) -> int:
        self._storages.setdefault(tensor.storage, len(self._storages))
        return self._numbers.setdefault(tensor, len(self._numbers))

    def _written_down(self, op: TracedOp) -> JointOp:
        reads = tuple(map(self.number, op.reads))
        return JointOp(
            func=str(op.func),
            name=op.name,
            reads=reads,
            results=tuple(-1 if one is None else self.number(one) for one in op.outputs),
            writes=tuple(sorted(self._storages[storage] for storage in op.written)),
            updates=tuple(sorted(self._storages[tensor.storage] for tensor in op.updated)),
            working_bytes=self._working_bytes(op),
            is_view=op.facts.is_view and not op.facts.is_collective,
            is_random=op.is_random,
            keeps=op.count < 0 or op.keeps,
            stays=_why_it_stays(op),
            runs_anyway=op.is_random or op.facts.is_collective,
            sums_into=_sums_into(op) if op.is_backward else (),
        )


def _why_it_stays(op: TracedOp) -> str:
    if op.facts.is_collective:
        return f"{op.func} would run again, which other ranks have to agree on"
    if op.is_random and op.written and not takes_generator(op.func):
        return f"{op.func} writes random numbers in place, from a generator that cannot be given"
    return ""


def _sums_into(op: TracedOp) -> tuple[int, ...]:
    """Return the addends of a sum whose memory can take it."""
    if op.func is not ADDS[0] or op.kwargs or len(op.reads) != 2:
        return ()
    (output,) = op.outputs
    assert output is not None

    def fits(target: TracedTensor, other: TracedTensor) -> bool:
        return (
            target.is_whole
            and other.storage != target.storage
            and target.layout == output.layout
            and (other.layout[0], other.layout[3]) == (output.layout[0], output.layout[3])
        )

    return tuple(index for index in (0, 1) if fits(op.reads[index], op.reads[1 - index]))


def key_of(op: TracedOp) -> tuple[Any, ...]:
    """Return the key that `recollect.costs.op_costs.key_of` has for a call of an op on such tensors."""
    return (op.func, *map(_signature, op.args), *map(_signature, op.kwargs.values()))


def _signature(argument: Any) -> Any:
    if isinstance(argument, TracedTensor):
        shape, strides, _, dtype, *_ = argument.layout
        return torch.Size(shape), strides, dtype
    if isinstance(argument, (list, tuple)):
        return tuple(map(_signature, argument))
    return argument if isinstance(argument, (int, float, bool, str)) else None
