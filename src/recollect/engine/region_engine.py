"""Implements the region engine: re-runs whole modules in backward, for modules that the tape cannot see into.

NOTE [ What the second run sees ]
1. Put back: the tables of the module and of those below it (parameters, buffers, submodules, hooks, in their order),
   `training` and other attributes, with containers inside one another and generators of random numbers; `requires_grad`
   and the memory of parameters, and of tensors that are attributes or inside arguments, as it was before a write that a
   dispatch mode sees; containers among the arguments (all in `region_state.py`); random numbers of PyTorch, Python and
   NumPy (`region_draws.py`); autocast, function modes, context variables, default dtype, determinism and other switches
   (`opcall.py`).
2. Refused in backward, with `MutatedValueError`: a write to any of these tensors after the call, or unseen during it,
   if it raised the version or is compared (`content.py`). For arguments, PyTorch raises its own error.
3. Not put back, and wrong in silence where forward depends on it: globals, attributes of classes, variables of
   closures, attributes of objects that are no modules, iterators, hooks of all modules (`register_module_forward_hook`),
   local variables of another thread than backward's, and the content of larger tensors that is written to through
   `.data` between the runs, or through NumPy. Forward's effects on all of these happen twice. `verify` finds it.
4. Left to whoever put it there: parameters of FSDP2, of ZeRO-3, and of `DistributedDataParallel` in mixed precision.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recollect._torch_private import function_mode_stack, uncompiled
from recollect.engine.draws import HostDraws, RegionDraws
from recollect.engine.eager_forward import look_for_compiler
from recollect.engine.opcall import current_settings
from recollect.engine.own_checkpoints import running_unit
from recollect.engine.placed_forward import PlacedForward, unit_module
from recollect.engine.region_state import ModuleState, WrittenBuffers
from recollect.engine.self_check import SwitchedOff, switched_off
from recollect.engine.together import Agreement
from recollect.plans.unit_plan import UnitPlan


def region_forwards(
    model: nn.Module, units: Mapping[str, UnitPlan], agreement: Agreement, host_bytes: int | None
) -> list[PlacedForward]:
    """Return forwards that run each unit again as a whole; `recollect.simulation.simulate` simulates the cost."""
    return [_RegionForward(path, unit_module(model, path)) for path in units]


class _RegionForward(PlacedForward):
    """Runs a unit, keeps only its inputs, and runs it again when backward needs a saved value.

    Non-reentrant, so that it works even if no input requires grad or only some outputs are used. The module's Python
    runs twice, and so do its effects outside itself. That is why the tape is the preferred engine.
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__(module)
        self.written = WrittenBuffers(path, module)

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.recomputes() or switched_off() & {SwitchedOff.PLANS, SwitchedOff.RANDOM_OPS}:
            return self.forward(*args, **kwargs)
        if not self.has_looked:
            look_for_compiler(self)
        runs = _Runs(self.written, self.forward, (args, kwargs))
        with running_unit():
            return checkpoint(
                runs.run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=runs.contexts, **kwargs
            )


class _Runs:
    """The runs of one region call: the first one's notes for the second."""

    def __init__(self, written: WrittenBuffers, forward: Callable[..., Any], arguments: Any) -> None:
        self.forward = forward
        self.state = ModuleState(written, arguments)
        self.draws = RegionDraws()
        self.host_draws = HostDraws()
        self.settings = current_settings()
        self.function_modes = function_mode_stack()
        self.variables = copy_context()
        # The arguments of the second run, while it runs.
        self.arguments: Any = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run for the first or the second time; `checkpoint` holds the tensors that are arguments themselves."""
        if self.arguments is None:
            return self.forward(*args, **kwargs)
        positional, named = self.arguments
        held = [mine if isinstance(mine, torch.Tensor) else other for mine, other in zip(args, positional, strict=True)]
        return self.variables.copy().run(self.forward, *held, **named)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts for the first and second runs."""
        return self._first(), self

    @contextmanager
    def _first(self) -> Iterator[None]:
        with self.draws.first():
            yield
        self.state.forward_has_run()
        self.host_draws.forward_has_run()

    def __enter__(self) -> None:
        # A new one each time: backward may run twice over one graph.
        self._again = self._second()
        self._again.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._again.__exit__(*error)

    @contextmanager
    def _second(self) -> Iterator[None]:
        """Run again as in the first run."""
        with ExitStack() as stack:
            # Function modes step aside while they handle the call of `backward`.
            for mode in self.function_modes:
                if mode not in function_mode_stack():
                    stack.enter_context(mode)
            stack.enter_context(self.settings.applied(current_settings()))
            self.arguments = stack.enter_context(self.state.restored())
            stack.callback(setattr, self, "arguments", None)
            stack.enter_context(self.draws.second())
            stack.enter_context(self.host_draws.second())
            stack.enter_context(running_unit())
            yield
