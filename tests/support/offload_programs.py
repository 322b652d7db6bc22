"""Random small programs under random plans that keep, recompute and offload, and what a step of them gives."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from blocks import Stack
from gradients import Step, assert_same_gradients, gradients
from offload_plans import random_trip
from programs import FAMILIES, ROWS, WIDTH, Chain, Instruction, Program, Recipe
from recollect.engine.offload.carriers import CARRIERS, Carrier, ThreadCarrier
from recollect.engine.offload.flight import Offload
from recollect.engine.offload.pool import Slot
from recollect.engine.placed_forward import Applied
from recollect.engine.tape import Tape
from recollect.engine.tape_forwards import UnitForward, tape_forwards
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.trip import Trip
from recollect.plans.unit_plan import UnitPlan

# Few that write in place: after those that do so to what autograd saved, there are no gradients.
OFTEN = (*FAMILIES[:-1] * 3, FAMILIES[-1])


def program(seed: int, *, writes_outside: bool = False) -> tuple[Chain, Tensor]:
    """A chain of up to three small layers, some of which may be the same, and its input."""
    rng = random.Random(seed)

    def instruction() -> Instruction:
        op = rng.choice(sorted(rng.choice(OFTEN)))
        return Instruction(op, rng.randrange(12), rng.randrange(12), rng.randrange(6))

    programs = tuple(
        Program(tuple(instruction() for _ in range(rng.randint(2, 12))), rng.randint(-6, -1), rng.randint(-6, -1))
        for _ in range(rng.randint(1, 3))
    )
    calls = tuple(rng.randrange(3) for _ in range(rng.randint(1, 4)))
    torch.manual_seed(seed)
    return Chain(Recipe(programs, calls, writes_outside)), torch.randn(ROWS, WIDTH)


def plain_step(model: nn.Module, data: Any) -> Step | None:
    """A step without a plan; None if autograd refuses it, as it does where a saved tensor is written to."""
    try:
        return gradients(model, data)
    except RuntimeError:
        return None


class _Names:
    """A policy that recomputes all, and remembers what it is asked for."""

    drops_outputs = False

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}

    def action(self, unit_path: str, value_name: str) -> Action:
        self.names.setdefault(unit_path, []).append(value_name)
        return Action.RECOMPUTE

    def acts_in(self, unit_path: str, module_path: str) -> bool:
        return True

    def output_action(self, unit_path: str) -> Action:
        return Action.KEEP


def seen_names(model: nn.Module, units: list[str], run: Callable[[], object]) -> dict[str, list[str]]:
    """The names of the values that the tape sees in units while something runs."""
    names = _Names()
    tape = Tape(names, offload=Offload(model, {}, None))
    with Applied(model, tape_forwards(model, units, tape), None):
        run()
    return names.names


def random_plan(names: dict[str, list[str]], seed: int) -> Plan:
    """One of three actions for each value, and a random trip for each that is offloaded."""
    rng = random.Random(seed)
    units = {}
    for path, values in names.items():
        actions = {name: rng.choice(["keep", "recompute", "offload", "offload"]) for name in dict.fromkeys(values)}
        trips = {name: random_trip(rng) for name, action in actions.items() if action == "offload"}
        units[path] = UnitPlan(actions, output=rng.choice(["keep", "keep", "recompute"]), trips=trips)
    return Plan(units)


def plan_that_offloads(names: dict[str, list[str]], trip: Trip = Trip(), host_bytes: int | None = None) -> Plan:  # noqa: B008
    units = {
        path: UnitPlan(dict.fromkeys(values, "offload"), trips=dict.fromkeys(values, trip))
        for path, values in names.items()
    }
    return Plan(units, predicted_host_bytes=host_bytes)


class Trial:
    """A model with dropout, its gradients without a plan, and plans that offload all that its units compute."""

    def __init__(self, rows: int, width: int, depth: int, dropout: float) -> None:
        torch.manual_seed(0)
        self.model = Stack(width, depth, dropout)
        self.data = torch.randn(rows, width)
        self.plain = gradients(self.model, self.data, torch.sum)
        self.names = seen_names(self.model, self.model.layers, self.step)

    def step(self) -> None:
        gradients(self.model, self.data, torch.sum)

    def check(self) -> None:
        assert_same_gradients(self.plain, gradients(self.model, self.data, torch.sum))

    def gradients(self, data: Tensor) -> list[Tensor]:
        torch.manual_seed(1)
        return list(torch.autograd.grad(self.model(data).sum(), list(self.model.parameters())))

    def plan(self, trip: Trip = Trip(), host_bytes: int | None = None) -> Plan:  # noqa: B008
        return plan_that_offloads(self.names, trip, host_bytes)


class Sizes(ThreadCarrier):
    """Remembers the sizes of what it copies out."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def copy_out(self, source: Tensor, slot: Slot) -> Future[None]:
        self.sizes.append(len(source))
        return super().copy_out(source, slot)


def offload_of(applied: Applied) -> Offload:
    found = next(f.tape.offload for f in applied._forwards if isinstance(f, UnitForward))
    assert found is not None
    return found


@contextmanager
def carried_by(make: Callable[[], Carrier]) -> Iterator[None]:
    """Have plans that are applied here copy in another way."""
    before = CARRIERS["cpu"]
    CARRIERS["cpu"] = make
    try:
        yield
    finally:
        CARRIERS["cpu"] = before
