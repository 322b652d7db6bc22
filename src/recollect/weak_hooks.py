"""Register methods as hooks that PyTorch holds as long as the process lives, without holding their objects."""

import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from recollect._torch_private import uncompiled

_registered: list[tuple[weakref.ref[Any], RemovableHandle]] = []


def register_weakly(register: Callable[[Any], RemovableHandle], method: Callable[..., Any]) -> RemovableHandle:
    """Register a bound method as a hook that does nothing once its object has died, and that `torch.compile` does not trace."""
    # Here rather than as they die, when an interrupt of the program would be lost.
    for found in [found for found in _registered if found[0]() is None]:
        found[1].remove()
        _registered.remove(found)
    reference, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]
    handle = register(uncompiled(lambda *given: None if (own := reference()) is None else function(own, *given)))
    _registered.append((reference, handle))
    return handle
