"""See the calls of a model in somebody else's loop: the outermost calls, with gradients on, of modules that contain units."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from recollect._torch_private import tree_leaves
from recollect.engine.placed_forward import PlacedForward

__all__ = ["Entry", "EntryForward", "Removable", "entry_forwards"]

Entry = Callable[[str, nn.Module, Any, Any], None]
"""Called before a call: with the path of the module, the module and its arguments."""


class Removable(Protocol):
    """What can be undone."""

    def remove(self) -> None:
        """Undo it."""
        ...


class EntryForward(PlacedForward):
    """Tells a watcher of a module's outermost calls; recomputes nothing."""

    def __init__(self, module: nn.Module, path: str, watcher: Watcher) -> None:
        super().__init__(module)
        self.path = path
        self.watcher = watcher

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, and tell the watcher."""
        if not self.is_on:
            return self.forward(*args, **kwargs)
        return self.watcher.run(self.path, self.module, self.forward, args, kwargs)


class Watcher:
    """What the entries of one model share.

    Args:
        begin: told of each outermost call before it runs.
        abandon: told of one that raised.

    Attributes:
        is_inside: a call is running.
        saw_backward: backward has reached the output of the last call; also before the first one.
    """

    def __init__(self, begin: Entry, abandon: Callable[[], None]) -> None:
        self.begin = begin
        self.abandon = abandon
        self.is_inside = False
        self.saw_backward = True

    def run(self, path: str, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run what stands for a call of a module; tell of it if it is an outermost one."""
        if self.is_inside or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        self.is_inside = True
        try:
            self.begin(path, module, args, kwargs)
            output = function(*args, **kwargs)
        except BaseException:
            self.abandon()
            raise
        finally:
            self.is_inside = False
        self.end(output)
        return output

    def end(self, output: Any) -> None:
        """Note when backward reaches an output."""
        for tensor in _tensors_of(output):
            if tensor.requires_grad and not tensor.is_leaf:
                self.saw_backward = False
                tensor.register_hook(self._note_backward)
                return

    def _note_backward(self, _gradient: Any) -> None:
        self.saw_backward = True


def entry_forwards(model: nn.Module, unit_paths: Collection[str], watcher: Watcher) -> list[EntryForward]:
    """Return forwards for the model and every module between it and a unit."""
    paths = {""}
    for path in unit_paths:
        parts = path.split(".")
        paths.update(".".join(parts[:length]) for length in range(1, len(parts)))
    modules = dict(model.named_modules(remove_duplicate=False))
    found = [(path, modules[path]) for path in sorted(paths)]
    return [EntryForward(m, path, watcher) for path, m in found if not isinstance(m, (nn.ModuleList, nn.ModuleDict))]


def _tensors_of(output: Any) -> Sequence[torch.Tensor]:
    """Return the tensors in an output, also in the attributes of an object that is no container."""
    leaves = tree_leaves(output)
    inner = [leaf for item in leaves if hasattr(item, "__dict__") for leaf in vars(item).values()]
    return [leaf for leaf in (*leaves, *inner) if isinstance(leaf, torch.Tensor)]
