"""A random op runs again with the numbers that it drew, and no other thread and no generator notices."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocks import Computes
from policies import FULL
from recollect.applying import apply_policy
from recollect.engine.draws import FunctionDraws, first_run
from recollect.engine.facts import facts_of
from recollect.errors import RandomDrawError

ATEN = torch.ops.aten
DRAWS = {
    "bernoulli_": (ATEN.bernoulli_.float, lambda: [torch.empty(100), 0.3]),
    "rand": (ATEN.rand.default, lambda: [[100]]),
    "randn": (ATEN.randn.default, lambda: [[100]]),
    "rand_like": (ATEN.rand_like.default, lambda: [torch.empty(100)]),
    "normal_": (ATEN.normal_.default, lambda: [torch.empty(101)]),
    "poisson, whose generator may be given by position": (ATEN.poisson.default, lambda: [torch.full((100,), 3.0)]),
    "native_dropout, which takes no generator": (ATEN.native_dropout.default, lambda: [torch.ones(100), 0.4, True]),
}


def dropping() -> Computes:
    """Dropout, whose gradient has to be zero where its output was. [n, d] -> [n, d]."""

    def run(self: Any, hidden: Tensor) -> Tensor:
        hidden = nn.functional.dropout(hidden * self.scale, 0.5)
        self.zero = (hidden == 0).detach()
        return hidden.sin()

    return Computes(run, scale=nn.Parameter(torch.ones(64)), zero=None)


@pytest.fixture
def other_thread() -> Iterator[None]:
    """A thread that draws from the default generator all the time, as a data loader's does."""
    over = threading.Event()

    def draw() -> None:
        while not over.is_set():
            torch.rand(3)

    thread = threading.Thread(target=draw)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.fixture
def recurrent_kernel() -> Iterator[None]:
    """Stands in on the CPU for cuDNN's layers with dropout: their masks come from a state, which a kernel moves on unseen."""

    def run(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        state = arguments[-1].numpy()
        state += 1
        mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(int(state[0]))) > 0.5
        return (x * mask, *(x.new_empty(0) for _ in range(4)))

    library = torch.library.Library("aten", "IMPL")
    library.impl("_cudnn_rnn", run, "CPU")
    yield
    library._destroy()  # type: ignore[no-untyped-call]


def recurrent() -> Computes:
    """The op that `nn.LSTM` with `dropout=` runs on a GPU. [n, d] -> [n, d]."""

    def run(self: Any, hidden: Tensor) -> Tensor:
        x, lstm = hidden.detach() * 2, 2
        arguments = [x, [], 0, None, x, None, lstm, 64, 0, 2, True, 0.5, True, False, [], self.state]
        kept = ATEN._cudnn_rnn.default(*arguments)[0]
        self.zero = kept == 0
        return ((hidden * self.scale).cos() * kept).sin()

    return Computes(run, scale=nn.Parameter(torch.ones(64)), state=torch.zeros(8, dtype=torch.uint8), zero=None)


def count_wrong(unit: Computes, num_steps: int) -> int:
    wrong = 0
    for _ in range(num_steps):
        hidden = torch.full((64, 64), 1.2, requires_grad=True)
        unit(hidden).sum().backward()
        assert hidden.grad is not None
        wrong += not torch.equal(hidden.grad == 0, unit.zero)
    return wrong


@pytest.mark.usefixtures("other_thread")
def test_dropout_beside_a_thread_that_draws() -> None:
    unit = dropping()
    with apply_policy(unit, [""], FULL):
        assert count_wrong(unit, 400) == 0


@pytest.mark.usefixtures("recurrent_kernel")
def test_dropout_between_recurrent_layers() -> None:
    unit = recurrent()
    with apply_policy(unit, [""], FULL):
        assert count_wrong(unit, 4) == 0


def test_two_planned_models_in_two_threads() -> None:
    wrong: list[int] = []

    def train() -> None:
        unit = dropping()
        with apply_policy(unit, [""], FULL):
            wrong.append(count_wrong(unit, 200))

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0]


@pytest.mark.parametrize("has_thread", [False, True])
@pytest.mark.parametrize(("func", "arguments"), DRAWS.values(), ids=DRAWS)
def test_first_and_second_run(func: object, arguments: object, has_thread: bool) -> None:
    """Both give what the op gives by itself; the first leaves the default generator as the op does, the second as it was."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait, daemon=True)
    if has_thread:
        thread.start()
    torch.manual_seed(5)
    expected = func(*arguments())  # type: ignore[operator]
    end = torch.get_rng_state()
    torch.manual_seed(5)
    output, draw = first_run(facts_of(func), func, arguments(), {})  # type: ignore[operator]
    assert torch.equal(torch.get_rng_state(), end)
    assert draw is not None
    torch.rand(3)
    elsewhere = torch.get_rng_state()
    again = draw.again(func, arguments(), {})  # type: ignore[operator]
    assert torch.equal(torch.get_rng_state(), elsewhere)
    over.set()
    for result in (output, again):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize("place", ["keyword", "position"])
def test_own_generator(place: str) -> None:
    generator = torch.Generator().manual_seed(2)
    rates = torch.full((100,), 3.0)
    args, kwargs = ([rates, generator], {}) if place == "position" else ([rates], {"generator": generator})
    default = torch.get_rng_state()
    output, draw = first_run(facts_of(ATEN.poisson.default), ATEN.poisson.default, args, kwargs)
    assert draw is not None
    state = generator.get_state()
    assert torch.equal(draw.again(ATEN.poisson.default, args, kwargs), output)
    assert torch.equal(generator.get_state(), state)
    assert torch.equal(torch.get_rng_state(), default)


def test_custom_op_that_draws_nothing_holds_no_state() -> None:
    @torch.library.custom_op("draws_test::plain", mutates_args=())
    def plain(x: Tensor) -> Tensor:
        return x * 2

    assert plain(torch.ones(2)).sum() == 4
    func = torch.ops.draws_test.plain.default
    assert first_run(facts_of(func), func, [torch.ones(2)], {})[1] is None


def test_custom_op_that_draws_something_else_the_second_time() -> None:
    """It takes no generator, so that only the state afterwards tells."""
    amounts = [3, 5, *range(6, 40)]

    @torch.library.custom_op("draws_test::uneven", mutates_args=())
    def uneven(x: Tensor) -> Tensor:
        return x + torch.rand(amounts.pop(0)).sum()

    func = torch.ops.draws_test.uneven.default
    _, draw = first_run(facts_of(func), func, [torch.ones(2)], {})
    assert draw is not None
    with pytest.raises(RandomDrawError, match=r"draws_test\.uneven\.default drew different random numbers in backward"):
        draw.again(func, [torch.ones(2)], {})


def test_custom_op_that_another_thread_disturbs() -> None:
    """The second run is repeated until nobody else drew."""
    disturbed = [False, True, True, False]

    @torch.library.custom_op("draws_test::disturbed", mutates_args=())
    def noise(x: Tensor) -> Tensor:
        if disturbed.pop(0):
            torch.rand(1)  # As another thread might.
        return x + torch.rand(2)

    func = torch.ops.draws_test.disturbed.default
    output, draw = first_run(facts_of(func), func, [torch.ones(2)], {})
    assert draw is not None
    assert torch.equal(draw.again(func, [torch.ones(2)], {}), output)
    assert not disturbed


@pytest.mark.parametrize("is_seen_first", [True, False])
def test_a_function_whose_kernels_draw_out_of_sight_draws_the_same(is_seen_first: bool) -> None:
    """What no dispatch mode sees draws from the default generator, which is set back; ops that are seen draw around it."""

    def forward() -> list[Tensor]:
        seen = torch.rand(3) if is_seen_first else torch.zeros(3)
        with torch.utils._python_dispatch._disable_current_modes():
            unseen = torch.rand(3)
        return [seen, unseen, torch.rand(3)]

    draws = FunctionDraws(object, [torch.default_generator])
    with draws.first():
        expected = forward()
    assert draws.state_bytes > 0
    torch.rand(5)
    elsewhere = torch.get_rng_state()
    with draws.second():
        again = forward()
    assert all(map(torch.equal, again, expected))
    assert torch.equal(torch.get_rng_state(), elsewhere)
