"""Records the ops of a unit's forward and backward on fake tensors, as eager mode would run them.

Dynamo's graph of the unit runs under autograd itself, and a dispatch mode below it notes each op. So ops, their order and their
names are those of eager mode, ops that write in place and the engine's sums of gradients included; no other tracer decides
anything. Which formulas run in backward, and on which strides, depends on the gradients that come in: backward is recorded
for each kind of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge

from recollect._torch_private import (
    DATA_DEPENDENT,
    FakeTensorMode,
    HigherOrderOperator,
    desugars,
    disable_autocast,
    is_fake_tensor,
    is_traceable_wrapper_subclass,
    tree_map,
)
from recollect.engine.draws import draws_numbers, draws_unknown
from recollect.engine.facts import OpMode, facts_of, must_keep_result
from recollect.engine.graph.named_run import NamedRun, reads_constant
from recollect.engine.graph.real_layouts import laid_out
from recollect.engine.graph.shared_memory import OtherMemoryError, SharedMemory
from recollect.engine.graph.traced_op import AS_VIEWS, Layout, TracedOp, TracedTensor, grad_dtype_of, layout_of
from recollect.engine.opcall import NO_MODES, current_settings
from recollect.programs.cut import UntraceableError

_aten = torch.ops.aten
_NO_OPS = frozenset({"prim", "profiler"})
# The op that eager mode adds gradients with.
ADDS: Final = (_aten.add.Tensor, _aten.add_.Tensor)
RESHAPES: Final = (_aten.view.default, _aten._unsafe_view.default)

# Formulas of gradients that look at numbers, but not at those of fake tensors: these get different formulas, with different
# bits. Each with the position of the argument that it is the gradient of.
_ASK_DATA: Final = {
    **dict.fromkeys(("ProdBackward0", "ProdBackward1", "CumprodBackward0", "MaxBackward1", "MinBackward1"), 0),
    **dict.fromkeys(("MedianBackward0", "NanmedianBackward0"), 0),
    "MaskedFillBackward1": 1,
}

Tangents: TypeAlias = tuple[Any, ...]
"""The strides of each gradient that backward begins with, None for one that is not there; last, where autocast is on."""


@dataclass(eq=False, slots=True)
class BackwardTrace:
    """The ops of one backward."""

    kind: Tangents
    ops: list[TracedOp]
    tangents: list[TracedTensor]
    """The gradients that it begins with, without those that are not there."""
    gradients: list[list[TracedTensor]]
    """For each input, the addends of its gradient in eager mode, in order; empty for one without."""


class Trace:
    """A traced call of a unit.

    Attributes:
        devices: types of those of its inputs.
        inputs: the tensors that it reads, in the order of the graph's arguments.
        outputs: what it returns; an input stands for itself.
        passed_on: inputs that it returns as they are, and their positions.
        needs_grad, is_parameter: for each input, whether it needs a gradient, and whether it is a parameter.
        num_edges: for inputs, by position, how many gradients eager mode may add up.
        outputs_need_grad: for each output that is not passed on, whether it has one.
        ops: of forward, in order.
    """

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any], paths: dict[str, str | None]) -> None:
        for node in graph.graph.nodes:
            # A Function of the model's: its forward and its backward run as in eager mode.
            if isinstance(node.target, HigherOrderOperator) and node.target.name() != "autograd_function_apply":
                raise UntraceableError(f"it calls {node.target.name()}")
        if reads_constant(graph):
            raise UntraceableError("it reads a tensor that is a constant of its code")
        if any(not isinstance(one, torch.Tensor) or is_traceable_wrapper_subclass(one) for one in inputs):
            raise UntraceableError("it reads tensors of a subclass, such as DTensor")
        from recollect._torch_dynamo import faked  # Here: it imports Dynamo.

        self.devices = {one.device.type for one in inputs}
        modes = [one.fake_mode for one in inputs if is_fake_tensor(one)]
        self._fakes = modes[0] if modes else FakeTensorMode()
        leaves = [one if is_fake_tensor(one) else faked(self._fakes, one) for one in inputs]
        with self._fakes, torch.enable_grad():
            self._leaves = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
            # To which autograd casts gradients: FSDP2 gathers parameters in 16 bits, and adds up their gradients in 32.
            self._dtypes = {i: grad_dtype_of(p) for i, p in enumerate(inputs) if isinstance(p, torch.nn.Parameter)}
            for index, dtype in self._dtypes.items():
                self._leaves[index].grad_dtype = dtype
            # Autocast keeps the casts of leaves, and of no others.
            for index, one in enumerate(inputs):
                if not one.is_leaf:
                    self._leaves[index] = _aten.alias(self._leaves[index])
            self._recorder = _Recorder()
            self.inputs = [self._recorder.add(leaf, None) for leaf in self._leaves]
            with self._recorder:
                try:
                    outputs = NamedRun(graph, self._recorder, paths).run_or_leave(*self._leaves)
                except DATA_DEPENDENT as error:
                    raise UntraceableError(f"what {error.func} gives back depends on data") from error
        self._outputs: list[torch.Tensor] = list(outputs)
        self.ops = self._recorder.ops
        self.outputs = [self._recorder.known(output) for output in self._outputs]
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
        self._check_outputs()
        self._edges = self._find_edges()
        self.num_edges = Counter(leaf for _, _, leaf in self._edges)
        self._backward: dict[Tangents, BackwardTrace] = {}
        self._memory = SharedMemory(self.inputs, self.ops)

    def _check_outputs(self) -> None:
        """Refuse anything that autograd would have to be told of."""
        storages = {one.storage for one in self.inputs}
        needs = zip(self.outputs, self.outputs_need_grad, strict=True)
        made = [(one, needs_grad) for one, needs_grad in needs if one not in self.passed_on]
        if any(one.storage in storages for one, _ in made):
            raise UntraceableError("it returns a view of an input")
        # Others are views of each other, as in eager mode: autograd refuses writes of which a gradient would not know.
        num_kinds = len({(one.storage, needs_grad) for one, needs_grad in made})
        if len({one for one, _ in made}) < len(made) or len({one.storage for one, _ in made}) < num_kinds:
            raise UntraceableError("it returns the same memory twice: as one tensor, or with and without a gradient")
        for op in self.ops:
            for tensor, needs_grad in zip(self.inputs, self.needs_grad, strict=True):
                if needs_grad and tensor.storage in op.written:
                    raise UntraceableError("it writes to an input that needs a gradient")

    @property
    def usual_tangents(self) -> Tangents:
        """Of gradients that are there for each output that needs one, with its strides."""
        strides = [
            output.layout[1] if needs_grad else None
            for output, needs_grad in zip(self.outputs, self.outputs_need_grad, strict=True)
        ]
        return *strides, ()

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

    def check_fits(self, inputs: Sequence[torch.Tensor]) -> None:
        """Check what guards do not see.

        Raises:
            OtherMemoryError: its inputs share memory differently, or gradients have different types.
        """
        for index, dtype in self._dtypes.items():
            if grad_dtype_of(inputs[index]) is not dtype:
                raise OtherMemoryError
        self._memory.check(inputs)

    @contextmanager
    def _counted(self) -> Iterator[Counter[int]]:
        """Count the gradients that come to each input: some edges have none, or are not reached from these outputs."""
        found: Counter[int] = Counter()

        def count(gradients: Any, _: Any, place: int, index: int) -> None:
            found[index] += gradients[place] is not None

        handles = [node.register_hook(partial(count, place=place, index=leaf)) for node, place, leaf in self._edges]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def backward(self, tangents: Tangents) -> BackwardTrace:
        """Return the ops of a backward that begins with such gradients."""
        if tangents not in self._backward:
            self._backward[tangents] = self._record_backward(tangents)
        return self._backward[tangents]

    def _record_backward(self, tangents: Tangents) -> BackwardTrace:
        recorder = self._recorder
        needing = [index for index, needs_grad in enumerate(self.needs_grad) if needs_grad]
        *all_strides, autocast = tangents
        # Forward's autocast is on while a unit is traced.
        with self._fakes, nullcontext() if autocast else disable_autocast():
            given = [
                (output, torch.empty_strided(output.shape, strides, dtype=output.dtype, device=output.device))
                for output, strides in zip(self._outputs, all_strides, strict=True)
                if strides is not None
            ]
            recorder.begin_backward()
            begun = [recorder.add(tangent, None) for _, tangent in given]
            found: Sequence[torch.Tensor | None] = [None] * len(needing)
            with recorder, self._counted() as counts:
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
                total = recorder.known(gradient)
                gradients[index] = _added_up(total, counts[index])
        return BackwardTrace(tangents, recorder.ops, begun, gradients)


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


class _Recorder(OpMode):
    """Notes each op, and which tensors are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[TracedOp] = []
        self.scope = ""
        self.is_backward = False
        self._settings = current_settings(NO_MODES)
        self._counts: dict[tuple[str, str], int] = {}
        self._tensors: dict[int, TracedTensor] = {}
        self._by_place: dict[tuple[int, Layout], TracedTensor] = {}
        self._storages: dict[int, int] = {}
        self._num_tensors = 0
        # So that no number of an object or of its memory is used twice.
        self._held: list[Any] = []

    def begin_backward(self) -> None:
        self.ops = []
        self.is_backward = True
        # Views made by a different backward do not exist in this one.
        own = [place for place, one in self._by_place.items() if one.maker is not None and one.maker.is_backward]
        for place in own:
            del self._by_place[place]

    def add(self, tensor: torch.Tensor, maker: TracedOp | None) -> TracedTensor:
        if tensor.layout is not torch.strided:
            raise UntraceableError(f"it computes a tensor of layout {tensor.layout}")
        storage = tensor.untyped_storage()
        number = self._storages.setdefault(storage._cdata, len(self._storages))
        traced = TracedTensor(self._num_tensors, number, storage.nbytes(), layout_of(tensor), maker)
        self._num_tensors += 1
        self._tensors[id(tensor)] = self._by_place[number, traced.layout] = traced
        self._held += [tensor, storage]
        return traced

    def known(self, tensor: torch.Tensor) -> TracedTensor:
        """Return the stand-in for a tensor; autograd makes new objects for some of those that it saves."""
        found = self._tensors.get(id(tensor))
        if found is None and tensor.layout is torch.strided:
            number = self._storages.get(tensor.untyped_storage()._cdata, -1)
            found = self._by_place.get((number, layout_of(tensor)))
        if found is None:
            raise UntraceableError("it reads a tensor that none of its ops made")
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(desugars(kind) for kind in types):
            return NotImplemented
        if self.is_foreign() or func.namespace in _NO_OPS:
            return func(*args, **kwargs)
        facts = facts_of(func)
        if facts.changes_layout_only and not torch.is_grad_enabled():
            # A Function's result would be saved in the layout from before.
            raise UntraceableError(f"a Function in it calls {func}, or code without gradients")
        if func is _aten.lift_fresh.default and not is_fake_tensor(args[0]):
            return self._constant(args[0])
        run = func
        if func in AS_VIEWS:
            self._check_alone(func, args[0])
            func, facts = AS_VIEWS[func], facts_of(AS_VIEWS[func])
        if not self.is_backward and current_settings(NO_MODES) is not self._settings:
            raise UntraceableError("it changes settings of PyTorch, which its program would not")
        op = TracedOp(func, facts, (), {}, self.is_backward, torch.is_grad_enabled(), self.scope)
        op.args, op.kwargs = self._bound(op, args), self._bound(op, kwargs)
        op.written = frozenset(self.known(target).storage for target in facts.written_by(args, kwargs))
        if not self.is_backward and op.has_grad and not facts.changes_nothing:
            op.count = self._counts.get((self.scope, facts.name), 0)
            self._counts[self.scope, facts.name] = op.count + 1
        output = laid_out(func, facts, args, kwargs, run(*args, **kwargs))
        if facts.is_view and not facts.is_collective and self._is_known_view(output):
            return output
        if func in RESHAPES:
            self._skip_reshape(op)
        op.is_random = facts.is_random and draws_numbers(facts, args, kwargs)
        op.keeps = (facts.may_keep and must_keep_result(facts, args, output, kwargs)) or (
            op.is_random and draws_unknown(facts, args, kwargs)
        )
        op.returns_one = isinstance(output, torch.Tensor)
        results = output if isinstance(output, (list, tuple)) else (output,) if op.returns_one else ()
        op.outputs = [self.add(result, op) if isinstance(result, torch.Tensor) else None for result in results]
        self.ops.append(op)
        return output

    def _check_alone(self, func: Any, tensor: torch.Tensor) -> None:
        """Refuse to change the shape of an input; and of a tensor with views, whose gradients fake tensors take differently."""
        traced = self.known(tensor)
        others = (one for number, one in self._tensors.items() if number != id(tensor))
        if traced.maker is None or any(one.storage == traced.storage for one in others):
            raise UntraceableError(f"it calls {func} on an input, or on a tensor with views")

    def _constant(self, constant: torch.Tensor) -> torch.Tensor:
        """Return what `torch.tensor` makes of numbers in the code: a new tensor in each call."""
        op = TracedOp(_aten.clone.default, facts_of(_aten.lift_fresh.default), (constant,), {}, self.is_backward, False)
        op.scope = self.scope
        output: torch.Tensor = _aten.lift_fresh.default(constant)
        op.outputs = [self.add(output, op)]
        self.ops.append(op)
        return output

    def _is_known_view(self, output: Any) -> bool:
        """Whether views are all of memory that is known under the same layouts: then they are the same tensors."""
        views = output if isinstance(output, (list, tuple)) else (output,)
        if not views or not all(isinstance(view, torch.Tensor) and view.layout is torch.strided for view in views):
            return False
        places = [(self._storages.get(view.untyped_storage()._cdata, -1), layout_of(view)) for view in views]
        if not all(place in self._by_place for place in places):
            return False
        self._tensors.update((id(view), self._by_place[place]) for view, place in zip(views, places, strict=True))
        self._held += views
        return True

    def _skip_reshape(self, op: TracedOp) -> None:
        """Reshape the input of an earlier reshape, if that is contiguous."""
        (before,) = op.reads
        maker = before.maker
        if maker is not None and maker.func in RESHAPES and maker.reads[0].is_contiguous:
            op.reads = [maker.reads[0]]
            op.args = (maker.reads[0], *op.args[1:])

    def _bound(self, op: TracedOp, arguments: Any) -> Any:
        def bound(argument: Any) -> Any:
            if not isinstance(argument, torch.Tensor):
                return argument
            op.reads.append(self.known(argument))
            return op.reads[-1]

        return tree_map(bound, arguments)
