"""Synchronises values across CUDA streams: a read on a different stream waits for the value and keeps its memory alive.

An op's forward and backward run on the same stream, so plain autograd needs none of this, but recomputation does. The
first to ask for a value computes it on its own stream, and the next may ask on a different one. A recomputed value may also be
made from values of forward on a different stream, where memory is reused as soon as nothing holds it.
"""

import torch

from recollect._torch_private import current_raw_stream, disable_torch_dispatch, is_fake_tensor

Stream = tuple[int, int]
"""A CUDA device and one of its streams, as numbers that are quick to compare."""

_streams: dict[Stream, torch.cuda.Stream] = {}


def stream_of(tensor: torch.Tensor) -> Stream | None:
    """Return the current stream of a tensor's device; None if the tensor is not on CUDA, or is fake."""
    if not tensor.is_cuda or is_fake_tensor(tensor):
        return None
    index = tensor.get_device()
    stream = index, current_raw_stream(index)
    if stream not in _streams:
        _streams[stream] = torch.cuda.current_stream(index)
    return stream


def read_here(tensor: torch.Tensor, stream: Stream) -> None:
    """Make the current stream wait for the tensor's, if that is a different one, and keep the memory until it is done."""
    here = stream_of(tensor)
    if here is None or here == stream:
        return
    _streams[here].wait_stream(_streams[stream])
    with disable_torch_dispatch(), torch.no_grad():
        tensor.record_stream(_streams[here])
