"""Implements the region engine: re-runs whole modules in backward, for modules that the tape cannot see into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from recollect._torch_private import function_mode_stack, uncompiled
from recollect.engine.eager import look_for_compiler
from recollect.engine.placed_forward import PlacedForward
from recollect.engine.region_draws import RegionDraws
from recollect.engine.region_state import ModuleState, WrittenBuffers
from recollect.engine.self_check import SwitchedOff, switched_off
from recollect.engine.settings import current_settings
from recollect.engine.unit_modules import unit_module

if TYPE_CHECKING:
    from recollect.engine.agreement import Agreement
    from recollect.plans.unit_plan import UnitPlan

__all__ = ["RegionEngine"]


class RegionEngine:
    """Runs each unit under `torch.utils.checkpoint`; `recollect.simulation.region_schedule` simulates the cost."""

    def apply(self, model: nn.Module, units: Mapping[str, UnitPlan], agreement: Agreement) -> list[PlacedForward]:
        """Return forwards that re-run each unit as a whole."""
        return [_RegionForward(path, unit_module(model, path)) for path in units]


class _RegionForward(PlacedForward):
    """Runs a unit, keeps only its inputs, and runs it again when backward needs what it saved.

    Non-reentrant, so that it works even if no input requires grad or only some outputs are used. The module's Python
    runs twice: its buffers, attributes and random numbers are what they were (`region_state.py`, `region_draws.py`), but
    what it does outside itself happens twice. That is why the tape is the preferred engine.
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
        runs = _Runs(self.written)
        return checkpoint(
            self.forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=runs.contexts, **kwargs
        )


class _Runs:
    """The runs of one call of a region: what the first notes for the second."""

    def __init__(self, written: WrittenBuffers) -> None:
        self.state = ModuleState(written)
        self.draws = RegionDraws()
        self.settings = current_settings()
        self.function_modes = function_mode_stack()

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return what the first and the second run happen in."""
        return self._first(), _Reusable(self)

    @contextmanager
    def _first(self) -> Iterator[None]:
        with self.draws.first():
            yield
        self.state.forward_has_run()

    @contextmanager
    def second(self) -> Iterator[None]:
        """Run again as in the first run."""
        with ExitStack() as stack:
            # A function mode steps aside while it handles the call of `backward`.
            for mode in self.function_modes:
                if mode not in function_mode_stack():
                    stack.enter_context(mode)
            stack.enter_context(self.settings.applied(current_settings()))
            stack.enter_context(self.state.restored())
            stack.enter_context(self.draws.second())
            yield


class _Reusable:
    """Enters a new second run each time: there is another if backward runs twice over one graph."""

    def __init__(self, runs: _Runs) -> None:
        self._runs = runs

    def __enter__(self) -> None:
        self._run = self._runs.second()
        self._run.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._run.__exit__(*error)
