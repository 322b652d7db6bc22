"""Implements the compile engine: runs units inside `torch.compile`, which keeps the values that the plan keeps.

Each unit is compiled by itself, into one graph: equal layers with equal plans share compiled code, and autograd releases
one unit's values after the other. If the user compiled the unit, or the model around it, tracing stops at the
unit, which then runs by this engine.

NOTE [ What a compiled unit does not do ]
A second backward over its graph, or one in two halves: compiled code reuses the memory of saved values. Modules inside that
FSDP2 gathers by themselves: one graph has no place for that. CUDA graphs: saved values live in their pool, and the peak is the
pool's. Compiled autograd: it compiles backward again, without the plan. Each raises an error that names it.

NOTE [ Gathered parameters ]
FSDP2 gathers a unit's parameters before its forward, frees their memory after it, and fills it again before its backward,
in a hook of what the unit returned. Compiled code saves these very parameters: it finds them filled, or an error is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from recollect._torch_fsdp import fully_sharded_parameters, gathers_inside
from recollect._torch_private import has_global_hooks, keeps_graph, leave_graph, untraced, without_compiler
from recollect.engine.placed_forward import PlacedForward, compiled_by_user, placed_call, unit_module, user_forward
from recollect.engine.values import check_filled
from recollect.errors import BudgetWarning, ConfigError, NotYetError, UnsupportedModelError
from recollect.plans.action import Action
from recollect.plans.paths import paths_above, unit_words
from recollect.plans.unit_plan import UnitPlan
from recollect.tensors import tensors_in
from recollect.warning import warn_user
from recollect.weak_map import WeakMap

if TYPE_CHECKING:
    from recollect._torch_compile import CompiledWhole
    from recollect.engine.compiled.partitioner import Partition, PlanPartitioner
    from recollect.engine.together import Agreement

_T = TypeVar("_T")


def compiled_forwards(
    model: nn.Module, units: Mapping[str, UnitPlan], agreement: Agreement, host_bytes: int | None
) -> list[PlacedForward]:
    """Return forwards that run units inside `torch.compile`; nothing is compiled before they are called."""
    forwards: list[PlacedForward] = []
    for path, unit in units.items():
        module = without_compiler(unit_module(model, path))
        if gathers_inside(module):
            raise NotYetError(
                settings={"engine": "compile"},
                needs=f"FSDP shards modules inside {unit_words(path)}, and one graph cannot gather their parameters",
                advice="Shard the unit as a whole with fully_shard, or use the engine 'tape' for it.",
            )
        check_compilers(model, path)
        forwards.append(CompiledForward(path, module, named_as_inside(unit.actions)))
    return forwards


def named_as_inside(by_name: Mapping[str, _T]) -> dict[str, _T]:
    """Return a unit's entries by names of values, without the wrapper that `torch.compile(module)` puts around it."""
    return {name.removeprefix("_orig_mod."): its for name, its in by_name.items()}


def compile_forward(
    forward: Callable[..., Any],
    actions: Mapping[str, Action] | None,
    *,
    on_partition: Callable[[Partition], None] | None = None,
    on_compile: Callable[[Any, Any], None] = lambda args, kwargs: None,
) -> Callable[..., Any]:
    """Return a function like a unit's forward that saves the values its plan keeps; it compiles when it is called.

    Equal modules with equal actions share compiled code.

    Args:
        forward: bound to a module; names of values leave out the module's path.
        actions: what happens to each value; None for PyTorch's own choice.
        on_partition: called with each cut; without it, code in a cache on disk is used without a cut.
        on_compile: called before a call that no compiled code fits, with its arguments and keywords.
    """
    # Here: it imports the compiler.
    from recollect._torch_compile import CompiledWhole
    from recollect.engine.compiled.partitioner import PlanPartitioner

    is_default = actions is None and on_partition is None
    partitioner = None if is_default else PlanPartitioner(actions, on_partition=on_partition)
    code = getattr(forward, "__code__", None)
    shared = {} if code is None or on_partition is not None else _shared.setdefault(code, {})
    if partitioner not in shared:
        shared[partitioner] = CompiledWhole(_run, {} if is_default else {"custom_partitioner_fn": partitioner})
    whole = shared[partitioner]

    def compiled(*args: Any, **kwargs: Any) -> Any:
        call = forward, args, kwargs, bool(has_global_hooks())
        run = whole.run_of(*call)
        if run is None:
            on_compile(args, kwargs)
        return (run or whole.trace)(*call)

    return compiled


# By the code of the compiled function, and who cuts its graph.
_shared: WeakMap[dict[PlanPartitioner | None, CompiledWhole]] = WeakMap()


def _run(forward: Callable[..., Any], args: Any, kwargs: Any, with_global_hooks: bool) -> Any:
    # To read it makes it a guard: Dynamo guards hooks of all modules only where there are some.
    return forward(*args, **kwargs) if with_global_hooks else forward(*args, **kwargs)


class CompiledForward(PlacedForward):
    """Runs a unit inside `torch.compile`."""

    def __init__(self, path: str, module: nn.Module, actions: Mapping[str, Action]) -> None:
        super().__init__(module)
        self.path = path
        self.actions = actions
        self._compiled: Callable[..., Any] | None = None
        self._compiled_from: Callable[..., Any] | None = None
        self._compiler: Any = None
        # The storages of parameters that FSDP2 gathers.
        self._gathered: set[int] = set()
        # Of the arguments in the first call; None once a warning said that others differ.
        self._shapes: tuple[torch.Size, ...] | None = ()

    @placed_call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the unit; compile it first, if no equal one was compiled with this plan."""
        leave_graph()
        if not self.recomputes():
            return self.forward(*args, **kwargs)
        # Code compiled from an earlier forward is not for a new one.
        if self._compiled is None or self._compiled_from != user_forward(self.forward):
            self._compiled = self._begin(args, kwargs)
        if self._compiler.has_new_settings():
            self._check_settings()
        try:
            output = self._compiled(*args, **kwargs)
        except self._compiler.ERRORS as error:
            raise _not_compiled(self.path, error) from error
        given = {tensor.grad_fn for tensor in tensors_in((args, kwargs))}  # It may return some of these.
        for node in {tensor.grad_fn for tensor in tensors_in(output)} - given:
            if node is not None:
                saved = getattr(node, "saved_tensors", ()) if self._gathered else ()
                read = [tensor for tensor in saved if tensor.untyped_storage()._cdata in self._gathered]
                node.register_prehook(partial(_before_backward, self.path, read))
        return output

    def _begin(self, args: Any, kwargs: Any) -> Callable[..., Any]:
        """Check the settings and how the unit was compiled, and return the function that compiles it when called."""
        from recollect import _torch_compile

        self._compiler = _torch_compile
        self._check_settings()
        check_compilers(self.applied.model, self.path)
        self._shapes = _shapes_of(args, kwargs)
        sharded = fully_sharded_parameters(self.applied.model)
        own = [parameter for parameter in self.module.parameters() if id(parameter) in sharded]
        self._gathered = {parameter.untyped_storage()._cdata for parameter in own}
        self._compiled_from = user_forward(self.forward)
        return compile_forward(self._compiled_from, self.actions or None, on_compile=self._look_at_shapes)

    def _check_settings(self) -> None:
        for setting, value, reason in self._compiler.settings_in_the_way():
            raise ConfigError(
                settings={setting: value},
                reason=f"{reason}, and {unit_words(self.path)} is compiled as a plan says",
                advice="Leave it at its default, or use the engine 'tape'.",
            )

    def _look_at_shapes(self, args: Any, kwargs: Any) -> None:
        if self._shapes in (None, _shapes_of(args, kwargs)):
            return
        self._shapes = None
        plan = self.applied.plan
        if plan is not None and plan.predicted_peak_bytes is not None:
            warn_user(
                f"recollect: {unit_words(self.path)} gets tensors of other shapes than in its first call, and is compiled "
                "again for them. The predicted peak holds for the shapes of the recorded step only.",
                BudgetWarning,
            )


# Not a method: a loss that outlives its model must not hold it.
@untraced
def _before_backward(path: str, read: Sequence[torch.Tensor], gradients: Any) -> None:
    for tensor in read:
        check_filled(tensor, path)
    if keeps_graph():
        raise ConfigError(
            settings={"retain_graph": True},
            reason=f"{unit_words(path)} is compiled as a plan says, and its backward uses up what it saved: it runs "
            "once over a graph, and not in two halves, as zero-bubble pipelines have it",
            advice="Run backward once, choose a different schedule, or use the engine 'tape' for this unit.",
        )


def _shapes_of(args: Any, kwargs: Any) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in tensors_in((args, kwargs)))


def check_compilers(model: nn.Module, path: str) -> None:
    """Raise an error if its user compiled a unit, or a module around it, in a way that this engine does not support."""
    for place in dict.fromkeys((path, "", *paths_above(path))):
        for by_user in compiled_by_user(unit_module(model, place)):
            # Here: it imports the compiler.
            from recollect._torch_compile import settings_of

            settings = settings_of(by_user)
            if settings is None and place == path:
                raise ConfigError(
                    settings={"engine": "compile"},
                    reason=f"{unit_words(path)} was compiled with a backend other than Inductor, which takes no plan",
                    advice="Compile it with Inductor, leave it uncompiled, or use the engine 'tape'.",
                )
            if settings is not None and settings.get("triton.cudagraphs"):
                raise ConfigError(
                    settings={"engine": "compile", "triton.cudagraphs": True},
                    reason=f"{unit_words(place, 'unit' if place == path else 'module')} was compiled in a mode with CUDA "
                    "graphs, whose pool would hold what it keeps",
                    advice='Compile it without mode="reduce-overhead" or "max-autotune", or use the engine \'tape\'.',
                )


def _not_compiled(path: str, error: BaseException) -> UnsupportedModelError:
    lines = [line.strip(" .") for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return UnsupportedModelError(
        f"cannot run {unit_words(path)} inside torch.compile, in one graph, as the plan says: {lines[0]}. Use the engine "
        f"'tape' for it, which needs no graph; or change what the compiler cannot trace: {type(error).__name__} has all of it."
    )
