"""Adds up the allocator's events on the CPU, together with the deaths of storages from before them, which it finds.

The allocator reports frees only of memory that it saw allocated. To place the death of an older storage among the events, one
byte is allocated at the start, and dies with it. A callback of a weak reference would lose an interrupt of the program.
"""

import gc
import weakref
from collections.abc import Iterable
from functools import partial
from itertools import chain, compress, islice, repeat

import torch

from recollect._torch_private import disable_torch_function, is_traceable_wrapper_subclass


def _reachable_tensors() -> list[torch.Tensor]:
    """Return all tensors known to the garbage collector.

    No other thread runs between the look at all objects and the choice, which are one call of C functions: what a thread has
    just begun to fill is among them, and `tuple(generator)` raises a SystemError there if anybody else holds its result.
    """
    twice = chain.from_iterable(map(repeat, map(gc.get_objects, (None,)), (2,)))
    things = chain.from_iterable(islice(twice, 1))
    types = map(type, chain.from_iterable(twice))
    # By types, not by `isinstance`, which asks proxy objects for their class and may wake them. One more thing than objects:
    # these iterators let go of them when they find no more.
    are_tensors = map(partial(type.__subclasscheck__, torch.Tensor), types)
    return list(compress(chain(things, (None,)), are_tensors))


def reachable_storages() -> list[torch.UntypedStorage]:
    """Return the CPU storages of all tensors known to the garbage collector, and of their gradients.

    Complexity: one look at every object of the process, about 0.1 s for a million. Tensors that only C++ holds (saved by a
    graph) are not found, nor are those that `gc.freeze()` has set aside.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    with disable_torch_function():
        for thing in _reachable_tensors():
            if is_traceable_wrapper_subclass(thing):
                continue
            try:
                # Autograd makes gradients in C++, where the garbage collector does not see them.
                both = thing, thing.grad if thing.is_leaf else None
            except RuntimeError:  # a different thread is about to make it, or to free it
                continue
            for tensor in both:
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
    # PyTorch says of all memory of accelerators that it is shared.
    return storage.resizable() and (storage.device.type != "cpu" or not storage.is_shared())


def allocated_storages(
    known: Iterable[torch.UntypedStorage] = (), *, collects: bool = True
) -> list[torch.UntypedStorage]:
    """Collect garbage, and return the CPU storages of the allocator that Python can reach.

    `known`: others that count; of what `torch.load` made and what NumPy sees, PyTorch does not say who allocated it.
    """
    if collects:  # Garbage in cycles would count for as long as nobody does.
        gc.collect()
    found = filter(is_of_the_allocator, reachable_storages())
    return list({id(storage): storage for storage in chain(known, found)}.values())


_MARK = "_recollect_mark"
OLDER = -1
"""The address, among events, of storages from before them."""


class Deaths:
    """Records the deaths of storages that were alive at the start, between `start` and `stop`."""

    def __init__(self, storages: Iterable[torch.UntypedStorage]) -> None:
        self._sizes = [(weakref.ref(storage), storage.nbytes()) for storage in storages]
        self._bytes_at: dict[int, int] = {}
        self.start_bytes = sum(num_bytes for _, num_bytes in self._sizes)

    def start(self) -> None:
        """Make a mark die with each storage; the allocator is traced from before this until `stop` is called."""
        for reference, num_bytes in self._sizes:
            storage = reference()
            if storage is not None:
                # Made directly, not by an op: dispatch modes of the measured program do not see it.
                mark = vars(storage)[_MARK] = torch.UntypedStorage(1, device="cpu")
                self._bytes_at[mark.data_ptr()] = num_bytes

    def stop(self) -> None:
        for reference, _ in self._sizes:
            storage = reference()
            if storage is not None:
                vars(storage).pop(_MARK, None)

    def placed(self, events: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        found, bytes_at, made = list[tuple[int, int]](), dict(self._bytes_at), set[int]()
        for address, num_bytes in events:
            if address in bytes_at:
                if num_bytes > 0 and address not in made:
                    made.add(address)
                    continue
                found.append((OLDER, -bytes_at.pop(address)))
                if num_bytes < 0:
                    continue
                # The mark has died on an untraced thread, and its address is used again.
            found.append((address, num_bytes))
        return found


def added_up(events: list[tuple[int, int]]) -> tuple[int, int, int]:
    """Return the peak and the final bytes, relative to the start, and the number of events counted."""
    alive: dict[int, int] = {}
    total_bytes = peak_bytes = num_events = 0
    for address, num_bytes in events:
        if address == OLDER:
            total_bytes += num_bytes
        elif num_bytes > 0:
            # An address that is allocated again was freed, but on an untraced thread.
            total_bytes += num_bytes - alive.get(address, 0)
            alive[address] = num_bytes
            peak_bytes = max(peak_bytes, total_bytes)
            num_events += 1
        elif address in alive:
            total_bytes -= alive.pop(address)
            num_events += 1
        # Otherwise memory from before the trace, at an address known from an earlier trace, perhaps with a different size.
    return peak_bytes, total_bytes, num_events
