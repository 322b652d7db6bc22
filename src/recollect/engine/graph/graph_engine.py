"""Implements the graph engine: runs units from traces, as straight-line programs of the ops that eager mode would run.

NOTE [ When a trace holds ]
1. Dynamo traces a unit into one graph, or not at all: code whose effects or branches it cannot see is not traced. Its guards
   decide at each call whether the trace holds: arguments, attributes, hooks, parameters, settings.
2. Guards do not see the methods of classes, nor the settings by which PyTorch chooses ops (`sdpa_kernel`); these are compared
   here.
3. The first call of each kind runs on the tape, and the trace must have its ops: the same names, shapes and strides, in order.
4. A call that fits no trace runs on the tape; the next one of its kind is traced again. After a few of these, and where a unit
   cannot be traced, it stays on the tape, with a warning that says why.
5. While a CUDA graph is captured nothing is traced: a call that fits no trace runs on the tape.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import nn

from recollect._torch_dtensor import spec_of
from recollect._torch_fsdp import gathers_inside
from recollect._torch_parallel import SPLITS_FUNCTIONS, runs_in_stage
from recollect._torch_private import (
    any_autocast_is_enabled,
    has_global_hooks,
    is_capturing,
    num_dispatch_modes,
    tree_leaves,
)
from recollect._torch_settings import op_choices
from recollect.engine.autocast_casts import keeps_casts, kept_casts
from recollect.engine.eager_forward import look_for_compiler
from recollect.engine.function_call import autocast_now
from recollect.engine.graph.code_names import check_code
from recollect.engine.graph.node import TracedUnit, running
from recollect.engine.graph.noting_tape import NotedOp, NotingTape, is_noted
from recollect.engine.graph.shared_memory import OtherMemoryError
from recollect.engine.graph.trace import Trace
from recollect.engine.opcall import NO_MODES, current_settings
from recollect.engine.own_checkpoints import running_unit
from recollect.engine.placed_forward import PlacedForward, compiled_by_user, placed_call, unit_modules
from recollect.engine.policy import ALL_KEPT, PlanPolicy
from recollect.engine.self_check import switched_off
from recollect.engine.tape_forwards import ScopeForward, look_for_hooks, plain_submodules, scopes_by_unit
from recollect.engine.values import is_dropped
from recollect.errors import ConfigWarning
from recollect.plans.action import Action
from recollect.plans.paths import unit_words
from recollect.programs.cut import UntraceableError, other_ops
from recollect.progress import stage
from recollect.tensors import tensors_in
from recollect.warning import warn_user

if TYPE_CHECKING:
    from recollect._torch_dynamo import TracedWhole
    from recollect.engine.graph.traced_op import TracedOp
    from recollect.engine.together import Agreement
    from recollect.plans.unit_plan import UnitPlan

# Kinds of calls that a unit is traced for, and calls that fit no trace, before it is left to the tape.
_MOST_KINDS: Final = 8
_MOST_MISSES: Final = 4

# A trace that takes longer is worth a warning.
_LONG_S = 60.0

Kind: TypeAlias = tuple[Any, ...]
"""PyTorch's settings, whether the module trains, what autocast casts to, integers that its code reads, and shapes, types and
layouts of tensors in a call."""


def graph_forwards(
    model: nn.Module, units: Mapping[str, UnitPlan], agreement: Agreement, host_bytes: int | None
) -> list[PlacedForward]:
    """Return forwards that run units from traces; units that recompute nothing run as before."""
    units = {path: unit for path, unit in units.items() if unit.recomputes_anything}
    modules = unit_modules(model, units)
    tape = NotingTape(PlanPolicy(units), agreement=agreement)
    scopes = scopes_by_unit(modules, tape)
    return [
        GraphForward(path, module, tape, scopes[path], tuple(units[path].actions.items()))
        for path, module in modules.items()
    ]


class _NotTracedError(Exception):
    """No trace fits a call, and none can be made for it."""


class _Tracing(threading.local):
    unit: GraphForward | None = None


_tracing = _Tracing()


def _unit(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


class GraphForward(PlacedForward):
    """Runs a unit from a trace, or on the tape.

    Args:
        actions: of its plan; units with equal ones may share traces.

    Attributes:
        why_not: why the unit stays on the tape; empty if it does not.
        num_traces: of all units of this process so far, with those that failed; Dynamo holds memory for each.
    """

    num_traces = 0

    def __init__(
        self, path: str, module: nn.Module, tape: NotingTape, scopes: list[ScopeForward], actions: Hashable = None
    ) -> None:
        super().__init__(module)
        self.path = path
        self.tape = tape
        self.why_not = "its user compiled it" if compiled_by_user(module) else ""
        self._scopes = scopes
        self._noted: dict[Kind, list[NotedOp]] = {}
        self._kind: Kind = ()
        self._has_traced: set[Kind] = set()
        self._num_misses = 0
        # By the settings of PyTorch's that decide which ops run, which guards do not see.
        self._traces: dict[Any, TracedWhole] = {}
        self._methods: list[tuple[Mapping[str, Any], str, Any]] = []
        # Those that autocast kept in the last call that ran on the tape.
        self._casts: Any = None
        # Units that may share traces.
        self._alike = type(module), path if actions is None else actions

    def take_off(self) -> None:
        super().take_off()
        for scope in self._scopes:
            scope.take_off()

    def tell_departures(self, departs: Callable[[str, str], object]) -> None:
        self.tape.tell_departures(departs)

    @placed_call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.has_looked:
            look_for_compiler(self)
            look_for_hooks()
        if not self.recomputes():
            return self.forward(*args, **kwargs)
        if (
            not self.why_not
            and not num_dispatch_modes()
            and not has_global_hooks()
            and not switched_off()
            and not torch.is_anomaly_enabled()  # It looks at the result of each op.
            and not self._reads_dropped(args, kwargs)
        ):
            tensors = tensors_in((args, kwargs))
            kind = self._kind_of(tensors)
            if any_autocast_is_enabled() and keeps_casts():
                self._look_at_casts(tensors, is_new=kind not in self._has_traced)
            if kind in self._noted:
                try:
                    return self._from_trace(kind, args, kwargs)
                except (_NotTracedError, OtherMemoryError):
                    self._noted.pop(kind, None)
                gc.collect(1)  # What Dynamo leaves of what it cannot trace holds tensors, too.
            if not self.why_not:
                return self._on_tape(args, kwargs, note=kind)
        return self._on_tape(args, kwargs)

    def _kind_of(self, tensors: Sequence[torch.Tensor]) -> Kind:
        autocast = autocast_now({one.device.type for one in tensors}) if any_autocast_is_enabled() else ()
        settings = current_settings(NO_MODES).values + op_choices()
        read = self.tape.numbers_read(self._alike, tensors)
        return (
            settings,
            self.module.training,
            autocast,
            read,
            *[(one.shape, one.dtype, spec_of(one)) for one in tensors],
        )

    def _look_at_casts(self, tensors: Sequence[torch.Tensor], *, is_new: bool) -> None:
        """Leave the unit to the tape if others may read the casts that autocast keeps: a traced unit makes its own."""
        casts = kept_casts(next(self.module.parameters(), torch.empty(0)).device)
        if any(one.is_leaf and one.requires_grad for one in tensors):
            self._leave_to_tape("autocast keeps the cast of its input for all that read it")
        elif is_new and self._shares_parameters():
            self._leave_to_tape("autocast keeps the cast of a parameter that other modules have, too")
        elif casts is self._casts:
            self._leave_to_tape(
                "it is called several times under one autocast, which keeps the casts of its parameters"
            )
        self._casts = casts

    def _shares_parameters(self) -> bool:
        others = self.applied.model.named_modules(memo={self.module})  # With those inside it that others hold, too.
        shared = {one for _, part in others for one in part.parameters(recurse=False)}
        return not shared.isdisjoint(self.module.parameters())

    def _from_trace(self, kind: Kind, args: Any, kwargs: Any) -> Any:
        """Run the unit as traced; trace it first if no trace fits; raise `_NotTracedError` if it cannot be."""
        if any(names.get(name) is not method for names, name, method in self._methods):
            self._leave_to_tape("a method of one of its classes was replaced")
            raise _NotTracedError
        running.path, running.is_captured = self.path, is_capturing()
        call = self.forward, args, kwargs
        traces = self._traces.get(kind[0]) if kind in self._has_traced else None
        run = None if traces is None else traces.run_of(*call)
        if run is None and running.is_captured:
            raise _NotTracedError
        if run is not None:
            with running_unit():
                return run(*call)
        if traces is not None:
            self._num_misses += 1
            if self._num_misses > _MOST_MISSES:
                differs = f"{traces.what_differs(*call)!r} did not hold in the last one"
                self._leave_to_tape(f"its calls differ, and each would have to be traced: {differs}")
                raise _NotTracedError
        elif kind[0] not in self._traces and (run := self._run_of_another(kind, call)):
            self._remember(kind)
            with running_unit():
                return run(*call)
        return self._traced(kind, call)

    def _run_of_another(self, kind: Kind, call: Any) -> Callable[..., Any] | None:
        """Take over the traces of an equal unit under an equal plan if one fits this call; return its runner."""
        for reference in self.tape.traced.get(self._alike, ()):
            other: GraphForward | None = reference()
            traces = None if other is None else other._traces.get(kind[0])
            if other is None or traces is None or other._noted.get(kind) != self._noted[kind]:
                continue
            if run := traces.run_of(*call):
                self._traces[kind[0]] = traces
                return run
        return None

    def _traced(self, kind: Kind, call: Any) -> Any:
        from recollect import _torch_dynamo as dynamo

        if gathers_inside(self.module):
            self._leave_to_tape("FSDP shards modules inside it, and gathers their parameters in between")
            raise _NotTracedError
        traces = self._traces.get(kind[0])  # Other threads may leave the unit to the tape.
        if traces is None:
            traces = self._traces[kind[0]] = dynamo.TracedWhole(_unit, _backend)
            self.tape.traced.setdefault(self._alike, []).append(weakref.ref(self))
        self._kind = kind
        GraphForward.num_traces += 1
        begin = perf_counter()
        try:
            with stage(f"tracing {unit_words(self.path)}"), dynamo.tracing_as_eager() as read, running_unit():
                _tracing.unit = self
                output = traces.trace(*call)
        except Exception as error:
            if not dynamo.raised_by_tracing(error):
                raise
            # One that was traced before, or reads numbers, may have changed: its next call on the tape shows it.
            if kind not in self._has_traced and not (read and self._alike not in self.tape.reads_numbers):
                self._leave_to_tape(dynamo.first_line(error))
            self._has_traced.discard(kind)
            raise _NotTracedError from error
        finally:
            _tracing.unit = None
            if read:
                self.tape.reads_numbers.add(self._alike)
        seconds = perf_counter() - begin
        if seconds > _LONG_S:
            warn_user(
                f"recollect: tracing {unit_words(self.path)} took {seconds:.0f} s. To train without that, plan it with "
                "engine='tape'.",
                ConfigWarning,
            )
        self._remember(kind)
        return output

    def _remember(self, kind: Kind) -> None:
        self._has_traced.add(kind)
        kinds = {base for part in self.module.modules() for base in type(part).__mro__} - {nn.Module, object}
        self._methods = [
            (vars(kind_of), name, method)
            for kind_of in kinds
            for name, method in vars(kind_of).items()
            if callable(method) or isinstance(method, (property, classmethod, staticmethod))
        ]

    def _reads_dropped(self, args: Any, kwargs: Any) -> bool:
        """Whether it gets a value that a different unit drops and the tape recomputes: a trace would hold it."""
        plan = self.applied.plan
        if plan is None or not plan.drops_outputs:
            return False
        return any(map(is_dropped, tree_leaves((args, kwargs))))

    def _on_tape(self, args: Any, kwargs: Any, note: Kind | None = None) -> Any:
        for scope in self._scopes:
            scope.applied = self.applied
            scope.put()
        try:
            with running_unit(), self.tape.noting(is_on=note is not None) as noted:
                output = self.tape.run(self.path, self.forward, args, kwargs)
        finally:
            for scope in reversed(self._scopes):
                if not self.why_not or scope.is_shared:  # Dynamo could not trace it in other units.
                    scope.take_off()
        if note is not None:
            if len(self._noted) >= _MOST_KINDS:
                self._leave_to_tape(
                    f"its arguments come in more than {_MOST_KINDS} shapes{' or contents' if note[3] else ''}"
                )
            else:
                self._noted[note] = noted
        return output

    def _leave_to_tape(self, why_not: str) -> None:
        self.why_not = why_not
        self._traces, self._noted = {}, {}
        told = vars(self.applied).setdefault("told_why_not", set())
        key = type(self.module), why_not
        if key not in told:
            told.add(key)
            warn_user(
                f"recollect: {unit_words(self.path)}, and others like it, run on the tape, exactly but with more Python around "
                f"each op: {why_not}. To have them run from traces, take that out of their forward; to stay with the tape "
                "without this warning, plan them with engine='tape'.",
                ConfigWarning,
            )

    def traced(self, graph: Any, inputs: Any) -> TracedUnit:
        """Return the unit as in Dynamo's graph of it, if its ops are those that ran on the tape."""
        if not SPLITS_FUNCTIONS and runs_in_stage():
            raise UntraceableError(
                "a stage of a pipeline may split its backward, which takes traces from torch 2.13 on only"
            )
        check_code(self.module)
        trace = Trace(graph, inputs, self._scopes_of(graph))
        if trace.shares_casts():
            raise UntraceableError(
                "it turns autocast on where a block around it has it off, and keeps the casts of its weights"
            )
        leaves = [one for one in tensors_in(inputs) if one.is_leaf and one.requires_grad]
        if any_autocast_is_enabled() and keeps_casts() and not set(self.module.parameters()).issuperset(leaves):
            raise UntraceableError(
                "it reads tensors that need gradients besides its parameters; autocast keeps their casts"
            )
        noted = self._noted[self._kind]
        found = [NotedOp.of(op.scope, op.facts.name, op.layouts) for op in trace.ops if is_noted(op.facts)]
        if found != noted:
            raise UntraceableError(other_ops(found, noted))
        # Dynamo holds it until the traced code is gone, which this object holds: it must not hold this object.
        return TracedUnit(trace, functools.partial(_is_kept, self.tape, self.path))

    def _scopes_of(self, graph: Any) -> dict[str, str | None]:
        """Return the path of the module, as the tape names it, in which each node of a graph was traced."""
        from recollect._torch_dynamo import paths_around

        names: dict[int, str | None] = {id(scope.module): scope.names[self.path] for scope in self._scopes}
        names[id(self.module)] = None
        # The tape names no module that came after the plan. What the user compiled has names here that the tape never gives.
        for path, module in plain_submodules(self.module):
            around = self.module.get_submodule(path.rpartition(".")[0])
            names.setdefault(id(module), names[id(around)])
        return paths_around(graph.graph, self.module, names)


def _is_kept(tape: NotingTape, path: str, op: TracedOp, index: int) -> bool:
    if op.count < 0 or op.keeps:
        return True
    key = path, op.scope, op.facts.name
    actions = tape.op_actions(key, op.count, op.facts, True)
    tape.tell(key, op.count, op.facts, [output is not None for output in op.outputs])
    if actions is ALL_KEPT:
        return True
    return (actions[index] if len(actions) > 1 else actions[0]) is not Action.RECOMPUTE


def _backend(graph: Any, inputs: Any) -> Callable[..., Any]:
    assert _tracing.unit is not None
    return _tracing.unit.traced(graph, inputs).run
