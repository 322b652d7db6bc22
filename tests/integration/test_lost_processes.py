"""A process that fails or ends is named by one that waits for it and hears of no error."""

from pathlib import Path

import pytest
import torch

from forked_processes import ForkedProcess
from rank_processes import free_port

PROGRAM = Path(__file__).parents[1] / "support/lost_ranks.py"
SAID = {
    "killed": "Error: rank 1 of 2 has ended without a word, so none continues: it was killed, or crashed. Look at the last",
    "fails": "Error: rank 1 of 2 failed, so none continues: MemoryError: no 2 GiB left\n",
    "done": "",
    "first fails": "Error: rank 0 of 2 failed, so none continues: ValueError: no such layer\n",
    "first gone": "ValueError: the same as in the first\n",
    "first done": "",
}
FIRST_ENDS = ("first fails", "first gone", "first done")
pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs PyTorch with the gloo backend"),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc"),
]


def start(case: str) -> list[ForkedProcess]:
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2"}
    return [ForkedProcess(PROGRAM, case, RANK=rank, LOCAL_RANK=rank, **group) for rank in "01"]


@pytest.fixture(scope="module")
def ended() -> dict[str, tuple[int | None, str, str]]:
    """Exit status, output and errors of the process of each case that waits."""
    started = {case: start(case) for case in SAID}
    try:
        written = {case: processes[case in FIRST_ENDS].communicate() for case, processes in started.items()}
    finally:
        for processes in started.values():
            for process in processes:
                process.kill()
                process.communicate()
    return {case: (started[case][case in FIRST_ENDS].returncode, *texts) for case, texts in written.items()}


@pytest.mark.parametrize("case", ["killed", "fails", "first fails"])
def test_who_waits_where_no_error_comes_ends_and_says_why(
    case: str, ended: dict[str, tuple[int | None, str, str]]
) -> None:
    status, output, errors = ended[case]
    assert status == 2 and not output
    assert SAID[case] in errors


@pytest.mark.parametrize("case", ["done", "first done"])
def test_a_process_that_is_done_may_end_sooner(case: str, ended: dict[str, tuple[int | None, str, str]]) -> None:
    assert ended[case][:2] == (0, "went on\n"), ended[case]


def test_an_error_is_said_where_the_store_is_gone(ended: dict[str, tuple[int | None, str, str]]) -> None:
    """All fail alike, and the first, which holds the store, has ended."""
    assert ended["first gone"][2].endswith(SAID["first gone"]), ended["first gone"]
