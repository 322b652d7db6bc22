"""What a write would change is copied before it, for what reads it again: with the same content and the same strides."""

import pytest
import torch

import recollect
from gradients import assert_same_gradients, gradients
from offload_programs import plain_step, program
from recollect.engine.values import private_copy
from recollect.errors import PlanMismatchWarning

BASE = torch.randn(7, 9, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "tensor",
    [BASE, BASE.t(), BASE[:, 2:5], BASE[1:, ::2].t(), BASE[:1].expand(5, 9), BASE[:0], BASE.to_sparse()],
    ids=["dense", "permuted", "slice", "steps", "expanded", "empty", "sparse"],
)
def test_is_like_what_it_copies(tensor: torch.Tensor) -> None:
    copy = private_copy(tensor)
    assert torch.equal(copy.to_dense(), tensor.to_dense()) and copy.dtype == tensor.dtype
    if tensor.layout is torch.strided:
        assert copy.stride() == tensor.stride() or not tensor.numel()
        assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
        assert (copy.storage_offset() - tensor.storage_offset()) % 64 == 0 or not tensor.numel()


def test_sums_of_slices_that_are_written_to_keep_their_bits() -> None:
    """A program that adds up a slice and then writes to it: kernels add in another order where rows have no gaps."""
    model, data = program(21237, writes_outside=True)
    plain = plain_step(model, data)
    assert plain is not None
    plan = recollect.Plan({"layers.1": recollect.UnitPlan({"mean": "recompute"})})
    with pytest.warns(PlanMismatchWarning), recollect.apply(model, plan):
        assert_same_gradients(plain, gradients(model, data))
