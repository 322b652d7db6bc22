"""Watching a piece of code from outside: the ops it runs and the storages it leaves alive.

Nothing here knows how recollect works; a dispatch mode sees every op of whoever runs under it, replay included.
"""

import gc
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watch(TorchDispatchMode):
    """Counts ops and follows the storages they make.

    `history`: the ops in the order in which they ran, by their short names ("mm").
    `peak_bytes`: the most bytes of new storages alive after any op, if the watch `follows_peak`: it then looks at all of them
    after each op.
    """

    def __init__(self, *, follows_peak: bool = False) -> None:
        super().__init__()
        self._follows_peak = follows_peak
        self.history: list[str] = []
        self.peak_bytes = 0
        self._storages: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        self.history.append(func._schema.name.removeprefix("aten::"))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in arguments:
                storage = tensor.untyped_storage()
                self._storages.append((StorageWeakRef(storage), storage.nbytes()))
        if self._follows_peak:
            self.peak_bytes = max(self.peak_bytes, self.live_bytes())
        return result

    def live_bytes(self) -> int:
        """Bytes of the storages made under the watch that somebody still holds."""
        self._storages = [entry for entry in self._storages if not entry[0].expired()]
        return sum(nbytes for _, nbytes in self._storages)

    @property
    def ops(self) -> Counter[str]:
        return Counter(self.history)

    def computing_ops(self) -> Counter[str]:
        """`ops` without those that only look at memory in another way."""
        return Counter(name for name in self.history if name not in _VIEWS)


_VIEWS = frozenset(
    {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "alias"}
    | {"detach", "split", "split_with_sizes", "chunk", "unbind", "as_strided", "_reshape_alias", "diagonal"}
)


def live_tensors() -> int:
    """Tensors that Python's garbage collector knows of."""
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
