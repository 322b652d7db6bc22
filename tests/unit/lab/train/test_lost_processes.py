"""What the processes of a run say of the one that failed, by notes in a store."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from recollect._torch_parallel import fake_process_group
from recollect.lab.train.lost_processes import LastWords
from recollect.ranks.group import Group


def last_words_of(rank: int) -> LastWords:
    with fake_process_group(rank, 3):
        return LastWords("run", Group(range(3), dist.new_group()))


@pytest.mark.skipif(not dist.is_available(), reason="needs PyTorch with torch.distributed")
@pytest.mark.parametrize("failed", range(3))
def test_all_processes_hear_which_one_failed_and_why(failed: int) -> None:
    store = dist.HashStore()
    words = [last_words_of(rank) for rank in range(3)]

    def exchange(rank: int) -> str | None:
        text = "MemoryError: no 2 GiB left" if rank == failed else "connection closed"
        return words[rank].exchange(store, text, is_lost=rank != failed)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(exchange, range(3)))
    assert found == [f"rank {failed} of 3 failed, so none continues: MemoryError: no 2 GiB left"] * 3
