"""Runs a traced unit as a node of autograd's graph: forward's program, and backward's for the gradients that come in.

One node returns its gradients together, and all those of a unit's parameters would be alive at its end. If that matters, since
they are added to existing gradients or freed by a hook, the unit is a chain of nodes, linked by empty tensors: each returns the
gradients that its stretch of backward has computed.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from recollect._torch_dtensor import local_part, spec_of, spread
from recollect._torch_functions import goes_everywhere
from recollect._torch_parallel import runs_in_ddp
from recollect._torch_private import as_no_view, at_end_of_backward, below_autograd, disable_autocast, keeps_graph
from recollect.engine.content import glance_at
from recollect.engine.draws import refuse_draws
from recollect.engine.function_call import autocast_now
from recollect.engine.graph.code import backward_in_parts
from recollect.engine.graph.cut import IsKept, cut
from recollect.engine.graph.joint import TAKES_LIST
from recollect.engine.graph.program import Program
from recollect.engine.graph.trace import SpreadKind, Tangents, Trace
from recollect.engine.opcall import NO_MODES, Settings, current_settings
from recollect.engine.values import check_filled
from recollect.errors import ConfigError, MutatedValueError
from recollect.plans.paths import unit_words


class _Running(threading.local):
    """The path of the unit that runs on this thread, and whether a CUDA graph is captured: equal units share a trace."""

    path = ""
    is_captured = False


running = _Running()


class TracedUnit:
    """A unit that runs from a trace, under one plan, in calls like the traced one."""

    def __init__(self, trace: Trace, is_kept: IsKept) -> None:
        self.trace = trace
        self._is_kept = is_kept
        self._programs: dict[Tangents, Program] = {}
        # Backwards from fewer outputs need less; each may be the next one.
        self._most = self.program(trace.usual_tangents)
        # For the next forward: that of the last backward, which the next one will probably be like.
        self.latest = self._most
        self._all_inputs = range(len(trace.inputs))
        # Outputs that are no inputs, by position, with how DTensors among them are spread.
        outputs = enumerate(zip(trace.outputs, trace.output_specs, strict=True))
        self.made = [(index, spec) for index, (tensor, spec) in outputs if tensor not in trace.passed_on]
        # Views of all of an output before them, for which programs return that output; and what writes to it returned.
        places = [(one.storage, one.layout) for one in trace.outputs]
        self.views = [index for index, _ in self.made if places.index(places[index]) != index]
        # Those whose memory no input and no other output has: writing to them in place is allowed, as it is in eager mode.
        storages = Counter(one.storage for one in (*trace.inputs, *trace.outputs))
        alone = [index for index, _ in self.made if storages[trace.outputs[index].storage] == 1]
        self.own = [index for index in alone if trace.may_be_written(index)]
        self.views += [index for index in alone if index not in self.own]  # PyTorch refuses to write to these.
        self.own_views = [at for at, (index, _) in enumerate(self.made) if index in self.own and trace.is_view[index]]
        self.no_grad = [place for place, (index, _) in enumerate(self.made) if not trace.outputs_need_grad[index]]
        self.parameters = [i for i in self._all_inputs if trace.needs_grad[i] and trace.is_parameter[i]]
        self.stretches = self.latest.cut.stretches()
        # By the paths of units that share this.
        self._last: dict[str, weakref.ref[_Call]] = {}
        # An input is given once for each gradient that eager mode adds up for it: the engine adds them, in its order. One that
        # eager mode has none for is not given: hooks for its gradient would be called.
        self._edges = [trace.num_edges[i] for i in self._all_inputs]
        self._given_inputs = [i for i, count in enumerate(self._edges) for _ in range(count)]

    def program(self, tangents: Tangents) -> Program:
        if tangents not in self._programs:
            self._programs[tangents] = Program.of(cut(self.trace, self.trace.backward(tangents), self._is_kept))
        return self._programs[tangents]

    def run(self, *arguments: Any) -> Sequence[Any]:
        """Run forward on what the traced graph reads; raise `OtherMemoryError` if the call cannot run from this trace."""
        trace = self.trace
        inputs = trace.tensors_of(arguments)
        parts = trace.parts_of(inputs)
        trace.check_fits(inputs, parts)
        call = _Call(self, parts)
        before, self._last[call.path] = self._last.get(call.path), weakref.ref(call)
        if len(self.stretches) > 1 and self._lets_go(inputs, None if before is None else before()):
            made = self._chained(call, inputs)
        else:
            made = _Node.apply(call, *[inputs[index] for index in self._given_inputs])  # type: ignore[no-untyped-call]
        if self.own_views:  # As in eager mode, a gradient from before a write gets the strides of what it is for.
            made = [torch.ops.aten.alias(one) if at in self.own_views else one for at, one in enumerate(made)]
        passed_on = trace.passed_on
        if not passed_on and len(made) == len(trace.places):
            return made
        found = iter(made)
        outputs = [inputs[passed_on[one]] if one in passed_on else next(found) for one in trace.outputs]
        return [outputs[index] for index in trace.places]

    def _lets_go(self, inputs: Sequence[Any], before: _Call | None) -> bool:
        """Whether gradients of parameters are freed as soon as they are computed, judging by the previous call."""
        if runs_in_ddp() or (before is not None and before.saved is not None):
            return True  # Backward of that call will have made gradients.
        for index in self.parameters:
            parameter = inputs[index]
            if parameter.grad is not None or parameter._post_accumulate_grad_hooks:
                return True
        return False

    def _chained(self, call: _Call, inputs: Sequence[Any]) -> Any:
        link: Any = None
        call.link = call.inputs[self.parameters[0]].new_empty(0)
        for stretch in reversed(range(len(self.stretches))):
            own = [inputs[i] for i in self.stretches[stretch] for _ in range(self._edges[i])]
            link = _link(call, stretch, link, *own)
        return link

    def _given(self, call: _Call, gradients: list[Any]) -> tuple[list[Any], Program]:
        """Return the inputs of backward's program, which are released elsewhere, and the program."""
        tangents: list[Any] = [None] * len(self.trace.outputs)
        for place, (index, spec) in enumerate(self.made):
            if (gradient := gradients[place]) is not None:
                tangents[index] = gradient.stride()
                if spec is not None:
                    part = gradients[place] = local_part(gradient)
                    tangents[index] = SpreadKind(tuple(part.shape), part.stride(), spec_of(gradient))
        kind = (*tangents, autocast_now(self.trace.devices))
        program = call.program if kind == call.program.cut.kind else self.program(kind)
        self.latest = program if program.needs == self._most.needs else self._most
        given = [one for one in gradients if one is not None] + call.take(program)
        gradients.clear()
        return given, program

    def backward(self, call: _Call, gradients: list[Any]) -> tuple[Any, ...]:
        given, program = self._given(call, gradients)
        found = call.as_in_forward(program.backward, given)
        return None, *self._in_order(found, program, self._all_inputs)

    def backward_of(self, call: _Call, stretch: int, gradients: list[Any], *, is_half: bool) -> tuple[Any, ...]:
        """Run a stretch of backward; the first one begins with gradients, the others where the one before ended.

        Pipelines that split backward keep the graph in the first half, and in the second one ask for single stretches.
        """
        if stretch == 0 and not call.began_with_same(gradients):
            call.began_with = list(gradients) if is_half else []
            call.found = {}
            self._begin(call, gradients)
        elif stretch != call.next_stretch and stretch not in call.found:
            self._begin(call, list(call.began_with) or [None] * len(self.made))
            call.found = {number: self._stretch(call, number) for number in range(len(self.stretches))}
        return call.found.pop(stretch) if stretch in call.found else self._stretch(call, stretch)

    def _begin(self, call: _Call, gradients: list[Any]) -> None:
        given, program = self._given(call, gradients)
        if program.in_parts is None:
            program.in_parts = backward_in_parts(program.cut, program.cut.parts(self.stretches))
        call.handed_over = []
        call.running = program.in_parts(given, call.handed_over), program
        call.next_stretch = 0
        if keeps_graph():
            at_end_of_backward(call.pause)

    def _stretch(self, call: _Call, stretch: int) -> tuple[Any, ...]:
        generator, program = call.running
        call.as_in_forward(next, generator)
        call.next_stretch += 1
        link = None if stretch + 1 == len(self.stretches) else call.link
        return None, None, link, *self._in_order(call.handed_over, program, self.stretches[stretch])

    def _in_order(self, found: list[Any], program: Program, inputs: Iterable[int]) -> list[Any]:
        """Return the gradients of inputs, once for each time that a node was given them; empty the list."""
        ordered: list[Any] = []
        specs = program.cut.specs
        for index in inputs:
            addends = program.cut.gradients[index]
            made = found[: len(addends)]
            del found[: len(addends)]
            if specs:
                made = [spread(one, specs.get((index, addend))) for one, addend in zip(made, addends, strict=True)]
            ordered += made + [None] * (self._edges[index] - len(addends))
        return ordered


class _Call:
    """One call of a unit, until its backward has run."""

    __slots__ = (
        "__weakref__",
        "began_with",
        "found",
        "handed_over",
        "inputs",
        "link",
        "next_stretch",
        "path",
        "program",
        "running",
        "saved",
        "seen",
        "settings",
        "unit",
    )

    def __init__(self, unit: TracedUnit, inputs: Sequence[Any]) -> None:
        self.unit = unit
        # Until forward has run.
        self.inputs = inputs
        self.path = running.path
        self.program = unit.latest
        self.settings: Settings = current_settings(NO_MODES)
        self.saved: list[Any] | None = None
        # The saved values among the unit's inputs and outputs, with versions and content: others may write to them.
        self.seen: list[tuple[torch.Tensor, int, bytes | int | None]] = []
        # Of a chain: an empty tensor; the backward that is running; and its results so far.
        self.link: Any = None
        self.running: Any = None
        self.next_stretch = 0
        self.handed_over: list[Any] = []
        # The gradients with which the first half of a backward began, and their results so far, by stretches.
        self.began_with: list[Any] = []
        self.found: dict[int, tuple[Any, ...]] = {}

    def began_with_same(self, gradients: list[Any]) -> bool:
        return 0 in self.found and all(one is before for one, before in zip(gradients, self.began_with, strict=True))

    def pause(self) -> None:
        """Let go of what an unfinished backward has computed: the next one begins again."""
        self.running, self.next_stretch = None, -1

    def as_in_forward(self, run: Callable[[Any], Any], given: Any) -> Any:
        """Run ops below autograd and autocast, under the settings of forward."""
        try:
            with below_autograd(), disable_autocast():
                now = current_settings(NO_MODES)
                if now is self.settings:
                    return run(given)
                with self.settings.applied(now):
                    return run(given)
        finally:
            torch._C._set_grad_enabled(False)

    def forward(self) -> tuple[torch.Tensor, ...]:
        unit, program, inputs = self.unit, self.program, self.inputs
        self.inputs = ()
        if running.is_captured:
            for op in program.cut.draws:
                # The last write to its memory decides whether that is kept.
                memory = op.written.union(result.storage for result in op.outputs if result is not None)
                writes = [one.name for one in unit.trace.ops if not memory.isdisjoint(one.written)]
                refuse_draws(op.facts, op.func, op.args, op.kwargs, self.path, [op.name, *writes][-1])
        with below_autograd(), disable_autocast():
            found = program.forward(list(inputs))
            for index in unit.own:
                if found[index]._is_view():
                    found[index] = as_no_view(found[index])
        saved = self.saved = found[len(unit.trace.outputs) :]
        seen = [inputs[index] for index in program.read]
        if program.returned:
            # An output itself would hold its node, which holds the saved values, in a cycle.
            aliases = {index: found[index].detach() for index in program.returned}
            for index, of_output in program.shown:
                saved[index] = aliases[of_output]
            seen += aliases.values()
        self.seen = [
            (tensor, tensor._version, glance_at(tensor) if is_again and not running.is_captured else None)
            for tensor, is_again in zip(seen, program.again, strict=True)
            if not tensor.is_inference()
        ]
        for index in unit.views:
            found[index] = torch.ops.aten.alias(found[index])
        return tuple([spread(found[index], spec) for index, spec in unit.made])

    def take(self, program: Program) -> list[Any]:
        """Return the saved values for a program's backward; release them unless there may be one more."""
        saved = self.saved
        if saved is None:
            raise RuntimeError(
                f"backward ran a second time through {unit_words(self.path)}, and what it had saved is freed. Call the "
                "first backward with retain_graph=True."
            )
        for tensor, version, content in self.seen:
            check_filled(tensor, self.path)
            changes = tensor._version - version
            if changes or (content is not None and content != glance_at(tensor)):
                raise MutatedValueError(unit=self.path, module="", op="", shape=tuple(tensor.shape), changes=changes)
        if not keeps_graph():
            self.saved, self.seen = None, []
        elif program is self.program:
            saved = list(saved)
        return saved if program is self.program else program.pick(saved, self.program)


class _Node(torch.autograd.Function):
    boxed_grads_call = True

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs = call.forward()
        if call.unit.no_grad:
            ctx.mark_non_differentiable(*[outputs[index] for index in call.unit.no_grad])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.call.unit.backward(ctx.call, _listed(gradients, ctx.call))


class _Link(torch.autograd.Function):
    """One node of a chain. The one that comes last in backward is made first; the one that comes first runs forward."""

    boxed_grads_call = True

    @staticmethod
    def forward(ctx: Any, call: _Call, stretch: int, link: Any, *inputs: torch.Tensor) -> Any:
        ctx.call, ctx.stretch = call, stretch
        ctx.set_materialize_grads(False)
        if stretch:
            return call.link.detach()
        outputs = call.forward()
        if call.unit.no_grad:
            ctx.mark_non_differentiable(*[outputs[index] for index in call.unit.no_grad])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        is_half = ctx.stretch == 0 and keeps_graph() and not goes_everywhere(ctx)
        return ctx.call.unit.backward_of(ctx.call, ctx.stretch, _listed(gradients, ctx.call), is_half=is_half)


# As `_Link.apply`, which first looks among the arguments for leftovers of `torch.func`: 4 us for each link.
_link: Any = super(torch.autograd.Function, _Link).apply


def _listed(gradients: Any, call: _Call) -> list[Any]:
    """Return incoming gradients in a list that nothing else holds."""
    if torch.is_grad_enabled():
        raise ConfigError(
            settings={"create_graph": True},
            reason=f"{unit_words(call.path)} runs from a trace, which has no second derivatives",
            advice="Use the engine 'tape' for it, or leave it out of the plan.",
        )
    return gradients[0] if TAKES_LIST else list(gradients)
