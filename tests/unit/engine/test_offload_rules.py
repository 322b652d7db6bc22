"""Who waits for whom when values are copied to host memory and back: the eight rules of `engine/offload/carriers.py`.

Copies run in streams that check each access to memory (`clocked_streams.py`), and each rule that is left out has to be found.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect
from clocked_streams import ClockedCarrier, ClockedStream
from gradients import assert_same_gradients, gradients
from offload_programs import carried_by, plain_step, program, random_plan, seen_names
from recollect.engine.offload import pool
from recollect.engine.offload.carriers import Host
from recollect.engine.offload.offloaded import Offloaded
from recollect.engine.values import laid_out
from recollect.errors import MutatedValueError
from tiers import long_but

pytestmark = [
    pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated"),
    # Writes to what cannot be recomputed are asked for under plans that offload it alone.
    pytest.mark.filterwarnings("ignore::recollect.errors.PlanMismatchWarning"),
]

SIZE = 16


class Trouble(Exception):
    """Bytes that are not those that were sent."""


def in_backward(run: Callable[[], None]) -> None:
    """Run something while autograd goes backward, which uses graphs up."""
    x = torch.zeros(1, requires_grad=True)
    x.register_hook(lambda gradient: run())
    x.sum().backward()


def trips(carrier: ClockedCarrier, kind: type[Offloaded]) -> None:
    """Send values away and back, in each way that needs one of the rules."""
    with carried_by(lambda: carrier):
        host = Host(torch.device("cpu"), 2 * SIZE * 4)

    def send(number: float) -> Offloaded:
        tensor = torch.full((SIZE,), number)
        slot = host.pool.take(SIZE * 4)
        assert slot is not None
        return kind(host, tensor, slot, ("layers.0", "mm"))

    def check(value: Offloaded, number: float) -> None:
        (tensor,) = value([], False)
        if not torch.equal(tensor, torch.full((SIZE,), number)):
            raise Trouble(f"expected {number} throughout, got {tensor}")

    def run() -> None:
        first = send(1.0)
        first.leave()
        # What computes now has waited for nothing yet.
        carrier.streams.computing = carrier.streams.new_computing()
        first.come_back()
        # Into the slot that is still read.
        second = send(2.0)
        check(first, 1.0)
        second.leave()
        third = send(3.0)
        second.come_back()
        del second  # While it comes back,
        del third  # and while it is copied out.
        fourth = send(4.0)
        check(fourth, 4.0)
        fifth = send(5.0)
        # Its memory is used again by the stream that it was allocated on.
        carrier.streams.computing = carrier.streams.new_computing()
        fifth.leave()

    in_backward(run)
    assert host.pool.taken_bytes == 0


@pytest.mark.parametrize("seed", range(6))
def test_trips_are_without_races(seed: int) -> None:
    carrier = ClockedCarrier(seed)
    trips(carrier, Offloaded)
    assert carrier.streams.races == []


class BeginsAtOnce(ClockedCarrier):
    """Copies of one direction do not wait for what computes."""

    def __init__(self, seed: int, *, goes_out: bool) -> None:
        super().__init__(seed)
        self.goes_out = goes_out

    def begin(self, *args: Any, is_out: bool) -> Any:
        if is_out is not self.goes_out:
            return super().begin(*args, is_out=is_out)
        streams: Any = self.streams
        idle = ClockedStream(streams)
        streams.current = lambda device: idle
        try:
            return super().begin(*args, is_out=is_out)
        finally:
            del streams.current


class LeavesAtOnce(Offloaded):
    def leave(self, num_raised: int = 0) -> None:
        self._tensor = None


class IsUsedAtOnce(Offloaded):
    def _arrived(self) -> Tensor:
        self.come_back()
        arrived, self._arriving = self._arriving, None
        assert arrived is not None
        return laid_out(arrived, self._layout)


class IsFreedWhileItComesBack(Offloaded):
    def __del__(self) -> None:
        self._arriving = None
        super().__del__()


class IsFreedWhileItIsCopiedOut(Offloaded):
    def __del__(self) -> None:
        self._tensor = None
        super().__del__()


class ForgetsItsCopyOut(Offloaded):
    def come_back(self) -> None:
        if self._slot is not None:
            self._slot.copies = []
        super().come_back()


RULES: dict[str, tuple[Callable[[int], ClockedCarrier], type[Offloaded], str]] = {
    "1": (partial(BeginsAtOnce, goes_out=True), Offloaded, "a copy out begins before the value is there"),
    "2": (ClockedCarrier, LeavesAtOnce, "freed while a copy is under way"),
    "3": (partial(BeginsAtOnce, goes_out=False), Offloaded, "a copy back begins before room for it is there"),
    "4": (ClockedCarrier, IsUsedAtOnce, "freed while a copy is under way"),
    "5": (ClockedCarrier, Offloaded, "a copy out begins while another one reads the slot"),
    "6": (ClockedCarrier, IsFreedWhileItComesBack, "freed while a copy is under way"),
    "7": (ClockedCarrier, IsFreedWhileItIsCopiedOut, "freed while a copy is under way"),
    "8": (ClockedCarrier, ForgetsItsCopyOut, "a copy back begins while another one writes the slot"),
}


@pytest.mark.parametrize("seed", range(3), ids=["late", "soon", "at random"])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_is_left_out_is_found(rule: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make, kind, race = RULES[rule]
    carrier = make(seed)
    if rule == "5":
        cut = pool._cut
        monkeypatch.setattr(pool, "_cut", lambda *stretch: cut(*stretch)[:0])
    try:
        trips(carrier, kind)
    except Trouble:
        pass
    assert any(race in found for found in carrier.streams.races), carrier.streams.races


def num_copies_of(seed: int, *, writes_outside: bool) -> int:
    """Make two steps of a program under a random plan; return how many copies they made, none if there are no gradients."""
    model, data = program(seed, writes_outside=writes_outside)
    plain = plain_step(model, data)
    if plain is None:
        return 0
    plan = random_plan(seen_names(model, model.units, lambda: plain_step(model, data)), seed)
    carrier = ClockedCarrier(seed)
    with carried_by(lambda: carrier), recollect.apply(model, plan):
        for _ in range(2):
            try:
                assert_same_gradients(plain, gradients(model, data), f"program {seed}")
            except MutatedValueError:
                assert writes_outside
    assert carrier.streams.races == [], f"program {seed}"
    return carrier.streams.num_copies


@pytest.mark.parametrize("block", long_but(range(3), range(8)))
def test_random_programs_are_exact_and_without_races(block: int) -> None:
    """Half of them also write to what layers return, outside of them, where the tape does not see it."""
    found = [num_copies_of(seed, writes_outside=seed % 2 == 1) for seed in range(60 * block, 60 * block + 60)]
    assert sum(num > 0 for num in found) >= 25
    assert sum(found) > 250


def test_a_tensor_that_changes_its_layout_while_it_is_copied_out() -> None:
    """What `_unsafe_view` returns has a version of its own, which rises when the tensor is transposed in place."""
    assert num_copies_of(22018, writes_outside=False)
