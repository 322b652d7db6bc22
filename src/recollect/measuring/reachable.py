"""Find the storages of all tensors that Python can reach."""

from __future__ import annotations

import gc

import torch

from recollect._torch_private import disable_torch_function, is_traceable_wrapper_subclass

__all__ = ["is_of_the_allocator", "reachable_storages"]


def reachable_storages() -> list[torch.UntypedStorage]:
    """Return the CPU storages of all tensors known to the garbage collector, and of their gradients.

    Complexity: one look at every object of the process, about 0.1 s for a million. Tensors that only C++ holds (saved by a
    graph) are not found, nor is what `gc.freeze()` has put aside.
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
