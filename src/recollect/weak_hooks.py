"""Register methods as hooks that PyTorch holds as long as the process lives, without holding their objects."""

import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from recollect._torch_private import uncompiled


def register_weakly(register: Callable[[Any], RemovableHandle], method: Callable[..., Any]) -> RemovableHandle:
    """Register a bound method as a hook that is removed when its object dies and that `torch.compile` does not trace.

    Args:
        register: takes a hook, and returns its handle.
        method: the method that the hook calls.
    """
    reference = weakref.WeakMethod(method)
    handle = register(uncompiled(lambda *given: (call := reference()) and call(*given)))
    weakref.finalize(method.__self__, handle.remove)  # type: ignore[attr-defined]
    return handle
