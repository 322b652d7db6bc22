"""Has models of transformers make the masks of eager mode where tensors cannot be read: fake ones, and in a captured step.

To do without a mask for attention, they read tensors: positions, to see whether sequences are packed, and the mask of padding.
What they cannot read counts as packed and padded, and each layer would keep a mask of tokens by tokens.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, Final

import torch

_FIND_PACKED: Final = "find_packed_sequence_indices"
# Functions of transformers, and what they read of a batch.
_READ: Final = {
    _FIND_PACKED: "position_ids",
    "_ignore_causal_mask_sdpa": "attention_mask",
    "_ignore_bidirectional_mask_sdpa": "attention_mask",
    # Whether anything can be read: before transformers 5.24 it was asked without a tensor, too.
    "is_tracing": "",
}


@contextmanager
def eager_masks(batch: Any, *, is_like_others: bool = False) -> Iterator[None]:
    """Within the block, a model makes on this thread the masks that it makes of this batch, which is real, in eager mode.

    `is_like_others`: it stands for batches with the same tensors and other numbers.
    """
    module = sys.modules.get("transformers.masking_utils")
    before = {name: getattr(module, name) for name in _READ if hasattr(module, name)}
    for name, function in before.items():
        here = _in_eager_mode(name, function, batch, is_like_others)
        setattr(module, name, partial(_on_thread, get_ident(), here, function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _on_thread(thread: int, here: Callable[..., Any], elsewhere: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return (here if get_ident() == thread else elsewhere)(*args, **kwargs)


def _in_eager_mode(name: str, function: Callable[..., Any], batch: Any, is_like_others: bool) -> Callable[..., Any]:
    if name == "is_tracing":
        return lambda tensor=None: tensor is not None and function(tensor)
    finds_packed = name == _FIND_PACKED
    read = batch.get(_READ[name]) if isinstance(batch, Mapping) else None
    if isinstance(read, torch.Tensor):
        cannot_read = is_like_others or read.is_meta or read.dim() != 2
        if cannot_read or (function(read) is not None if finds_packed else not bool(read.all())):
            return function
    return (lambda *_: None) if finds_packed else lambda _padding, *others: function(None, *others)
