"""Has models of transformers make the masks of eager mode on fake tensors.

To do without a mask for attention, they read tensors: positions, to see whether sequences are packed, and the mask of padding.
What cannot be read counts as packed and padded, and each layer would keep a mask of tokens by tokens.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

_FIND_PACKED = "find_packed_sequence_indices"
_SKIP_MASK = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


@contextmanager
def eager_masks(batch: Any) -> Iterator[None]:
    """Within the block, a model on fake tensors makes the masks that it makes of this batch, which is real."""
    module = sys.modules.get("transformers.masking_utils")
    before = {name: getattr(module, name) for name in (_FIND_PACKED, *_SKIP_MASK) if hasattr(module, name)}
    for name, function in before.items():
        if name == _FIND_PACKED and not _can_find_packed(batch, function):
            setattr(module, name, _finds_none)
        elif name != _FIND_PACKED and not _may_be_padded(batch):
            setattr(module, name, partial(_without_padding, function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _given(batch: Any, name: str) -> torch.Tensor | None:
    found = batch.get(name) if isinstance(batch, Mapping) else None
    return found if isinstance(found, torch.Tensor) else None


def _can_find_packed(batch: Any, find_packed: Callable[..., Any]) -> bool:
    positions = _given(batch, "position_ids")
    return positions is not None and (positions.is_meta or find_packed(positions) is not None)


def _may_be_padded(batch: Any) -> bool:
    padding = _given(batch, "attention_mask")
    return padding is not None and (padding.is_meta or not bool(padding.all()))


def _finds_none(*_: Any, **__: Any) -> None:
    """Finds no packed sequences."""


def _without_padding(skips_mask: Callable[..., Any], _padding: Any, *args: Any) -> Any:
    return skips_mask(None, *args)
