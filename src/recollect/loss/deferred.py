"""Deferred logits: a tensor subclass that stands for `linear(hidden, weight)` between a model's LM head and its loss.

The model's own code between the two runs unchanged. Its operations on the logits are recorded: casts, factors and tanh
(softcapping) are later applied to each chunk; reshapes and slices of tokens are applied to the hidden states. When
`cross_entropy` gets deferred logits, it computes the loss in chunks. Anything else would need the logits and raises: either
the loss is exactly the model's, or there is an error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recollect._torch_private import disable_torch_function
from recollect.errors import ChunkedLossError
from recollect.loss.chunked import chunked_cross_entropy

_CASTS = ("float", "double", "half", "bfloat16", "to", "type")
_ELEMENTWISE = ("mul", "multiply", "div", "divide", "tanh")
_RESHAPES = ("view", "reshape", "flatten", "contiguous", "__getitem__")
# Facts that need no content of the tensor.
_FACTS = {"size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "__len__"}
_PROPERTIES = {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_meta", "is_leaf"}


@dataclass
class LossCall:
    """One forward of a model with a chunked loss, and its progress."""

    model_name: str
    num_chunks: int
    has_logits: bool = False
    """The head was called."""
    has_loss: bool = False
    """`cross_entropy` got the head's result."""


@dataclass(frozen=True)
class _Recipe:
    """How to compute the logits: the head's arguments, and the model's operations on the result."""

    call: LossCall
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    # Of the head's product, as autocast has it there, and of the result now.
    product_dtype: torch.dtype
    dtype: torch.dtype
    steps: tuple[Callable[[Tensor], Tensor], ...] = field(default=())

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.hidden.shape[:-1], self.weight.shape[0])


class DeferredLogits(Tensor):
    """Logits [..., V] that are never computed; see the top of this file."""

    recipe: _Recipe

    @staticmethod
    def __new__(cls, recipe: _Recipe) -> DeferredLogits:
        made: DeferredLogits = Tensor._make_wrapper_subclass(
            cls, recipe.shape, dtype=recipe.dtype, device=recipe.hidden.device
        )
        made.recipe = recipe
        return made

    @classmethod
    def of_head(cls, call: LossCall, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> DeferredLogits:
        call.has_logits = True
        dtype = hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type) and dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(hidden.device.type)
        return cls(_Recipe(call, hidden, weight, bias, dtype, dtype))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func is F.cross_entropy:
            return _loss(*args, **kwargs)
        if name in _FACTS or (name == "__get__" and func.__self__.__name__ in _PROPERTIES):
            with disable_torch_function():
                return func(*args, **kwargs)
        logits = next((item for item in args if isinstance(item, DeferredLogits)), None)
        recipe = None
        if logits is not None:
            if name in _CASTS:
                recipe = _cast(logits.recipe, name, args[1:], kwargs)
            elif name in _ELEMENTWISE:
                recipe = _elementwise(logits.recipe, getattr(torch, name), args, kwargs)
            elif name in _RESHAPES and logits is args[0]:
                recipe = _reshape(logits.recipe, name, args[1:], kwargs)
        if recipe is None:
            raise refusal(None if logits is None else logits.recipe.call, f"calls {name} on the logits")
        return DeferredLogits(recipe)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise: ops that bypass `__torch_function__` are not supported."""
        raise refusal(None, f"calls {func} on the logits")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredLogits(shape={list(self.recipe.shape)}, dtype={self.recipe.dtype}), never computed"


def refusal(call: LossCall | None, what: str) -> ChunkedLossError:
    name, chunks = ("the model", "chunks") if call is None else (call.model_name, f"{call.num_chunks} chunks")
    return ChunkedLossError(
        f"cannot compute the loss of {name} in {chunks}: its code {what}, expected a cast, a product with or a quotient by a "
        "number, tanh, a reshape or cut that leaves the last dimension whole, and then cross_entropy. Logits are never "
        "there as a whole. Use loss_chunks=1."
    )


def _loss(
    logits: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy`, with its parameters."""
    recipe: _Recipe = logits.recipe
    call = recipe.call
    if weight is not None:
        raise refusal(call, "gives cross_entropy a weight for each class")
    if size_average is not None or reduce is not None:
        raise refusal(call, "gives cross_entropy size_average or reduce")
    if len(recipe.shape) != 2 or target.shape != recipe.shape[:1]:
        raise refusal(call, f"gives cross_entropy logits {list(recipe.shape)} and a target {list(target.shape)}")
    device_type = recipe.hidden.device.type
    with torch.autocast(device_type, enabled=False):
        loss = chunked_cross_entropy(
            recipe.hidden.to(recipe.product_dtype),
            recipe.weight,
            target,
            num_chunks=call.num_chunks,
            bias=recipe.bias,
            ignore_index=ignore_index,
            reduction=reduction,  # type: ignore[arg-type]
            label_smoothing=label_smoothing,
            transform=functools.partial(functools.reduce, lambda logits, step: step(logits), recipe.steps)
            if recipe.steps
            else None,
        )
    call.has_loss = True
    # Autocast runs cross_entropy in fp32; otherwise its result has the dtype of its input.
    return loss if torch.is_autocast_enabled(device_type) else loss.to(recipe.dtype)


def _cast(recipe: _Recipe, name: str, args: Any, kwargs: Any) -> _Recipe | None:
    with disable_torch_function():
        facts = getattr(torch.empty(0, dtype=recipe.dtype, device=recipe.hidden.device), name)(*args, **kwargs)
    if not isinstance(facts, Tensor) or facts.device != recipe.hidden.device:
        return None
    dtype: torch.dtype = facts.dtype
    if dtype is recipe.dtype:
        return recipe
    if dtype is torch.float64:
        return None  # the loss would be computed in fp32
    if dtype is torch.float32 and not recipe.steps:
        return replace(recipe, dtype=dtype)  # the loss is computed in fp32 anyway
    return replace(recipe, dtype=dtype, steps=(*recipe.steps, lambda raw: raw.to(dtype)))


def _elementwise(recipe: _Recipe, function: Callable[..., Tensor], args: Any, kwargs: Any) -> _Recipe | None:
    if kwargs or any(
        type(item) not in (int, float)
        and not (type(item) is Tensor and item.dim() == 0 and not item.requires_grad)
        and not isinstance(item, DeferredLogits)
        for item in args
    ):
        return None
    if function in (torch.div, torch.divide) and not isinstance(args[0], DeferredLogits):
        return None
    if sum(isinstance(item, DeferredLogits) for item in args) > 1:
        return None
    dtype = recipe.dtype

    def step(logits: Tensor) -> Tensor:
        # A cast to a wider dtype before the first step was not recorded as a step.
        return function(*(logits.to(dtype) if isinstance(item, DeferredLogits) else item for item in args))

    return replace(recipe, steps=(*recipe.steps, step))


def _reshape(recipe: _Recipe, name: str, args: Any, kwargs: Any) -> _Recipe | None:
    """Apply a reshape of the logits to the hidden states, if it leaves the last dimension unchanged."""
    if name == "contiguous":
        return recipe
    if name == "__getitem__":
        return _cut(recipe, args[0])
    hidden, vocab_size = recipe.hidden, recipe.shape[-1]
    if name == "flatten":
        start, end = _bound_flatten(*args, **kwargs)
        leaves_last = end % hidden.dim() != hidden.dim() - 1
        return replace(recipe, hidden=hidden.flatten(start, end)) if leaves_last else None
    sizes = tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    if kwargs or not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    num_tokens = math.prod(recipe.shape[:-1])
    if sizes[-1] != vocab_size and not (sizes[-1] == -1 and math.prod(sizes[:-1]) == num_tokens):
        return None
    return replace(recipe, hidden=hidden.reshape(*sizes[:-1], hidden.shape[-1]))


def _bound_flatten(start_dim: int = 0, end_dim: int = -1) -> tuple[int, int]:
    return start_dim, end_dim


def _cut(recipe: _Recipe, index: Any) -> _Recipe | None:
    items = index if isinstance(index, tuple) else (index,)
    if not all(item is Ellipsis or isinstance(item, slice) for item in items):
        return None
    slices = [item for item in items if item is not Ellipsis]
    reaches_last = len(slices) == len(recipe.shape) or (Ellipsis in items and items[-1] is not Ellipsis)
    if reaches_last and slices[-1] != slice(None):
        return None
    return replace(recipe, hidden=recipe.hidden[index])
