"""Copies that fail, are late or do not fit, and steps that end early: an error or the same gradients, and nothing is left."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from blocks import Computes
from clocked_streams import ClockedCarrier
from gradients import assert_same_gradients, gradients
from offload_programs import Trial, carried_by, offload_of
from recollect.engine.offload.carriers import StreamCarrier, ThreadCarrier
from recollect.engine.offload.pool import Slot
from recollect.errors import BudgetWarning, FreedValueError, MutatedValueError, OffloadError
from recollect.plans.plan import Plan
from recollect.plans.trip import Trip
from tiers import long_but

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts mappings as Linux lists them")

ROWS, WIDTH = 8, 16
# Of all values of a forward, and some.
HOST_BYTES = 1 << 16


def held(others: Collection[threading.Thread] = ()) -> tuple[int, int, int]:
    """File descriptors, mapped files and threads of this process, once threads of ours have ended but for these others."""
    # PyTorch holds a backward that failed until there is another one.
    torch.zeros(1, requires_grad=True).sum().backward()
    gc.collect()
    # A thread ends a moment after nobody needs it.
    end_s = time.monotonic() + 60
    while any("recollect" in thread.name for thread in {*threading.enumerate()}.difference(others)):
        if time.monotonic() > end_s:
            break
        gc.collect()
    return (
        sum(1 for _ in Path("/proc/self/fd").iterdir()),
        num_mapped("self", tempfile.gettempdir()),
        threading.active_count(),
    )


def num_mapped(process: object, folder: object) -> int:
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return sum(f" {folder}/" in line and line.endswith("(deleted)") for line in lines)


@pytest.fixture
def trial() -> Trial:
    return Trial(ROWS, WIDTH, 3, 0.2)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    # Checkpoint policies that offload have threads of their own as long as the process.
    others = threading.enumerate()
    before = held(others)
    yield
    assert held(others) == before


class Fails(ThreadCarrier):
    """The third copy of a direction fails, when it begins or while it runs."""

    def __init__(self, direction: str, when: str) -> None:
        super().__init__()
        self._direction, self._when, self._left = direction, when, 3

    def _copied(self, direction: str, copy: Callable[[], Future[None]]) -> Future[None]:
        self._left -= direction == self._direction
        if self._left or direction != self._direction:
            return copy()
        if self._when == "begins":
            raise OSError("the link is down")
        failed: Future[None] = Future()
        failed.set_exception(OSError("the link is down"))
        return failed

    def copy_out(self, source: Tensor, slot: Slot) -> Future[None]:
        return self._copied("to host memory", lambda: super(Fails, self).copy_out(source, slot))

    def copy_back(self, slot: Slot, target: Tensor) -> Future[None]:
        return self._copied("back", lambda: super(Fails, self).copy_back(slot, target))


@pytest.mark.parametrize("when", ["begins", "runs"])
@pytest.mark.parametrize("direction", ["to host memory", "back"])
def test_a_copy_that_fails_is_an_error_that_names_it(trial: Trial, direction: str, when: str) -> None:
    with (
        carried_by(lambda: Fails(direction, when)),
        recollect.apply(trial.model, trial.plan(host_bytes=HOST_BYTES)) as applied,
    ):
        host = offload_of(applied).host
        with pytest.raises(OffloadError) as caught:
            trial.step()
        error = caught.value
        assert error.direction == direction and error.unit in trial.names and error.name in trial.names[error.unit]
        message = f"offload: value {error.name!r} of unit {error.unit!r} could not be copied {direction}: OSError: the link is"
        assert str(error).startswith(message)
        trial.model.zero_grad()
        del error, caught
        gc.collect()
        assert host.pool.taken_bytes == 0
        trial.check()


def test_what_does_not_fit_stays_and_is_said_once(trial: Trial) -> None:
    applied = recollect.apply(trial.model, trial.plan(host_bytes=4096))
    with pytest.warns(
        BudgetWarning, match=r"host memory for the plan is full, so '.*' of 'blocks\.\d' stays"
    ) as caught:
        trial.check()
        trial.check()
    offload = offload_of(applied)
    assert offload.num_stayed > 2 and offload.host.pool.most_taken_bytes <= 4096
    assert len([one for one in caught if one.category is BudgetWarning]) == 1
    applied.remove()
    trial.check()


def test_host_memory_that_cannot_be_had_is_an_error(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(
        OffloadError, match="is not available .*; set TMPDIR to a folder with more room, or lower host_budget"
    ):
        recollect.apply(trial.model, trial.plan(host_bytes=2 * free))
    trial.check()


def test_memory_that_no_accelerator_can_be_told_of_is_an_error() -> None:
    """Without an accelerator there is none; with one there is not so much."""
    with pytest.raises(OffloadError, match="cannot be pinned .*; lower host_budget, raise the limit of locked memory"):
        StreamCarrier().host_memory(1 << 60)


def test_another_accelerator_than_cuda_has_its_streams() -> None:
    """In a process of its own, as PyTorch keeps an accelerator that it is told of: one without memory, which is refused."""
    code = """
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from recollect.engine.offload.carriers import Host, StreamCarrier, carrier_for
from recollect.errors import OffloadError
_setup_privateuseone_for_python_backend("pretend")
assert isinstance(carrier_for(torch.device("pretend:0")), StreamCarrier)
reasons = {"pretend:0": "64 bytes of the host's memory cannot be pinned", "meta": "accelerator, which is pretend"}
for device, reason in reasons.items():
    try:
        Host(torch.device(device), 64)
    except OffloadError as error:
        assert reason in str(error), error
    else:
        raise AssertionError(f"{device} was taken")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Late(ThreadCarrier):
    """Each copy begins 2 ms late."""

    def copy_out(self, source: Tensor, slot: Slot) -> Future[None]:
        self._out.submit(time.sleep, 2e-3)
        return super().copy_out(source, slot)

    def copy_back(self, slot: Slot, target: Tensor) -> Future[None]:
        self._back.submit(time.sleep, 2e-3)
        return super().copy_back(slot, target)


class Stop(Exception):
    """Ends a step."""


def raising(*_: Any) -> None:
    raise Stop


def in_forward(trial: Trial) -> None:
    hook = trial.model.blocks[1].down.register_forward_pre_hook(raising)
    try:
        trial.step()
    finally:
        hook.remove()


def in_the_loss(trial: Trial) -> None:
    raising(trial.model(trial.data))


def in_backward(trial: Trial) -> None:
    hook = trial.model.blocks[1].register_full_backward_hook(raising)
    try:
        trial.step()
    finally:
        hook.remove()


def nowhere(trial: Trial) -> None:
    trial.model(trial.data)


TRIPS = [Trip(), Trip(9, 1), Trip(3, 2, leaves_in_backward=True)]


@pytest.mark.parametrize("trip", TRIPS, ids=str)
@pytest.mark.parametrize("fault", [in_forward, in_the_loss, in_backward, nowhere])
def test_a_step_that_ends_early_leaves_nothing(trial: Trial, fault: Callable[[Trial], None], trip: Trip) -> None:
    # What calls outside of any plan share to offload is there for as long as the process.
    num_before = num_mapped("self", tempfile.gettempdir())
    with carried_by(Late), recollect.apply(trial.model, trial.plan(trip, HOST_BYTES)) as applied:
        host = offload_of(applied).host
        for _ in range(2):
            with suppress(Stop):
                fault(trial)
            trial.model.zero_grad()
            gc.collect()
            assert host.pool.taken_bytes == 0
            trial.check()
        assert num_mapped("self", tempfile.gettempdir()) == num_before + 1 and host.pool.taken_bytes == 0


@pytest.mark.parametrize("trip", TRIPS, ids=str)
def test_a_loop_that_never_goes_backward_keeps_nothing(trial: Trial, trip: Trip) -> None:
    with recollect.apply(trial.model, trial.plan(trip, HOST_BYTES)) as applied:
        pool = offload_of(applied).host.pool
        nowhere(trial)
        after_one = pool.most_taken_bytes
        for _ in range(20):
            nowhere(trial)
        assert pool.most_taken_bytes <= 2 * after_one
        assert sum(map(len, offload_of(applied)._flight.timetable._returning.values())) <= sum(
            map(len, trial.names.values())
        )


@pytest.mark.parametrize("trip", TRIPS, ids=str)
def test_a_plan_is_removed_or_another_one_applied_in_the_middle_of_a_step(trial: Trial, trip: Trip) -> None:
    def gradients_of(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(trial.model.parameters())))

    def loss() -> Tensor:
        torch.manual_seed(0)
        return trial.model(trial.data).sum()

    plain = gradients_of(loss())
    with carried_by(Late):
        applied = recollect.apply(trial.model, trial.plan(trip, HOST_BYTES))
        pool = offload_of(applied).host.pool
        first = loss()
        applied.remove()
        applied = recollect.apply(trial.model, trial.plan(Trip(2, 0), HOST_BYTES))
        second = loss()
        assert all(map(torch.equal, plain, gradients_of(first)))
        applied.remove()
        assert all(map(torch.equal, plain, gradients_of(second)))
        del first, second
    gc.collect()
    assert pool.taken_bytes == 0


@pytest.mark.parametrize("num_plans", long_but([100], [100, 1000]))
def test_plans_come_and_go_and_nothing_is_left(trial: Trial, num_plans: int) -> None:
    plans = [trial.plan(trip, HOST_BYTES) for trip in TRIPS]
    for number in range(num_plans):
        with recollect.apply(trial.model, plans[number % len(plans)]):
            if number % 3:
                loss = trial.model(trial.data).sum()
            if number % 2:
                loss = trial.model(trial.data).sum()
                loss.backward()
    trial.model.zero_grad()


_UNTIL_KILLED = """
import torch, recollect
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()), torch.nn.Linear(64, 1))
recollect.apply(model, Plan({"0": UnitPlan({"0.addmm": "offload"})}, predicted_host_bytes=1 << 20))
loss = model(torch.randn(64, 64)).sum()
print("in the middle", flush=True)
input()
"""


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _UNTIL_KILLED],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "in the middle\n"
        assert num_mapped(process.pid, tmp_path) == 1
        process.send_signal(signal.SIGKILL)
    assert [*tmp_path.iterdir()] == []


def product_unit() -> Computes:
    """Its product, which all can see, is read again for the `tanh`. [n, d] -> [n, d]."""

    def run(self: Any, hidden: Tensor) -> Any:
        self.product = (hidden @ self.weight).detach()
        return (self.product * self.weight[0]).tanh()

    return Computes(run, weight=nn.Parameter(torch.randn(WIDTH, WIDTH)), product=None)


@pytest.mark.parametrize("trip", [Trip(4, 3), Trip(1, 0, leaves_in_backward=True)], ids=["in time", "asked for early"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda product: product.add_(1), MutatedValueError, "was changed in place 1 time before backward used it"),
        (lambda product: product.untyped_storage().resize_(0), FreedValueError, "has no memory now"),
    ],
    ids=["written to", "freed"],
)
def test_a_change_out_of_sight_while_it_is_copied_is_an_error(
    change: Callable[[Tensor], object], error: type[Exception], message: str, trip: Trip
) -> None:
    """The product leaves when the fourth unit returns, or when backward comes to the second one; the third one reads it."""
    first, second, fourth = product_unit(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    third = Computes(
        lambda self, hidden: hidden + (first.product * self.weight).tanh(), weight=nn.Parameter(torch.randn(WIDTH))
    )
    model = nn.Sequential(first, second, third, fourth)
    actions = {"mul": "recompute", "tanh": "recompute", "add": "keep"}
    plan = Plan(
        {
            "0": recollect.UnitPlan({"mm": "offload", **actions}, trips={"mm": trip}),
            "1": recollect.UnitPlan({"addmm": "keep"}),
            "2": recollect.UnitPlan(actions),
            "3": recollect.UnitPlan({"addmm": "keep"}),
        }
    )
    with recollect.apply(model, plan):
        hidden = third(second(first(torch.randn(ROWS, WIDTH))))
        change(first.product)
        loss = fourth(hidden).sum()
        with pytest.raises(error, match=f"used by mm in 0, {message}"):
            loss.backward()


def test_what_leaves_after_the_last_unit_is_gone_before_the_loss() -> None:
    """That unit's return is an edge, too, though no other begins there: memory is often fullest in the loss."""
    model = nn.Sequential(product_unit())
    plan = Plan(
        {"0": recollect.UnitPlan({"mm": "offload", "mul": "recompute", "tanh": "keep"}, trips={"mm": Trip(1, 0)})}
    )
    with recollect.apply(model, plan):
        output = model(torch.randn(ROWS, WIDTH))
        storage = weakref.ref(model[0].product.untyped_storage())
        model[0].product = None
        assert storage() is None
        output.sum().backward()


@pytest.mark.parametrize("seed", range(3), ids=["late", "soon", "at random"])
def test_an_op_that_writes_waits_until_the_old_content_is_copied(seed: int) -> None:
    """It writes to a product after it was used, in a way that autograd does not mind."""

    def overwrites(self: Any, hidden: Tensor) -> Tensor:
        product = hidden @ self.weight
        squashed = (product * 2).tanh()
        product.add_(1)
        return squashed + product

    unit = Computes(overwrites, weight=nn.Parameter(torch.randn(WIDTH, WIDTH)))
    model = nn.Sequential(unit, nn.Linear(WIDTH, 1))
    data = torch.randn(ROWS, WIDTH)
    plain = gradients(model, data, torch.sum)
    actions = {"mm": "offload", "mul": "recompute", "tanh": "recompute", "add_": "keep", "add": "keep"}
    with carried_by(lambda: ClockedCarrier(seed)), recollect.apply(model, Plan({"0": recollect.UnitPlan(actions)})):
        assert_same_gradients(plain, gradients(model, data, torch.sum))
