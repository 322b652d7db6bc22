"""Takes tensors apart that consist of other tensors."""

from __future__ import annotations

import torch

from recollect._torch_private import is_traceable_wrapper_subclass

__all__ = ["inner_tensors"]


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that one of a wrapper subclass (DTensor and its kin) holds; none for any other tensor.

    Example:
        >>> import torch
        >>> rows = [torch.ones(2, 3), torch.ones(4, 3)]
        >>> jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
        >>> [list(inner.shape) for inner in inner_tensors(jagged)][
        ...     :2
        ... ]  # rows one below the other, and where each begins
        [[6, 3], [3]]
        >>> inner_tensors(rows[0])
        []
    """
    if not is_traceable_wrapper_subclass(tensor):
        return []
    names, _ = tensor.__tensor_flatten__()
    # A DTensor names its device mesh, too.
    return [inner for inner in (getattr(tensor, name) for name in names) if isinstance(inner, torch.Tensor)]
