"""Notes the ops that run on fake tensors, forward's and backward's, and which of their tensors are the same."""

from typing import Any, Final

import torch

from recollect._torch_dtensor import spec_of
from recollect._torch_parallel import passes_ops_on
from recollect._torch_private import desugars, is_fake_tensor, tree_map
from recollect.engine.draws import draws_numbers, draws_unknown
from recollect.engine.facts import OpMode, facts_of, must_keep_result
from recollect.engine.function_mode import CollectiveFunction
from recollect.engine.graph.real_layouts import laid_out
from recollect.engine.graph.traced_op import AS_VIEWS, Layout, TracedOp, TracedTensor, layout_of
from recollect.engine.opcall import NO_MODES, current_settings
from recollect.programs.cut import UntraceableError
from recollect.tensors import tensors_in

_aten = torch.ops.aten
_NO_OPS: Final = frozenset({"prim", "profiler"})
RESHAPES: Final = (_aten.view.default, _aten._unsafe_view.default)


class Recorder(OpMode):
    """Notes each op, and which tensors are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[TracedOp] = []
        self.scope = ""
        self.is_backward = False
        self.is_in_collective = False
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

    def watch_function(self, function: Any, args: Any, kwargs: Any) -> CollectiveFunction | None:
        return CollectiveFunction(self) if passes_ops_on(function) else None

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
            self._check_draws(func, args, kwargs)
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
        if not self.is_backward and (op.has_grad or self.is_in_collective) and not facts.changes_nothing:
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

    def _check_draws(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse random ops on DTensors: they move the generator of a GPU around the op, also when nothing is drawn."""
        facts = facts_of(func)
        if facts.is_random and draws_numbers(facts, args, kwargs) and any(map(spec_of, tensors_in((args, kwargs)))):
            raise UntraceableError("it draws random numbers for DTensors")

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
