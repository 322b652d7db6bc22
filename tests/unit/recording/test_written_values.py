"""Values that one unit computes and another writes to: no recipe of the first one knows what they are in the end."""

import pytest
import torch
from torch import Tensor, nn

import recollect
from small_llama import graph_at


class Up(nn.Module):
    """[n, 8] -> [n, 8], a value that nothing of its own saves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.linear(hidden).sin() * 2
        return output


class Clip(nn.Module):
    """Clips what it gets, in place or not, before it goes on. [n, 8] -> [n, 8]."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(8, 8), in_place

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.linear(hidden.relu_() if self.in_place else hidden.relu())
        return output


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("in_place", [True, False], ids=["written", "read"])
def test_what_another_unit_writes_to_has_to_be_kept(in_place: bool, fake: bool) -> None:
    model = nn.Sequential(Up(), Clip(in_place=in_place))
    profile = recollect.record(
        model, torch.randn(4, 8), loss_fn=lambda output: output.square().mean(), units=["0", "1"], fake=fake
    )
    kept = {value.name: value.must_keep for value in graph_at(profile, "0").values if value.producer is not None}
    assert kept == {"linear.addmm": False, "sin": False, "mul": in_place}
