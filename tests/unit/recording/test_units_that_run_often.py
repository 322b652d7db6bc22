"""A unit that runs many times in a step is recorded in full each time."""

from collections import Counter

import torch
from torch import Tensor, nn

import recollect
from blocks import Stack
from recollect.profile.events import SAVE


class FourTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Stack(width=16, depth=2)

    def forward(self, batch: Tensor) -> Tensor:
        return torch.stack([self.inner(batch).square().mean() for _ in range(4)]).mean()


def test_every_run_saves_the_same() -> None:
    profile = recollect.record(FourTimes(), torch.randn(8, 16))
    savers = Counter(saver for *_, saver in profile.log.operands(SAVE))
    saves = {}
    for index, call in enumerate(profile.calls):
        saves.setdefault(call.path, []).append(savers[index])
    assert all(len(counts) == 4 and len(set(counts)) == 1 for counts in saves.values()), saves
