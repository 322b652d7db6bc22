"""Processes that train together over gloo, in which a mistake of ours shows as a hang: ended, and said."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from asked_cases import AskedCases, asked_cases
from forked_processes import LONGEST_S, ForkedProcess

__all__ = ["free_port", "outputs_of", "run_ranks", "rank_cases", "rank_results", "start_ranks", "start_torchrun"]

_ROOT = Path(__file__).parents[2]


def outputs_of(started: Sequence[subprocess.Popen[str] | ForkedProcess]) -> list[str]:
    """Return the standard output of processes that were started with pipes or files for both streams."""
    try:
        done = [process.communicate(timeout=LONGEST_S) for process in started]
    finally:
        for process in started:
            # So that torchrun can end its own.
            process.terminate()
            try:
                process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
    assert all(process.returncode == 0 for process in started), "".join(errors[-4000:] for _, errors in done)
    return [output for output, _ in done]


def rank_results(program: Path, num_ranks: int) -> Any:
    """Return a fixture: what a program that ends with `save_and_exit` found, in each of its processes."""

    @pytest.fixture(scope="module")
    def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("ranks")
        outputs_of([ForkedProcess(program, rank, folder) for rank in range(num_ranks)])
        return [torch.load(folder / f"rank{rank}", weights_only=False) for rank in range(num_ranks)]

    return ranks


def rank_cases(program: Path, num_ranks: int) -> Any:
    """Return a fixture: the cases of a program, in processes that get their rank and a folder."""

    @pytest.fixture(scope="module")
    def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AskedCases]:
        folder = tmp_path_factory.mktemp("ranks")
        started = [ForkedProcess(program, rank, folder, has_input=True) for rank in range(num_ranks)]
        with asked_cases(started) as found:
            yield found

    return cases


def run_ranks(num_ranks: int, program: str | Path, *args: object) -> None:
    """Run a program or module in the processes that torchrun would start."""
    outputs_of(start_ranks(num_ranks, program, *args))


def start_ranks(num_ranks: int, program: str | Path, *args: object, has_input: bool = False) -> list[ForkedProcess]:
    """Start the processes that torchrun would start; nobody ends the others where one is killed."""
    group = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
    group |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "100"}
    return [
        ForkedProcess(program, *args, has_input=has_input, RANK=rank, LOCAL_RANK=rank, **group)
        for rank in map(str, range(num_ranks))
    ]


def start_torchrun(num_ranks: int, *args: object) -> subprocess.Popen[str]:
    """Start torchrun itself, which takes some seconds longer."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "100"}
    environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT / "src"), str(_ROOT / "tests/support")])
    words = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return subprocess.Popen(
        [sys.executable, *words, *map(str, args)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
