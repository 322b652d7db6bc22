"""Run a model on fake tensors: shapes without memory, ops without arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from recollect._torch_fsdp import other_sharded_parameters
from recollect._torch_private import FakeTensorMode, is_traceable_wrapper_subclass, tree_map
from recollect.recording.restored_state import restored_attributes, restored_generators


class _FakeMode(FakeTensorMode):
    """PyTorch's fake tensors with three more ops.

    Grouped matrix products of any dtype: PyTorch's fake tensors insist on bf16, its kernels do not. And `bincount` with the
    number of bins that the model asks for, as models count the tokens of each expert; PyTorch's fake tensors refuse it,
    since larger numbers would add bins. And the end of a collective: it returns its argument, where PyTorch's fake tensors
    make another tensor.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            left, right, *rest = args
            ends = rest[0] if rest else (kwargs or {}).get("offs")
            return left.new_empty(_grouped_shape(left, right, ends))
        if func is torch.ops.aten.bincount.default and len(args) == 3 and args[1] is None:
            numbers, _, bins = args
            return numbers.new_empty(bins, dtype=torch.int64)
        if getattr(func, "_schema", None) is not None and func._schema.name == "_c10d_functional::wait_tensor":
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


def _grouped_shape(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor | None) -> tuple[int, ...]:
    """Return the shape of a grouped product; groups are matrices, or slices of one along rows, columns or the summed dim."""
    rows, columns = left.shape[-2], right.shape[-1]
    if left.dim() == right.dim():
        groups = left.shape[0] if left.dim() == 3 else ends.shape[0] if ends is not None else 1
        return (groups, rows, columns)
    return (rows, columns)


@contextmanager
def fake_run(model: nn.Module, batch: Any, device: torch.device) -> Iterator[Any]:
    """Within the block, run a model on fake tensors in place of its parameters and buffers, and leave no traces.

    Everything computed from them is fake too, and so would be what the model keeps of it. The model's own tensors, which may
    be on the meta device, come back at the end. Tied parameters stay tied.

    Yields the batch, of fake tensors on `device`.
    """
    fakes: dict[int, Any] = {}
    originals: list[tuple[dict[str, Any], str, Any]] = []

    def fake_of(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if id(item) not in fakes:
            fake = _empty_like(item, device)
            fakes[id(item)] = nn.Parameter(fake, False) if isinstance(item, nn.Parameter) else fake
            fakes[id(item)].requires_grad_(item.requires_grad)
        return fakes[id(item)]

    with (
        restored_attributes(model),
        restored_generators(model),
        other_sharded_parameters(model) as use_others,
        _FakeMode(allow_non_fake_inputs=True),
    ):
        try:
            for module in model.modules():
                for tensors in (module._parameters, module._buffers):
                    originals += [(tensors, name, tensor) for name, tensor in tensors.items()]
                    tensors.update({name: fake_of(tensor) for name, tensor in tensors.items()})
            use_others()
            yield tree_map(fake_of, batch)
        finally:
            for tensors, name, tensor in originals:
                tensors[name] = tensor


def _empty_like(tensor: Any, device: torch.device) -> Any:
    """Return a tensor of the same layout on a device; of a DTensor and its kin, one that holds parts of the same layouts."""
    if not is_traceable_wrapper_subclass(tensor):
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    # Not all of them are tensors: a DTensor also lists its device mesh.
    parts = {
        name: _empty_like(part, device) if isinstance(part, torch.Tensor) else part for name, part in parts.items()
    }
    return type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
