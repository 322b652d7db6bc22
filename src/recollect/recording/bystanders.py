"""Count what is in memory throughout a step that the step has nothing to do with: other models, copies of weights, data.

On CUDA the allocator knows: what is allocated when the step ends and belongs neither to the step nor to what was there for
it. That includes the workspaces of libraries. On the CPU nothing counts; there it is the tensors that Python can reach before
the step and after it, and that no op of the step read.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import torch

from recollect.measuring.deaths import is_of_the_allocator, reachable_storages
from recollect.measuring.device_memory import allocated_bytes
from recollect.measuring.meter import storages_of
from recollect.recording.trackers import tracker_of

__all__ = ["Bystanders"]


class Bystanders:
    """What is in memory when it is made, besides some tensors; ask for its bytes when the step has run.

    Args:
        device: whose memory counts.
        known: tensors of that device which the record counts itself.
        looks_on_cpu: whether to look at all on the CPU.
        set_aside_bytes: what a CUDA device holds besides, but only until then.
    """

    def __init__(
        self, device: torch.device, known: Iterable[torch.Tensor], *, looks_on_cpu: bool, set_aside_bytes: int = 0
    ) -> None:
        self._device = device
        storages = storages_of(known)
        self._known_bytes = sum(storage.nbytes() for storage in storages) + set_aside_bytes
        self._present: list[weakref.ref[torch.UntypedStorage]] = []
        if device.type == "cpu" and looks_on_cpu:
            # Garbage in cycles would count for as long as nobody collects it.
            gc.collect()
            ids = {id(storage) for storage in storages}
            self._present = [
                weakref.ref(storage)
                for storage in reachable_storages()
                if id(storage) not in ids and is_of_the_allocator(storage)
            ]

    def nbytes(self, step_bytes: int) -> int:
        """Return the bytes; call this before the recorder lets go of the storages that it saw.

        Args:
            step_bytes: bytes of what the step made and is still alive.
        """
        if self._device.type == "cuda":
            return max(0, allocated_bytes(self._device) - self._known_bytes - step_bytes)
        alive = (reference() for reference in self._present)
        return sum(storage.nbytes() for storage in alive if storage is not None and tracker_of(storage) is None)
