"""Has models of transformers make the masks of eager mode where tensors cannot be read: fake ones, and in a captured step.

To do without a mask for attention, they read tensors: positions, to see whether sequences are packed, and the mask of padding.
What they cannot read counts as packed and padded, and each layer would keep a mask of tokens by tokens.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

_FIND_PACKED = "find_packed_sequence_indices"
_SKIP_MASK = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
# Before transformers 5.24 this said without a tensor, too, that nothing can be read.
_CANNOT_READ = "is_tracing"


@contextmanager
def eager_masks(batch: Any, *, is_like_others: bool = False) -> Iterator[None]:
    """Within the block, a model makes the masks that it makes of this batch, which is real, in eager mode.

    `is_like_others`: it stands for batches with the same tensors and other numbers.
    """
    module = sys.modules.get("transformers.masking_utils")
    names = (_FIND_PACKED, *_SKIP_MASK, _CANNOT_READ)
    before = {name: getattr(module, name) for name in names if hasattr(module, name)}
    positions, padding = (_given(batch, name) for name in ("position_ids", "attention_mask"))
    for name, function in before.items():
        if name == _CANNOT_READ:
            setattr(module, name, partial(_cannot_read, function))
        elif name == _FIND_PACKED and (positions is None or not (is_like_others or _is_packed(positions, function))):
            setattr(module, name, _finds_none)
        elif name in _SKIP_MASK and (padding is None or not (is_like_others or _is_padded(padding))):
            setattr(module, name, partial(_without_padding, function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _given(batch: Any, name: str) -> torch.Tensor | None:
    found = batch.get(name) if isinstance(batch, Mapping) else None
    return found if isinstance(found, torch.Tensor) else None


def _is_packed(positions: torch.Tensor, find_packed: Callable[..., Any]) -> bool:
    return positions.is_meta or find_packed(positions) is not None


def _is_padded(padding: torch.Tensor) -> bool:
    return padding.is_meta or not bool(padding.all())


def _cannot_read(is_tracing: Callable[..., bool], tensor: Any = None) -> bool:
    return tensor is not None and is_tracing(tensor)


def _finds_none(*_: Any, **__: Any) -> None:
    """Finds no packed sequences."""


def _without_padding(skips_mask: Callable[..., Any], _padding: Any, *args: Any) -> Any:
    return skips_mask(None, *args)
