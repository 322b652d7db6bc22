"""What bytes take on a device is never less than was asked for, and on CUDA whole blocks."""

from __future__ import annotations

import pytest

from recollect.profile.profile import block_bytes


@pytest.mark.parametrize(
    ("nbytes", "on_cuda"), [(0, 0), (1, 512), (511, 512), (512, 512), (513, 1024), (10**12 + 1, 10**12 + 512)]
)
def test_cuda_hands_out_whole_blocks_of_512_bytes(nbytes: int, on_cuda: int) -> None:
    assert block_bytes(nbytes, "cuda") == block_bytes(nbytes, "cuda:1") == on_cuda
    assert block_bytes(nbytes, "cpu") == nbytes
