"""Each rank holds its own part of a value that is the same on all ranks, and looks whether it is."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recollect._torch_parallel import fake_process_group
from recollect.engine import together
from recollect.engine.together import Agreement, Shards
from recollect.errors import PlanError

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs PyTorch with torch.distributed")
RANKS = 3


def part_of(value: Tensor) -> Tensor:
    assert dist.group.WORLD is not None
    _, part = Shards(dist.group.WORLD).call(value, Agreement("one"), "layers.0", "mm")
    held: Tensor = part.tensor
    return held


@pytest.mark.parametrize("rank", range(RANKS))
def test_each_rank_holds_the_part_of_its_number(rank: int) -> None:
    value = torch.arange(12.0).view(3, 4)
    with fake_process_group(rank, RANKS):
        assert torch.equal(part_of(value).view(torch.float32), value[rank])


@pytest.mark.parametrize("rank", range(RANKS))
def test_the_last_part_is_padded(rank: int) -> None:
    value = torch.arange(1, 9, dtype=torch.uint8)
    expected = [[1, 2, 3], [4, 5, 6], [7, 8, 0]]
    with fake_process_group(rank, RANKS):
        assert part_of(value).tolist() == expected[rank]


def test_a_value_that_another_rank_has_otherwise_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        together, "gathered", lambda own, num_ranks, group: torch.cat([own] * (num_ranks - 1) + [own + 1])
    )
    with fake_process_group(0, RANKS), pytest.raises(PlanError) as caught:
        part_of(torch.ones(6))
    assert "cannot hold 'mm' of unit 'layers.0' as parts: it is not the same on the 3 ranks" in str(caught.value)
