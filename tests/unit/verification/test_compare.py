"""What the comparison of two runs says, and how large it says differences are."""

import pytest
import torch
from torch import Tensor

from recollect.verification.compare import (
    Computed,
    Findings,
    compare_runs,
    first_difference,
    furthest,
    largest_difference,
)

NAN = torch.tensor([float("nan"), 1.0])
ZERO = torch.tensor([0.0])


def test_largest_difference_of_complex_and_of_wrapped_tensors() -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])
    assert largest_difference(values.conj(), values) == 4
    rows = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    assert largest_difference(rows, rows * 3) == 2


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 3.0]), 3),
        (torch.tensor([1.0, 0.0]).to_sparse(), torch.tensor([0.0, 3.0]).to_sparse(), 3),
        (torch.tensor([1.0, 0.0]).to_sparse(), torch.tensor([0.0, 3.0]), 3),
        (torch.tensor([1, 2]), torch.tensor([1, 5]), 3),
        (ZERO, ZERO.expand(2), float("inf")),
        (ZERO, -ZERO, 0),
        (ZERO[:0], ZERO[:0].double(), 0),
    ],
)
def test_largest_difference(left: Tensor, right: Tensor, expected: float) -> None:
    assert largest_difference(left, right) == expected


def test_a_tensor_that_only_one_side_has_is_a_difference() -> None:
    assert first_difference({"a": ZERO, "b": NAN}, {"a": ZERO}) == ("b", float("inf"))
    assert first_difference({"a": ZERO}, {"a": ZERO, "b": NAN}) == ("b", float("inf"))
    assert first_difference({"a": ZERO}, {"a": ZERO.clone()}) is None


def computed(gradient: Tensor, buffer: Tensor) -> Computed:
    return Computed(gradients={"weight": gradient}, state={"buffer mean": buffer})


def test_runs_are_repeated_only_where_something_differs() -> None:
    expected = computed(NAN, ZERO)

    def never() -> Computed:
        raise AssertionError

    assert compare_runs(expected, computed(NAN, ZERO), never) == Findings(num_compared=1)
    found = compare_runs(expected, computed(NAN, ZERO + 1), lambda: expected)
    assert found == Findings(num_compared=1, state_difference=("buffer mean", 1.0))
    found = compare_runs(expected, computed(ZERO, ZERO), lambda: computed(NAN, ZERO + 2))
    assert found.difference == ("weight", float("inf"))
    assert found.plain_difference == ("buffer mean", 2.0)


def test_the_first_of_several_findings_counts() -> None:
    one = Findings(num_compared=2, state_difference=("buffer mean", 1.0)).within("layers.0")
    other = Findings(num_compared=3, difference=("weight", 2.0), state_difference=("buffer mean", 5.0)).within(
        "layers.1"
    )
    assert one.followed_by(other) == Findings(
        num_compared=5, difference=("layers.1: weight", 2.0), state_difference=("layers.0: buffer mean", 1.0)
    )


def test_furthest() -> None:
    expected = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0])}
    assert furthest(expected, {"a": torch.tensor([3.0, 9.0]), "b": torch.tensor([0.5])}) == ("a", 1.0)
    sparse = {"a": torch.tensor([3.0, 4.0]).to_sparse()}
    assert furthest(sparse, {"a": torch.tensor([3.0, 4.0])}) == ("a", 0.0)
