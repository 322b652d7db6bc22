"""CUDA streams: a value that belongs to one stream is read on another one only when it is there, and stays until then.

Forward and backward of an op run on the same stream, so plain autograd needs nothing of this. Computing a value again does.
Whoever asks first computes it, on its own stream, and somebody on another stream may ask next. And what is computed again on
one stream may be made of what forward had on another, where the memory goes to the next tensor as soon as nobody holds it.
"""

from __future__ import annotations

import torch

from recollect._torch_private import current_raw_stream, disable_torch_dispatch, is_fake_tensor

__all__ = ["Stream", "read_here", "stream_of"]

Stream = tuple[int, int]
"""A CUDA device and a stream of it, as numbers that are quick to compare."""

_streams: dict[Stream, torch.cuda.Stream] = {}


def stream_of(tensor: torch.Tensor) -> Stream | None:
    """Return the stream that is current on a tensor's device; None for one that is not on CUDA, or is fake.

    Example:
        >>> import torch
        >>> print(stream_of(torch.zeros(1)))
        None
    """
    if not tensor.is_cuda or is_fake_tensor(tensor):
        return None
    index = tensor.get_device()
    stream = index, current_raw_stream(index)
    if stream not in _streams:
        _streams[stream] = torch.cuda.current_stream(index)
    return stream


def read_here(tensor: torch.Tensor, stream: Stream) -> None:
    """Have the current stream wait for a tensor's own, and keep the tensor's memory until it is done with it.

    Nothing happens if they are the same.
    """
    here = stream_of(tensor)
    if here is None or here == stream:
        return
    _streams[here].wait_stream(_streams[stream])
    with disable_torch_dispatch(), torch.no_grad():
        tensor.record_stream(_streams[here])
