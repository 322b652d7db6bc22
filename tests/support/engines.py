"""Runs the units of a model of the registry on the tape or from traces, under rules that name no values."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from contract_units import Model
from policies import Policy, Uniform
from recollect.applying import apply_policy
from recollect.engine.eager_forward import eager_forwards
from recollect.engine.graph.graph_engine import GraphForward
from recollect.engine.graph.noting_tape import NotingTape
from recollect.engine.placed_forward import Applied, unit_modules
from recollect.engine.tape_forwards import scopes_by_unit


class CountingTape(NotingTape):
    """Counts the calls that it has run."""

    num_calls = 0

    def run(self, unit_path: str, forward: Any, args: Any, kwargs: Any) -> Any:
        self.num_calls += 1
        return super().run(unit_path, forward, args, kwargs)


def applied(engine: str, model: Model, policy: Policy) -> Applied:
    return apply_policy(model, model.paths, policy) if engine == "tape" else traced(model, model.paths, policy)


def traced(model: nn.Module, paths: Sequence[str], policy: Policy) -> Applied:
    tape = CountingTape(policy)
    units = unit_modules(model, paths)
    scopes = scopes_by_unit(units, tape)
    # Units share traces if the policy tells them apart by nothing.
    forwards = [
        GraphForward(path, unit, tape, scopes[path], isinstance(policy, Uniform) or path)
        for path, unit in units.items()
    ]
    return Traced(model, [*forwards, *eager_forwards(model, paths, forwards)], None)


class Traced(Applied):
    """Still knows its forwards when it is removed."""

    def remove(self) -> None:
        forwards = self._forwards
        super().remove()
        self._forwards = forwards


def traced_forwards(handle: Applied) -> list[GraphForward]:
    return [forward for forward in handle._forwards if isinstance(forward, GraphForward)]


def num_tape_calls(handle: Applied) -> int:
    tape = traced_forwards(handle)[0].tape
    assert isinstance(tape, CountingTape)
    return tape.num_calls
