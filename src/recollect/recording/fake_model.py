"""Run a model on fake tensors: shapes without memory, ops without arithmetic.

They are on the CPU where there is no GPU, and may represent tensors on one: see `_CudaKernels`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from recollect._torch_fsdp import other_sharded_parameters
from recollect._torch_private import FakeTensorMode, HigherOrderOperator, is_traceable_wrapper_subclass, tree_map
from recollect._torch_replicate import without_replicas
from recollect.engine.facts import facts_of
from recollect.errors import ConfigWarning
from recollect.recording.eager_masks import eager_masks
from recollect.recording.restored_state import restored_attributes, restored_generators
from recollect.warning import warn_user

_composite_attention = F.scaled_dot_product_attention
OnOp = Callable[[Any, Any, Any, Any], None]
# Kernels of recurrent layers, which keep for backward what has no size on fake tensors.
_RECURRENT = frozenset({"mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"})
_PRODUCTS = frozenset({"_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "_scaled_mm_v2"})


class _FakeMode(FakeTensorMode):
    """PyTorch's fake tensors with more ops.

    Grouped matrix products of any dtype: PyTorch's fake tensors insist on bf16, its kernels do not. Products in 8 bits with any
    scales, which fake tensors do not support. `bincount` with a given number of bins, with which models count the tokens of
    each expert; PyTorch's fake tensors refuse it, since larger numbers would add bins. The end of a collective returns
    its argument, where PyTorch's fake tensors make a new tensor.

    Args:
        kernels: type of the device whose kernels they stand for.
        on_op: called after each op with the op, its arguments and its result, but not for ops that an op is made of.
    """

    supports_higher_order_operators = True

    def __init__(self, kernels: str, on_op: OnOp | None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.kernels = kernels
        self._on_op = on_op
        self._depth = 0
        self._in_rule = set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            output = self._run_outer(func, types, args, kwargs)
        else:
            self._depth += 1
            try:
                output = self._run(func, types, args, kwargs)
            finally:
                self._depth -= 1
        if self._on_op is not None and not self._depth:
            self._on_op(func, args, kwargs or {}, output)
        return output

    def _run_outer(self, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that runs others by its rule for PyTorch's own mode, which subclasses lack; it may send the op back."""
        rule = op.python_key_table.get(FakeTensorMode)
        if rule is None or op in self._in_rule:
            return super().__torch_dispatch__(op, types, args, kwargs)
        self._in_rule.add(op)
        try:
            return rule(self, *args, **(kwargs or {}))
        finally:
            self._in_rule.discard(op)

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        name = facts_of(func).name
        if name in _RECURRENT and torch.is_grad_enabled():
            warn_user(
                "recollect: the model has recurrent layers (nn.LSTM, GRU, RNN), and what their kernels keep for backward has "
                "no size on fake tensors: predicted peaks are too low. Record on real tensors.",
                ConfigWarning,
            )
        if name in _PRODUCTS and args[0].dtype is not torch.bfloat16:
            given = dict(
                zip((argument.name for argument in func._schema.arguments), args, strict=False), **(kwargs or {})
            )
            left, right, dtype = args[0], args[1], given.get("out_dtype") or args[0].dtype
            if "grouped" not in name:
                return left.new_empty(left.shape[0], right.shape[1], dtype=dtype)
            return left.new_empty(_grouped_shape(left, right, given.get("offs")), dtype=dtype)
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


class _CudaKernels(TorchFunctionMode):
    """Calls the kernels that PyTorch chooses on CUDA, where it would choose several others by the CPU's rules.

    Examples are dropout with a mask of one byte per element, and attention with dropout or for queries of the last positions.
    `_scaled_dot_product_flash_attention` also represents cuDNN's kernel and the "efficient" one, which save as much.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _KERNELS.get(func, func)(*args, **(kwargs or {}))


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if inplace or not training or not 0 < p < 1:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    # By name: PyTorch's module of these biases imports the compiler, which others do not need.
    are_last = type(attn_mask).__name__ == "CausalBias"
    if are_last or (dropout_p and attn_mask is None and query.shape[-1] == value.shape[-1]):
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal or are_last, scale=scale)[0]
    return _composite_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


_KERNELS: dict[Any, Callable[..., torch.Tensor]] = {F.dropout: _dropout, _composite_attention: _attention}


@contextmanager
def _cuda_attention() -> Iterator[None]:
    """Call CUDA's attention in code to be compiled, which sees no modes; the compiler has its own dropout on all devices."""
    F.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _composite_attention


def kernels_of(tensor: torch.Tensor) -> str:
    """Return the type of the device whose kernels run on a tensor; a fake one may stand for one on a different device."""
    mode = getattr(tensor, "fake_mode", None)
    return mode.kernels if isinstance(mode, _FakeMode) else tensor.device.type


@contextmanager
def fake_run(
    model: nn.Module,
    batch: Any,
    device: torch.device,
    *,
    kernels: str = "",
    compiles: bool = False,
    on_op: OnOp | None = None,
) -> Iterator[Any]:
    """Within the block, run a model on fake tensors in place of its parameters and buffers, and leave no traces.

    Everything computed from them is fake too, including results that the model keeps. The model's own tensors,
    which may be on the meta device, are restored at the end. Tied parameters stay tied.

    `kernels`: type of the device that they stand for; default: that of `device`. `compiles`: what runs is to be compiled.
    `on_op`: see `_FakeMode`.

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

    cuda_kernels = _cuda_attention if compiles else _CudaKernels
    with (
        restored_attributes(model),
        restored_generators(model),
        other_sharded_parameters(model) as use_others,
        without_replicas(model),
        eager_masks(batch),
        _FakeMode(kernels or device.type, on_op),
        cuda_kernels() if kernels == "cuda" != device.type else nullcontext(),
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
    """Return a tensor of the same layout on a device; for a DTensor and its kin, one with parts of the same layouts."""
    if not is_traceable_wrapper_subclass(tensor):
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    # Not all of them are tensors: a DTensor also lists its device mesh.
    parts = {
        name: _empty_like(part, device) if isinstance(part, torch.Tensor) else part for name, part in parts.items()
    }
    return type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
