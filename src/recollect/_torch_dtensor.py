"""The private names of PyTorch that are needed to take DTensors apart, and to put them together again.

A part of `_torch_private.py`; the same rules apply.
"""

import sys
from copy import copy
from typing import Any

import torch
from torch.distributed import _functional_collectives as functional


def spec_of(tensor: torch.Tensor) -> Any:
    """Return how a DTensor is spread over processes: mesh, placements, shape; None for any other tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor._spec if module is not None and type(tensor) is module.DTensor else None  # type: ignore[attr-defined]


def spread(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """Return a DTensor of which this process holds `local`; without a spec, that itself. Autograd does not see it."""
    if spec is None:
        return local
    from torch.distributed.tensor import DTensor

    # Not the same spec for several: DTensors may change theirs.
    return DTensor(local, copy(spec), requires_grad=False)


def gradient_spec(spec: Any) -> Any:
    """Return how the gradient of a DTensor is probably spread: where its parts are yet to be added up, that is whole."""
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if placement.is_partial() else placement for placement in spec.placements]
    return type(spec)(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def local_part(tensor: Any) -> Any:
    """Return what this process holds of a DTensor, and wait for a collective that fills it; any other tensor as it is."""
    if spec_of(tensor) is not None:
        tensor = tensor._local_tensor
    return tensor.wait() if isinstance(tensor, functional.AsyncCollectiveTensor) else tensor
