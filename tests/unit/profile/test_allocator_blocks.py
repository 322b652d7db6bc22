"""What bytes take on a device is never less than was asked for, and on CUDA whole blocks."""

import pytest

from recollect.profile.profile import block_bytes


@pytest.mark.parametrize(
    ("nbytes", "on_cuda"),
    [
        (0, 0),
        (1, 512),
        (511, 512),
        (512, 512),
        (513, 1024),
        (9 * 2**20, 9 * 2**20),
        (21 * 2**20 // 2, 21 * 2**20 // 2),
        (11 * 2**20, 12 * 2**20),
        (12 * 2**20 + 1, 12 * 2**20 + 512),
    ],
)
def test_cuda_hands_out_whole_blocks(nbytes: int, on_cuda: int) -> None:
    assert block_bytes(nbytes, "cuda") == block_bytes(nbytes, "cuda:1") == on_cuda
    assert block_bytes(nbytes, "cpu") == nbytes
