"""A process that fails or ends is named by one that waits for it and hears of no error."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from forked_processes import ForkedProcess
from rank_processes import free_port

PROGRAM = Path(__file__).parents[1] / "support/lost_ranks.py"
SAID = {
    "killed": "Error: rank 1 of 2 has ended without a word, so that none goes on: it was killed, or crashed. Look at the last",
    "fails": "Error: rank 1 of 2 failed, so that none goes on: MemoryError: no 2 GiB left\n",
    "done": "",
}
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs PyTorch with the gloo backend"),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc"),
]


def start(case: str) -> list[ForkedProcess]:
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2"}
    return [ForkedProcess(PROGRAM, case, RANK=rank, LOCAL_RANK=rank, **group) for rank in "01"]


@pytest.fixture(scope="module")
def ended() -> dict[str, tuple[int | None, str, str]]:
    """Exit status, output and errors of the first process of each case."""
    begin = time.monotonic()
    started = {case: start(case) for case in SAID}
    try:
        written = {case: processes[0].communicate(timeout=50) for case, processes in started.items()}
    finally:
        for processes in started.values():
            for process in processes:
                process.kill()
                process.communicate(timeout=10)
    assert time.monotonic() - begin < 45
    return {case: (started[case][0].returncode, *texts) for case, texts in written.items()}


@pytest.mark.parametrize("case", ["killed", "fails"])
def test_who_waits_where_no_error_comes_ends_and_says_why(
    case: str, ended: dict[str, tuple[int | None, str, str]]
) -> None:
    status, output, errors = ended[case]
    assert status == 2 and not output
    assert SAID[case] in errors


def test_a_process_that_is_done_may_end_sooner(ended: dict[str, tuple[int | None, str, str]]) -> None:
    assert ended["done"][:2] == (0, "went on\n"), ended["done"]
