"""The backends of scaled dot product attention, and what PyTorch says where one does not take a call."""

import pytest
from torch.nn.attention import SDPBackend

BACKENDS = (
    SDPBackend.MATH,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
)
# On CUDA, on the CPU, and in cuDNN.
REFUSALS = ("No available kernel", "No viable backend", "cuDNN Frontend error")

every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
