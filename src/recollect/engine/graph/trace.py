"""Records the ops of a unit's forward and backward on fake tensors, as eager mode would run them.

Dynamo's graph of the unit runs under autograd itself, and a dispatch mode below it notes each op. So ops, their order and their
names are those of eager mode, ops that write in place and the engine's sums of gradients included; no other tracer decides
anything. Which formulas run in backward, and on which strides, depends on the gradients that come in: backward is recorded
for each kind of these.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

from recollect._torch_dtensor import gradient_spec, local_part, spec_of, spread
from recollect._torch_functions import watched_functions
from recollect._torch_private import (
    DATA_DEPENDENT,
    FakeTensorMode,
    HigherOrderOperator,
    any_autocast_is_enabled,
    desugars,
    disable_autocast,
    is_fake_tensor,
    next_autograd_node,
)
from recollect.engine.autocast_casts import keeps_casts
from recollect.engine.graph.named_run import NamedRun, reads_constant
from recollect.engine.graph.recorder import Recorder
from recollect.engine.graph.shared_memory import OtherMemoryError, SharedMemory
from recollect.engine.graph.traced_op import TracedOp, TracedTensor, grad_dtype_of
from recollect.programs.cut import UntraceableError

_aten = torch.ops.aten
# The op that eager mode adds gradients with.
ADDS: Final = (_aten.add.Tensor, _aten.add_.Tensor)

# Formulas of gradients that look at numbers, but not at those of fake tensors: these get different formulas, with different
# bits. Each with the position of the argument that it is the gradient of.
_ASK_DATA: Final = {
    **dict.fromkeys(("ProdBackward0", "ProdBackward1", "CumprodBackward0", "MaxBackward1", "MinBackward1"), 0),
    **dict.fromkeys(("MedianBackward0", "NanmedianBackward0"), 0),
    "MaskedFillBackward1": 1,
}

Tangents: TypeAlias = tuple[Any, ...]
"""The strides of each gradient that backward begins with, a `SpreadKind` for a DTensor, None for one that is not there; last,
where autocast is on."""


Specs: TypeAlias = dict[tuple[int, TracedTensor], Any]
"""How DTensors are spread, by the input whose gradients they are, and by what this process holds: inputs share gradients."""


class SpreadKind(NamedTuple):
    """What this process holds of a DTensor, and how it is spread."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    spec: Any


@dataclass(eq=False, slots=True)
class BackwardTrace:
    """The ops of one backward."""

    kind: Tangents
    ops: list[TracedOp]
    tangents: list[TracedTensor]
    """The gradients that it begins with, without those that are not there."""
    gradients: list[list[TracedTensor]]
    """For each input, the addends of its gradient in eager mode, in order; empty for one without."""
    specs: Specs


class Trace:
    """A traced call of a unit.

    Attributes:
        devices: types of those of its inputs.
        inputs: the tensors that it reads, in the order of the graph's arguments; of DTensors, what this process holds.
        spread_inputs: positions of the DTensors among them.
        places: for each tensor that it returns, its position in `outputs`: one tensor may be returned twice.
        output_specs: how outputs are spread, where they are DTensors.
        outputs: what it returns; an input stands for itself.
        passed_on: inputs that it returns as they are, and their positions.
        needs_grad, is_parameter: for each input, whether it needs a gradient, and whether it is a parameter.
        num_edges: for inputs, by position, how many gradients eager mode may add up.
        outputs_need_grad: for each output that is not passed on, whether it has one.
        is_view: for each output, whether it has one and is a view to autograd.
        ops: of forward, in order.
    """

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any], paths: dict[str, str | None]) -> None:
        _check(graph)
        # A graph with DTensors also gets their meshes.
        self._meshes = {index: one for index, one in enumerate(inputs) if isinstance(one, DeviceMesh)}
        arguments, inputs = list(inputs), self.tensors_of(inputs)
        self._fakes, parts = _faked([local_part(one) for one in inputs])
        self.devices = {one.device.type for one in inputs}
        self.spread_inputs = [index for index, one in enumerate(inputs) if spec_of(one) is not None]
        with self._fakes, torch.enable_grad():
            self._leaves = [
                spread(part.detach(), spec_of(one)).requires_grad_(one.requires_grad)
                for part, one in zip(parts, inputs, strict=True)
            ]
            # To which autograd casts gradients: FSDP2 gathers parameters in 16 bits, and adds up their gradients in 32.
            self._dtypes = {i: grad_dtype_of(p) for i, p in enumerate(inputs) if isinstance(p, torch.nn.Parameter)}
            for index, dtype in self._dtypes.items():
                self._leaves[index].grad_dtype = dtype
            # Autocast keeps the casts of leaves, and of no others.
            for index, one in enumerate(inputs):
                if not one.is_leaf:
                    self._leaves[index] = _aten.alias(self._leaves[index])
            self._recorder = Recorder()
            self.inputs = [self._recorder.add(local_part(leaf), None) for leaf in self._leaves]
            leaves = iter(self._leaves)
            given = [one if index in self._meshes else next(leaves) for index, one in enumerate(arguments)]
            with self._recorder, watched_functions(self._recorder.watch_function):
                try:
                    outputs = NamedRun(graph, self._recorder, paths).run_or_leave(*given)
                except DATA_DEPENDENT as error:
                    raise UntraceableError(f"what {error.func} gives back depends on data") from error
        num_nodes = next_autograd_node()
        # A view of all of a tensor is an output of its own: in eager mode, its gradient is added at a different place.
        self._outputs = list({id(one): one for one in outputs}.values())
        position = {id(one): index for index, one in enumerate(self._outputs)}
        self.places = [position[id(one)] for one in outputs]
        self.ops = self._recorder.ops
        self.outputs = [self._recorder.known(local_part(one)) for one in self._outputs]
        self.output_specs = [spec_of(output) for output in self._outputs]
        # Outputs that are inputs, and no views of them.
        self.passed_on = {
            traced: index
            for index, (traced, leaf) in enumerate(zip(self.inputs, self._leaves, strict=True))
            if any(output is leaf for output in self._outputs)
        }
        self.needs_grad = [leaf.requires_grad for leaf in self._leaves]
        self.is_parameter = [isinstance(one, torch.nn.Parameter) for one in inputs]
        self.outputs_need_grad = [
            output.requires_grad and traced not in self.passed_on
            for output, traced in zip(self._outputs, self.outputs, strict=True)
        ]
        needs = zip(self._outputs, self.outputs_need_grad, strict=True)
        self.is_view = [needs_grad and output._is_view() for output, needs_grad in needs]
        self._check_outputs(num_nodes)
        self._edges = self._find_edges()
        self.num_edges = Counter(leaf for _, _, leaf in self._edges)
        self._backward: dict[Tangents, BackwardTrace] = {}
        self._memory = SharedMemory(self.inputs, self.ops)
        self._enters_autocast = any(
            getattr(node.target, "__name__", "") == "_enter_autocast" for node in graph.graph.nodes
        )

    def _check_outputs(self, num_nodes: int) -> None:
        """Refuse anything that autograd would have to be told of; `num_nodes`: of its graph, as the unit returned."""
        storages = {one.storage for one in self.inputs}
        needs = zip(self.outputs, self.outputs_need_grad, strict=True)
        made = [(one, needs_grad) for one, needs_grad in needs if one not in self.passed_on]
        if any(one.storage in storages for one, _ in made):
            raise UntraceableError("it returns a view of an input")
        # Others are views of each other, as in eager mode: autograd refuses writes of which a gradient would not know.
        num_kinds = len({(one.storage, needs_grad) for one, needs_grad in made})
        if len({one.storage for one, _ in made}) < num_kinds:
            raise UntraceableError("it returns the same memory twice, with and without a gradient")
        nodes = [output.grad_fn for output in self._outputs if output.grad_fn is not None]
        if len({one.storage for one, _ in made}) < len(made) and any(n._sequence_nr() >= num_nodes for n in nodes):
            # Autograd makes its node where that is first read; gradients are added up in the order of nodes.
            raise UntraceableError("it returns the same memory twice: once as a view from before a write to it")
        for op in self.ops:
            for tensor, needs_grad in zip(self.inputs, self.needs_grad, strict=True):
                if needs_grad and tensor.storage in op.written:
                    raise UntraceableError("it writes to an input that needs a gradient")

    def may_be_written(self, index: int) -> bool:
        """Whether gradients stay those of eager mode if a loop writes in place to an output whose memory nothing else has.

        If that is a view, autograd turns to what it is a view of: the gradient gets its strides, and comes before all others.
        """
        output, storage = self._outputs[index], self.outputs[index].storage
        if not self.is_view[index]:
            return True
        reading = [op for op in self.ops if any(one.storage == storage for one in op.reads)]
        is_read = any(made is None or made.storage != storage for op in reading for made in op.outputs)
        is_part = output._base.is_contiguous() and output.numel() < output._base.numel()
        return not is_read and (is_part or output.numel() == output._base.numel())

    @property
    def usual_tangents(self) -> Tangents:
        """Of gradients that are there for each output that needs one, with its strides."""
        needs = zip(self.outputs, self.output_specs, self.outputs_need_grad, strict=True)
        return *(_usual_kind(output, spec) if needs_grad else None for output, spec, needs_grad in needs), ()

    def _find_edges(self) -> list[tuple[Any, int, int]]:
        """Find the edges of the graph that lead to inputs: each a node, the position of its gradient, and of the input."""
        position = {
            get_gradient_edge(leaf).node: index for index, leaf in enumerate(self._leaves) if leaf.requires_grad
        }
        found = []
        pending: list[Any] = [output.grad_fn for output in self._outputs if output.grad_fn is not None]
        seen = set(pending)
        while pending:
            node = pending.pop()
            for place, (following, _) in enumerate(node.next_functions):
                if following is not None and _ASK_DATA.get(node.name()) == place:
                    raise UntraceableError(f"{node.name()} chooses its ops by a tensor's contents")
                if following in position:
                    found.append((node, place, position[following]))
                elif following is not None and following not in seen:
                    seen.add(following)
                    pending.append(following)
        return found

    def tensors_of(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """Return the tensors among the graph's arguments; raise `OtherMemoryError` if a mesh is not the traced one."""
        if not self._meshes:
            return arguments
        if any(arguments[index] != mesh for index, mesh in self._meshes.items()):
            raise OtherMemoryError
        return [one for index, one in enumerate(arguments) if index not in self._meshes]

    def parts_of(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return the tensors that programs read: of DTensors, what this process holds."""
        return [local_part(one) for one in inputs] if self.spread_inputs else inputs

    def shares_casts(self) -> bool:
        """Whether autocast would keep casts that it makes in a block of its own, as one around it is off."""
        return self._enters_autocast and keeps_casts() and not any_autocast_is_enabled()

    def check_fits(self, inputs: Sequence[Any], parts: Sequence[Any]) -> None:
        """Raise `OtherMemoryError` if guards do not see that the trace does not fit. `parts`: see `parts_of`."""
        if self.shares_casts():
            raise OtherMemoryError
        for index, dtype in self._dtypes.items():
            if grad_dtype_of(inputs[index]) is not dtype:
                raise OtherMemoryError
        self._memory.check(parts)

    @contextmanager
    def _counted(self, specs: Specs) -> Iterator[Counter[int]]:
        """Count the gradients that come to each input: some edges have none, or are not reached from these outputs.

        `specs`: gets how those are spread that are DTensors.
        """
        found: Counter[int] = Counter()

        def count(gradients: Any, _: Any, place: int, index: int) -> None:
            gradient = gradients[place]
            found[index] += gradient is not None
            if index in self.spread_inputs and gradient is not None:
                specs[index, self._recorder.known(local_part(gradient))] = spec_of(gradient)

        handles = [node.register_hook(partial(count, place=place, index=leaf)) for node, place, leaf in self._edges]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def backward(self, tangents: Tangents) -> BackwardTrace:
        if tangents not in self._backward:
            self._backward[tangents] = self._record_backward(tangents)
        return self._backward[tangents]

    def _record_backward(self, tangents: Tangents) -> BackwardTrace:
        recorder = self._recorder
        needing = [index for index, needs_grad in enumerate(self.needs_grad) if needs_grad]
        *kinds, autocast = tangents
        # Forward's autocast is on while a unit is traced.
        with self._fakes, nullcontext() if autocast else disable_autocast():
            given = [
                (output, _gradient(output, kind))
                for output, kind in zip(self._outputs, kinds, strict=True)
                if kind is not None
            ]
            recorder.begin_backward()
            begun = [recorder.add(local_part(tangent), None) for _, tangent in given]
            found: Sequence[torch.Tensor | None] = [None] * len(needing)
            specs: Specs = {}
            with recorder, self._counted(specs) as counts:
                if needing and given:
                    found = torch.autograd.grad(
                        [output for output, _ in given],
                        [self._leaves[index] for index in needing],
                        [tangent for _, tangent in given],
                        retain_graph=True,
                        allow_unused=True,
                    )
        if any(not op.written.isdisjoint(one.storage for one in self.inputs) for op in recorder.ops):
            raise UntraceableError("its backward writes to its inputs")
        gradients: list[list[TracedTensor]] = [[] for _ in self.inputs]
        for index, gradient in zip(needing, found, strict=True):
            if gradient is not None:
                total = recorder.known(local_part(gradient))
                gradients[index] = _added_up(total, counts[index])
        if any((index, one) not in specs for index in self.spread_inputs for one in gradients[index]):
            raise UntraceableError("the gradients of a DTensor are spread in different ways before they are added up")
        return BackwardTrace(tangents, recorder.ops, begun, gradients, specs)


def _check(graph: fx.GraphModule) -> None:
    """Refuse what cannot run on fake tensors as in eager mode."""
    for node in graph.graph.nodes:
        # A Function of the model's: its forward and its backward run as in eager mode.
        if isinstance(node.target, HigherOrderOperator) and node.target.name() != "autograd_function_apply":
            raise UntraceableError(f"it calls {node.target.name()}")
    if reads_constant(graph):
        raise UntraceableError("it reads a tensor that is a constant of its code")


def _faked(tensors: Sequence[Any]) -> tuple[FakeTensorMode, list[torch.Tensor]]:
    """Return fake tensors that stand for real ones, or the fake ones that are given, and their mode."""
    from recollect._torch_dynamo import faked  # Here: it imports Dynamo.

    for one in tensors:
        if not isinstance(one, torch.Tensor) or desugars(type(one)):
            raise UntraceableError(f"it reads a {type(one).__name__}")
    modes = [one.fake_mode for one in tensors if is_fake_tensor(one)]
    mode = modes[0] if modes else FakeTensorMode()
    return mode, [one if is_fake_tensor(one) else faked(mode, one) for one in tensors]


def _usual_kind(output: TracedTensor, spec: Any) -> Any:
    return output.layout[1] if spec is None else SpreadKind(*output.layout[:2], gradient_spec(spec))


def _gradient(output: torch.Tensor, kind: Any) -> torch.Tensor:
    shape, strides, spec = kind if isinstance(kind, SpreadKind) else (output.shape, kind, None)
    return spread(torch.empty_strided(shape, strides, dtype=output.dtype, device=output.device), spec)


def _added_up(total: TracedTensor, count: int) -> list[TracedTensor]:
    """Return the tensors that eager mode added up to a gradient, in order.

    The engine adds them as they come, over the whole step: a unit that added up its own first would add in a different order.
    """
    found: list[TracedTensor] = []
    for _ in range(count - 1):
        op = total.maker
        if op is None or op.func not in ADDS or not op.is_backward or len(op.reads) != 2 or op.kwargs:
            raise UntraceableError("the gradients of an input are not added up one by one")
        total, latest = op.reads
        found.append(latest)
    return [total, *reversed(found)]
