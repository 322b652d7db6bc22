"""How CUDA's caching allocator counts, which the simulator copies; and `measure_peak` on top of it."""

import gc
import json
import os
import subprocess
import sys

import pytest
import torch

import recollect
from device_steps import sized
from recollect.measuring.meter import CudaOpPeaks
from recollect.profile.profile import block_bytes

KIB, MIB = 1 << 10, 1 << 20
SMALL_BYTES = (1, 511, 512, 513, 1000, 4096, 100_001, 700_000, MIB - 1, MIB)
LARGE_BYTES = (MIB + 1, 2 * MIB, 3 * MIB + 1, 10 * MIB, 21 * MIB // 2, 11 * MIB, 12 * MIB - 1, 64 * MIB + 1, 100 * MIB)


def _simulated(device: torch.device, nbytes: int) -> int:
    return block_bytes(nbytes, str(device))


def _tensor(device: torch.device, nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def test_code_that_runs_ops_has_a_peak_from_when_it_began_last(cuda: torch.device) -> None:
    peaks = CudaOpPeaks(cuda)
    with peaks.recording():
        peaks.begin()
        saved = _tensor(cuda, 4 * KIB)
        peaks.begin_again()
        made = _tensor(cuda, 3 * KIB)
        peaks.begin()
        _tensor(cuda, 2 * KIB)
        peaks.end()
        del made
        last = _tensor(cuda, KIB)
        peaks.end()
    assert (saved.nbytes, last.nbytes) == (4 * KIB, KIB)
    assert peaks.peaks_bytes() == [5 * KIB, 2 * KIB]


@pytest.mark.parametrize("nbytes", SMALL_BYTES)
def test_small_blocks_are_as_the_simulator_says(nbytes: int, cuda: torch.device) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated(cuda)
    requested = torch.cuda.memory_stats(cuda)["requested_bytes.all.current"]
    block = _tensor(cuda, nbytes)
    assert torch.cuda.memory_allocated(cuda) - before == _simulated(cuda, nbytes) == -(-nbytes // 512) * 512
    assert torch.cuda.memory_stats(cuda)["requested_bytes.all.current"] - requested == nbytes
    del block
    assert torch.cuda.memory_allocated(cuda) == before


@pytest.mark.parametrize("nbytes", LARGE_BYTES)
def test_large_blocks_are_a_mebibyte_larger_at_most(nbytes: int, cuda: torch.device) -> None:
    """Whatever lies free in this process already."""
    gc.collect()
    before = torch.cuda.memory_allocated(cuda)
    block = _tensor(cuda, nbytes)
    grown = torch.cuda.memory_allocated(cuda) - before
    del block
    asked = -(-nbytes // 512) * 512
    assert asked <= grown <= asked + MIB


GROWTH = """
import json, sys, torch

def growth(nbytes):
    before = torch.cuda.memory_allocated()
    block = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    grown = torch.cuda.memory_allocated() - before
    del block
    torch.cuda.empty_cache()
    return grown

print(json.dumps([growth(nbytes) for nbytes in json.loads(sys.argv[1])]))
"""


def _from_a_new_segment(nbytes: int, *, expandable: bool) -> int:
    """What a block counts that is the first in its segment: the rest is split off, in the large pool from 1 MiB on only.

    Segments have 2 MiB for blocks up to 1 MiB, 20 MiB for those below 10 MiB, else the next multiple of 2 MiB.
    """
    block = -(-nbytes // 512) * 512
    if block <= MIB or expandable:
        return block
    segment = 20 * MIB if block < 10 * MIB else -(-block // (2 * MIB)) * 2 * MIB
    return block if segment - block > MIB else segment


@pytest.mark.parametrize("expandable", [False, True], ids=["default", "expandable"])
def test_blocks_of_new_segments(expandable: bool, cuda: torch.device) -> None:
    setting = f"expandable_segments:{expandable}"
    sizes = SMALL_BYTES + LARGE_BYTES
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, json.dumps(sizes)],
        env={**os.environ, "PYTORCH_ALLOC_CONF": setting, "PYTORCH_CUDA_ALLOC_CONF": setting},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = dict(zip(sizes, json.loads(done.stdout.splitlines()[-1]), strict=True))
    assert found == {nbytes: _from_a_new_segment(nbytes, expandable=expandable) for nbytes in sizes}
    if not expandable:
        assert all(found[nbytes] == _simulated(cuda, nbytes) for nbytes in sizes)


def test_measured_peak_is_the_sum_of_what_is_alive(device: torch.device) -> None:
    """Three blocks, of which the first dies before the third is made."""
    sizes = sized(device, (1000, 5000, 300), (1000, 700_001, 300))

    def run() -> torch.Tensor:
        first = _tensor(device, sizes[0])
        second = _tensor(device, sizes[1])
        del first
        third = _tensor(device, sizes[2])
        del second
        return third

    found = recollect.measure_peak(run, device=device)
    first, second, third = (_simulated(device, nbytes) for nbytes in sizes)
    assert found.peak_growth_bytes == max(first + second, second + third)
    assert found.end_bytes - found.start_bytes == third
    assert found.device == str(device)
    if device.type == "cuda":
        assert found.peak_reserved_bytes >= found.peak_bytes
    assert recollect.measure_peak(run, device=device, baseline_bytes=0).peak_bytes == found.peak_growth_bytes
