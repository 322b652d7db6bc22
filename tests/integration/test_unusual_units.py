"""What of units that do what few layers do runs again. That they are exact is shown for all units, in `tests/contracts`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from contract_steps import Run, plain
from contract_units import UNITS, WIDTH, Case, layout_in_place
from engines import applied
from gradients import assert_same_gradients
from policies import FULL, KEEP_ALL, NOTHING_KEPT, Only, Policy, Random
from watch import Watch


def check(case: Case, policy: Policy) -> None:
    model = case.model()
    with applied("tape", model, policy):
        assert_same_gradients(Run(case.model()).through(plain, plain), Run(model).through(plain, plain))


def runs_of(op: str, case: Case, policy: Policy) -> int:
    model = case.model()
    with applied("tape", model, policy), Watch() as watch:
        Run(model).through(plain)
    return watch.ops[op]


@pytest.mark.parametrize(("name", "num_again"), [("slices put together", 2), ("slices filled out of sight", 0)])
def test_a_buffer_is_filled_again_if_all_of_it_was_filled_in_sight(name: str, num_again: int) -> None:
    assert runs_of("copy_", UNITS[name], FULL) - runs_of("copy_", UNITS[name], KEEP_ALL) == num_again


def test_layout_of_a_kept_value_is_changed_in_place() -> None:
    check(Case("layout", layout_in_place), Only(frozenset({"add"})))


def _long_scan(self: Any, hidden: Tensor) -> Tensor:
    state = self.first(hidden)
    for _ in range(1200):
        state = state * 0.99 + hidden.detach()
    return state.tanh()


@pytest.mark.parametrize("policy", [FULL, NOTHING_KEPT, Random(1)])
def test_a_scan_that_is_longer_than_the_recursion_limit(policy: Policy) -> None:
    check(Case("scan", _long_scan), policy)


@pytest.mark.parametrize(
    ("index", "num_again"),
    [
        (lambda hidden: hidden[:, 0].topk(3).indices, 1),
        (lambda hidden: (slice(None), hidden[0].topk(WIDTH).indices), 1),
        (lambda hidden: hidden[:, 0] > 0, 0),
        (lambda hidden: (hidden[:, 0] > 0).to(torch.uint8), 0),
    ],
    ids=["integers", "second dimension", "mask", "bytes"],
)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_gathers_run_again_unless_a_mask_decides_their_shape(index: Callable[[Tensor], Any], num_again: int) -> None:
    case = Case("gathers", lambda self, x: self.first(x).sin()[index(x)].cos().sum(0) + x)
    check(case, FULL)
    assert runs_of("index", case, FULL) - runs_of("index", case, KEEP_ALL) == num_again
