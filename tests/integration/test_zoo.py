"""The zoo is fit to be compared against: plain steps repeat to the bit, and the comparison can fail."""

import pytest
import torch

from gradients import DifferentStepsError, assert_same_gradients, step_of
from recollect.engine.content import has_same_bits
from zoo import ZOO, Case


@pytest.mark.parametrize("case", ZOO.values(), ids=ZOO)
def test_seed_matters_where_the_entry_says_so(case: Case) -> None:
    """Seen in gradients too: the mean square of what a layer norm returns can be the same to the bit."""
    model = case.model()
    one, other = step_of(case, model, seed=1), step_of(case, model, seed=2)
    assert all(has_same_bits(one[name], other[name]) for name in one) != case.is_random


@pytest.mark.parametrize("change", ["last bit", "sign of zero", "dtype", "shape", "missing", "added"])
def test_smallest_difference_raises(change: str) -> None:
    expected = {"loss": torch.tensor([0.0, 1.0])}
    got = {
        "last bit": {"loss": torch.tensor([0.0, 1.0 + 2**-23])},
        "sign of zero": {"loss": torch.tensor([-0.0, 1.0])},
        "dtype": {"loss": torch.tensor([0.0, 1.0], dtype=torch.float64)},
        "shape": {"loss": torch.tensor([[0.0, 1.0]])},
        "missing": {},
        "added": {**expected, "buffer mean": torch.zeros(1)},
    }[change]
    assert_same_gradients(expected, {"loss": expected["loss"].clone()})
    with pytest.raises(DifferentStepsError):
        assert_same_gradients(expected, got)
