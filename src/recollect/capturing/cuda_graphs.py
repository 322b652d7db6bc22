"""Captures steps of one model as CUDA graphs, in one memory pool and on one stream."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from recollect._torch_private import rehearsing_capture
from recollect.errors import ConfigError
from recollect.garbage import without_collections
from recollect.measuring.device_memory import empty_cache


class Graphs(Protocol):
    """Captures steps, which can be repeated then."""

    def running(self) -> AbstractContextManager[None]:
        """Run a warm-up step in the block, where a captured one would run."""

    def rehearsing(self) -> AbstractContextManager[None]:
        """Run a step in the block, in which anything that cannot be captured raises an error."""

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """Capture a step; return its loss, and the function that runs the step again, into the same loss."""

    def pool_bytes(self) -> int:
        """Return the size of the memory pool of all steps that are captured."""


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures on a device, since what libraries have for a stream stays."""
    return torch.cuda.Stream(device)


class CudaGraphs:
    """Captures on a CUDA device.

    Args:
        generators: the model's own, which the graphs draw from besides the device's.
    """

    def __init__(self, device: torch.device, generators: Iterable[torch.Generator] = ()) -> None:
        empty_cache(device)
        self._device = device
        self._generators = [own for own in generators if own.device.type == "cuda"]
        self._pool = torch.cuda.graph_pool_handle()
        # Warm-up steps run on it, too: workspaces of libraries belong to a stream, and are then made outside of the pool.
        self._stream = _stream_of(device)

    @contextmanager
    def running(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # What a step has changed is restored on the current one.
            current.wait_stream(self._stream)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        with self.running(), rehearsing_capture():
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                raise ConfigError(
                    settings={"recollect.capture": "the step"},
                    reason=f"an op in it waits for the device, which a CUDA graph cannot repeat: {error}",
                    advice="Take out what reads a tensor (.item(), print, a condition), or run the step without capture.",
                ) from error
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        # Other threads may go on: a data loader that pins memory would end a capture in "global" mode, and the loader with it.
        captured = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with torch.cuda.device(self._device), without_collections(), captured:
            loss = step()
        return loss, graph.replay

    def pool_bytes(self) -> int:
        segments: list[dict[str, Any]] = torch.cuda.memory_snapshot(self._pool)
        return sum(segment["total_size"] for segment in segments)
