"""Adds up the allocator's events on the CPU, together with the deaths of storages from before them, which it finds.

The allocator reports frees only of memory that it saw allocated. A weak reference to each older storage reports its death; to
place it among the events, the callback allocates one byte, whose event marks the place.
"""

import gc
import weakref
from collections.abc import Iterable

import torch

from recollect._torch_private import disable_torch_function, is_traceable_wrapper_subclass, untraced


def reachable_storages() -> list[torch.UntypedStorage]:
    """Return the CPU storages of all tensors known to the garbage collector, and of their gradients.

    Complexity: one look at every object of the process, about 0.1 s for a million. Tensors that only C++ holds (saved by a
    graph) are not found, nor are those that `gc.freeze()` has set aside.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    with disable_torch_function():
        for thing in gc.get_objects():
            # Not isinstance, which asks proxy objects for their class and may wake them.
            if not issubclass(type(thing), torch.Tensor) or is_traceable_wrapper_subclass(thing):
                continue
            # Autograd makes gradients in C++, where the garbage collector does not see them.
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is None:
                    continue
                try:
                    storage = tensor.untyped_storage()
                except NotImplementedError:  # sparse and opaque layouts
                    continue
                if storage.device.type == "cpu":
                    storages[id(storage)] = storage
    return list(storages.values())


def is_of_the_allocator(storage: torch.UntypedStorage) -> bool:
    """Whether PyTorch allocated it: not a mapped file, shared memory, or an array of NumPy's."""
    return storage.resizable() and not storage.is_shared()


class _StorageReference(weakref.ref[torch.UntypedStorage]):
    """A weak reference that remembers the size of its storage."""

    num_bytes: int


class Deaths:
    """Records the deaths of storages that were alive at the start, until `stop`.

    Args:
        storages: those that are alive.

    Attributes:
        start_bytes: bytes of all of them at the start.
        bytes_at: bytes freed, by the address of the allocation that marks the moment.
    """

    def __init__(self, storages: Iterable[torch.UntypedStorage]) -> None:
        self.bytes_at: dict[int, int] = {}
        # Kept to the end of the trace, so that no later allocation can have the address of a mark.
        self._marks: list[torch.UntypedStorage] = []
        self._references: list[_StorageReference] = []
        for storage in storages:
            reference = _StorageReference(storage, self._note_death)
            reference.num_bytes = storage.nbytes()
            self._references.append(reference)
        self.start_bytes = sum(reference.num_bytes for reference in self._references)

    @untraced
    def _note_death(self, reference: _StorageReference) -> None:
        # Made directly, not by an op, so that dispatch modes of the measured program do not see it.
        mark = torch.UntypedStorage(1, device="cpu")
        self._marks.append(mark)
        self.bytes_at[mark.data_ptr()] = reference.num_bytes

    def stop(self) -> None:
        """Record no more deaths."""
        self._references.clear()


def added_up(events: list[tuple[int, int]], deaths: dict[int, int]) -> tuple[int, int, int]:
    """Return the peak and the final bytes, relative to the start, and the number of events counted."""
    # The last allocation at a mark's address is the mark, because marks live on to the end of the trace.
    last = {address: at for at, (address, num_bytes) in enumerate(events) if num_bytes == 1 and address in deaths}
    died_bytes = {at: deaths[address] for address, at in last.items()}
    alive: dict[int, int] = {}
    total_bytes = peak_bytes = num_events = 0
    for at, (address, num_bytes) in enumerate(events):
        if at in died_bytes:
            total_bytes -= died_bytes[at]
        elif num_bytes > 0:
            # An address that is allocated again was freed, but on an untraced thread.
            total_bytes += num_bytes - alive.get(address, 0)
            alive[address] = num_bytes
            peak_bytes = max(peak_bytes, total_bytes)
            num_events += 1
        elif address in alive:
            total_bytes -= alive.pop(address)
            num_events += 1
        # Otherwise memory from before the trace, at an address known from an earlier trace, perhaps at another size.
    return peak_bytes, total_bytes, num_events
