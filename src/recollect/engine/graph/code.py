"""Writes the ops of a trace as a function: one line for each op, each tensor freed after its last reader.

The function takes its tensors in a list, which it empties: nothing else then holds them. Gradients are summed in place if one
of the two is no longer needed. Backward can be a generator, which hands gradients over as soon as they
are there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch

from recollect._torch_functions import outside_vmap
from recollect.engine.draws import Draw, first_run
from recollect.engine.graph.bindings import binding_of
from recollect.engine.graph.cut import Cut
from recollect.engine.graph.recorder import RESHAPES
from recollect.engine.graph.trace import ADDS
from recollect.engine.graph.traced_op import TracedOp, TracedTensor

Run: TypeAlias = Callable[[list[Any]], list[Any]]
RunInParts: TypeAlias = Callable[[list[Any], list[Any]], Iterator[None]]

Part: TypeAlias = tuple[int, list[TracedTensor]]
"""Gradients to hand over, and the number of ops of backward that have run then."""

_ADD_IN_PLACE = ADDS[1]
_PLAIN: Final = (int, float, bool, str, type(None))


def forward_code(cut: Cut) -> Run:
    """Return a function from a unit's inputs to its outputs, followed by the tensors and draws that backward needs."""
    text = _Text("forward", cut.forward, cut.trace.inputs, [*cut.trace.outputs, *cut.saved], drawing=cut.draws)
    return text.function()


def backward_code(cut: Cut) -> Run:
    """Return a function from outside gradients and saved values to the addends of the inputs' gradients."""
    gradients = [tensor for contributions in cut.gradients for tensor in contributions]
    text = _Text("backward", cut.backward, [*cut.tangents, *cut.saved], gradients, drawn=cut.draws, sums=cut.sums)
    return text.function()


def backward_in_parts(cut: Cut, parts: Sequence[Part]) -> RunInParts:
    """Return a generator that does the same, and adds the gradients of each part, in order, to a list that it is given."""
    text = _Text("backward", cut.backward, [*cut.tangents, *cut.saved], [], drawn=cut.draws, sums=cut.sums)
    return text.generator(parts)


def _draw_again(draw: Draw | None, func: Any, args: Any, kwargs: Any) -> Any:
    with outside_vmap():
        return func(*args, **kwargs) if draw is None else draw.again(func, args, kwargs)


class _Text:
    """A function that is being written.

    Args:
        inputs: the tensors that it is given, before the draws.
        drawing: random ops whose draws it returns as well, after the results.
        drawn: random ops whose draws it is given.
        sums: those that it makes in place: the addend whose memory takes the sum, and the other one.
    """

    def __init__(
        self,
        title: str,
        ops: Sequence[TracedOp],
        inputs: Sequence[TracedTensor],
        results: Sequence[TracedTensor],
        *,
        drawing: Sequence[TracedOp] = (),
        drawn: Sequence[TracedOp] = (),
        sums: Mapping[TracedOp, tuple[TracedTensor, TracedTensor]] = MappingProxyType({}),
    ) -> None:
        self._title = title
        self._inputs = list(inputs)
        self._results = list(results)
        self._drawing = {op: f"d{index}" for index, op in enumerate(drawing)}
        self._drawn = {op: f"d{index}" for index, op in enumerate(drawn)}
        self._ops = ops
        self._sums = sums
        self._names: dict[Any, str] = {}
        self._globals: dict[str, Any] = {"inf": float("inf"), "nan": float("nan"), "grad": torch._C._set_grad_enabled}

    def function(self) -> Run:
        return self._compiled("given", [*self._unpacking(), *self._body(), self._returning()])

    def generator(self, parts: Sequence[Part]) -> RunInParts:
        return self._compiled("given, found", [*self._unpacking(), *self._body(parts)])

    def _compiled(self, arguments: str, lines: Sequence[str]) -> Any:
        source = f"def run({arguments}):\n    " + "\n    ".join(lines)
        exec(compile(source, f"<{self._title} of a traced unit>", "exec"), self._globals)  # noqa: S102 - our own text
        self._globals["run"].source = source
        return self._globals["run"]

    def _unpacking(self) -> list[str]:
        names = [self._name(tensor) for tensor in self._inputs] + list(self._drawn.values())
        return [f"[{', '.join(names)}] = given", "given.clear()"]

    def _body(self, parts: Sequence[Part] = ()) -> list[str]:
        last: dict[TracedTensor, int] = {tensor: -1 for tensor in self._inputs}
        for position, op in enumerate(self._ops):
            last.update(dict.fromkeys(op.reads, position))
        held = {*self._results, *(tensor for _, tensors in parts for tensor in tensors)}
        pending = list(reversed(parts))
        lines = self._deleting([tensor for tensor, position in last.items() if position < 0 and tensor not in held])
        # As autograd calls both: with gradients switched off.
        has_grad = False
        for position, op in enumerate(self._ops):
            wanted = op.has_grad and not op.is_backward
            if wanted is not has_grad and not op.facts.is_view:
                lines.append(f"grad({wanted})")
                has_grad = wanted
            lines.append(self._line(op))
            dying = [t for t in dict.fromkeys(op.reads) if last[t] == position and t not in held]
            unread = [t for t in op.outputs if t is not None and t not in last and t not in held]
            lines += self._deleting(dying + unread)
            if op in self._drawn:
                lines.append(f"del {self._drawn[op]}")
            while pending and pending[-1][0] == position + 1:
                lines += self._handing_over(pending.pop()[1], pending, has_grad=has_grad)
                has_grad = False
        while pending:
            lines += self._handing_over(pending.pop()[1], pending, has_grad=has_grad)
            has_grad = False
        return [*lines, "grad(False)"] if has_grad else lines

    def _handing_over(self, tensors: Sequence[TracedTensor], later: Sequence[Part], *, has_grad: bool) -> list[str]:
        needed = {tensor for _, others in later for tensor in others}
        lines = ["grad(False)"] if has_grad else []
        lines.append(f"found += [{', '.join(map(self._name, tensors))}]")
        return [*lines, *self._deleting([one for one in dict.fromkeys(tensors) if one not in needed]), "yield"]

    def _deleting(self, tensors: Sequence[TracedTensor]) -> list[str]:
        return [f"del {', '.join(map(self._name, tensors))}"] if tensors else []

    def _line(self, op: TracedOp) -> str:
        call = self._call(op)
        if op in self._drawing:
            return f"{self._targets(op)}, {self._drawing[op]} = {call}"
        return f"{self._targets(op)} = {call}"

    def _targets(self, op: TracedOp) -> str:
        names = [self._name(output) if output is not None else "_" for output in op.outputs]
        if op.returns_one:
            return names[0]
        return f"[{', '.join(names)}]" if names else "_"

    def _call(self, op: TracedOp) -> str:
        args, kwargs = list(op.args), dict(op.kwargs)
        if op in self._sums:
            return f"{self._constant(binding_of(_ADD_IN_PLACE))}({', '.join(map(self._text, self._sums[op]))})"
        if op.updated and self._runs_again(op):
            args = [None if argument in op.updated else argument for argument in args]
        positional = ", ".join(map(self._text, args))
        named = ", ".join(f"{name}={self._text(argument)}" for name, argument in kwargs.items())
        if op in self._drawing or op in self._drawn:
            packed = f"({positional}{',' if args else ''}), {self._text(kwargs)}"
            if op in self._drawing:
                return f"{self._constant(first_run)}({self._constant(op.facts)}, {self._constant(op.func)}, {packed})"
            return f"{self._constant(_draw_again)}({self._drawn[op]}, {self._constant(op.func)}, {packed})"
        # `vmap` lays some gradients out differently.
        is_reshape = op.is_backward and op.func in RESHAPES
        binding = torch.Tensor.reshape if is_reshape else binding_of(op.func)
        return f"{self._constant(binding)}({', '.join(filter(None, (positional, named)))})"

    def _runs_again(self, op: TracedOp) -> bool:
        return self._title == "backward" and not op.is_backward

    def _returning(self) -> str:
        return f"return [{', '.join([*map(self._name, self._results), *self._drawing.values()])}]"

    def _name(self, tensor: TracedTensor) -> str:
        return f"v{tensor.index}"

    def _constant(self, value: Any) -> str:
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"c{len(self._names)}"
            self._globals[name] = value
        return name

    def _text(self, argument: Any) -> str:
        if isinstance(argument, TracedTensor):
            return self._name(argument)
        if isinstance(argument, Mapping):
            return "{" + ", ".join(f"{name!r}: {self._text(one)}" for name, one in argument.items()) + "}"
        if isinstance(argument, (list, tuple)) and not hasattr(argument, "_fields"):
            return "[" + ", ".join(map(self._text, argument)) + "]"
        if type(argument) in _PLAIN:
            return repr(argument)
        return self._constant(argument)
