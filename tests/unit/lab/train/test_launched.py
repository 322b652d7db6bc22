"""Processes of one run: a warning of all is shown once, what one says is not lost, and all say which one failed."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from recollect._torch_parallel import fake_process_group
from recollect.lab.train.launched import is_first_in, is_shown_here, shared_warnings
from recollect.lab.train.lost_processes import LastWords
from recollect.ranks.group import Group

needs_stores = pytest.mark.skipif(not dist.is_available(), reason="needs PyTorch with torch.distributed")


@needs_stores
def test_the_first_process_that_has_a_warning_shows_it() -> None:
    store = dist.HashStore()
    assert [is_first_in(store, text) for text in ("one", "one", "of a single rank", "one")] == [
        True,
        False,
        True,
        False,
    ]


@needs_stores
def test_where_the_others_are_gone_a_warning_is_shown() -> None:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True)
    store = dist.TCPStore("127.0.0.1", master.port, is_master=False)
    assert is_first_in(store, "one") and not is_first_in(store, "one")
    del master
    assert is_first_in(store, "one")


def test_one_process_shows_all_of_its_warnings() -> None:
    assert is_shown_here("one") and is_shown_here("one")


@pytest.mark.parametrize(("rank", "number"), [("0", 1), ("1", 0)])
def test_of_the_command_line_the_first_process_warns(rank: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with shared_warnings():
            warnings.warn("one", stacklevel=1)
    assert len(found) == number


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
