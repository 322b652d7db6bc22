"""Derive the work of an op from its schema and the shapes, strides and dtypes of its tensors.

Traffic counts bytes that the op touches: it reads an expanded tensor once; a lookup reads the rows that it returns, not
the whole table; an op that overwrites in place does not read the old content; views and `empty` touch nothing.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from recollect._torch_private import tree_leaves
from recollect.costs.hardware import Kind
from recollect.costs.roofline import FREE, Work
from recollect.engine.facts import OpFacts, facts_of

DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.float8_e4m3fnuz: "fp8",
    torch.float8_e5m2fnuz: "fp8",
}

# What transformers calls for products of experts where the compiler traces them for the CPU.
_EXPERTS_IN_COMPILED_CODE = "transformers:grouped_mm_fallback"

# Products that PyTorch's flop counter does not know.
_BY_SHAPE = frozenset(
    {"_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "_scaled_mm_v2", _EXPERTS_IN_COMPILED_CODE}
)

_OPS: dict[Kind, frozenset[str]] = {
    # Ops that read only some rows of their first argument: as many elements as they return or are told to look up.
    "gather": frozenset({"embedding", "index", "_unsafe_index", "index_select", "gather", "take", "nll_loss_forward"}),
    # Ops that write only some rows of their first argument.
    "scatter": frozenset(
        {"index_put", "_index_put_impl", "index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce", "put"}
        | {"embedding_dense_backward", "bincount", "histc"}
    ),
    "sort": frozenset({"topk", "sort", "argsort", "msort", "kthvalue", "median", "nanmedian", "_unique2"}),
    "copy": frozenset(
        {"clone", "_to_copy", "copy", "cat", "stack", "repeat", "contiguous", "constant_pad_nd", "fill", "zero", "flip"}
        | {"slice_backward", "select_backward", "roll", "tril", "triu", "arange", "split_with_sizes_copy"}
    ),
    "transcendental": frozenset(
        {"exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tan", "tanh", "sigmoid", "silu", "gelu", "erf"}
        | {"softplus", "mish", "elu", "logit", "acos", "asin", "atan", "atan2", "sinh", "cosh", "log_sigmoid_forward"}
        | {"silu_backward", "gelu_backward", "mish_backward", "softplus_backward", "log_sigmoid_backward"}
    ),
    "softmax": frozenset(
        {"_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "logsumexp"}
    ),
}


def work_of(func: Any, facts: OpFacts, args: Any, kwargs: Any, output: Any) -> Work:
    """Return the work of one run of an op, on real or fake tensors."""
    if facts.is_view or facts.is_lazy or facts.changes_layout_only or facts.creates == "undefined":
        return FREE
    name = facts.name.removesuffix("_")
    named = dict(kwargs or {})
    if named.pop("out", None) is not None:  # `mm(x, y, out=z)` reads no z, and leaves x and y as they are
        facts = replace(facts, writes=())
    tensors = _distinct((args, named))
    results = [t for t in _distinct(output) if not any(t is other for other in tensors)]
    traffic_bytes = float(_traffic_bytes(name, facts, args, tensors, results))
    flops = flops_of(func, args, kwargs, output)
    if flops:
        kind: Kind = "matmul"
        if "attention" in name:
            kind = "attention_backward" if name.endswith("backward") else "attention"
        outputs = sum(t.numel() for t in (results or tensors[:1]) if t.dtype.is_floating_point)
        dtype = _multiplied_dtype(name, tensors)
        return Work(kind, traffic_bytes, 0.0, dtype=dtype, flops=float(flops), outputs=float(max(1, outputs)))
    kind = _kind(func, name)
    counted = results or tensors
    if kind not in ("gather", "scatter"):
        counted = [*tensors, *results]
    elif kind == "scatter":
        counted = tensors[1:] if facts.writes else tensors
    return Work(kind, traffic_bytes, float(max((t.numel() for t in counted), default=0)))


def _distinct(values: Any) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            found.setdefault(id(leaf), leaf)
    return list(found.values())


def _kind(func: Any, name: str) -> Kind:
    tags = getattr(func, "tags", ())
    for kind, names in _OPS.items():
        if name in names:
            return kind
    if torch.Tag.nondeterministic_seeded in tags:
        return "random"
    return "elementwise" if torch.Tag.pointwise in tags else "reduction"


def touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's distinct elements: expanded dimensions count once.

    Example:
        >>> touched_bytes(torch.zeros(3, 1).expand(3, 1000))
        12
    """
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    num_elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride or not size:
            num_elements *= size
    # Windows that overlap (`unfold`) have more elements than there is memory.
    return min(num_elements * tensor.element_size(), tensor.untyped_storage().nbytes())


def _traffic_bytes(
    name: str, facts: OpFacts, args: Any, tensors: list[torch.Tensor], results: list[torch.Tensor]
) -> int:
    written_bytes = sum(touched_bytes(t) for t in results)
    first = args[0] if args and isinstance(args[0], torch.Tensor) else None
    read_bytes = sum(touched_bytes(t) for t in tensors if t is not first)
    if first is None:
        return read_bytes + written_bytes
    if name in _OPS["gather"]:
        looked_up = max((t.numel() for t in (*results, *tensors) if t is not first), default=0)
        return read_bytes + written_bytes + min(touched_bytes(first), looked_up * first.element_size())
    if name in _OPS["scatter"] and facts.writes:
        # Rows are read, added to, and written: as many bytes as the tensor of the target's dtype has, not the indices.
        sources = (touched_bytes(t) for t in tensors if t is not first and t.dtype == first.dtype)
        return read_bytes + 2 * min(touched_bytes(first), max(sources, default=0))
    if facts.writes:
        return read_bytes + touched_bytes(first) * (1 if facts.overwrites else 2)
    return read_bytes + touched_bytes(first) + written_bytes


def _multiplied_dtype(name: str, tensors: list[torch.Tensor]) -> str:
    if any(t.dtype == torch.float8_e8m0fnu for t in tensors):
        return "mxfp8"
    # Scales are the only matrices in fp32 here; those of whole tensors, rows or columns have at most one dimension above 1.
    if name.startswith("_scaled_mm") and any(
        t.dtype == torch.float32 and t.dim() == 2 and min(t.shape) > 1 for t in tensors
    ):
        return "fp8_blockwise"
    dtype = next((DTYPES[t.dtype] for t in tensors if t.dtype in DTYPES), "fp32")
    if dtype == "fp32" and "attention" not in name:
        # PyTorch's setting for fp32 on tensor cores; convolutions have a separate one.
        cudnn: Any = torch.backends.cudnn  # whose `conv` has no type information
        precision = cudnn.conv.fp32_precision if "conv" in name else torch.backends.cuda.matmul.fp32_precision
        return "tf32" if precision == "tf32" else dtype
    return dtype


def flops_of(func: Any, args: Any, kwargs: Any, output: Any) -> float:
    """Return the floating-point operations of an op's matrix products; 0 for an op without any.

    Like PyTorch's flop counter, except for causal attention, where half is computed, and kernels that it does not know.

    Example:
        >>> x = torch.ones(2, 3)
        >>> flops_of(torch.ops.aten.mm.default, (x, x.t()), {}, x @ x.t())
        24.0
    """
    name = facts_of(func).name.removesuffix("_")
    if "scaled_dot_product" in name and "attention" in name:
        return _attention_flops(func, name, args, kwargs)
    if name in _BY_SHAPE:
        return _grouped_flops(args[0], args[1])
    if name == f"{_EXPERTS_IN_COMPILED_CODE}_backward":
        return 2 * _grouped_flops(args[0], args[1])
    formula = flop_registry.get(getattr(func, "overloadpacket", func))
    return float(formula(*args, **kwargs, out_val=output)) if formula is not None else 0.0


def _attention_flops(func: Any, name: str, args: Any, kwargs: Any) -> float:
    """Count two products in forward, five in backward (the scores again, and one each for dV, dP, dQ, dK).

    PyTorch's flop counter has no entry for the CPU's kernel, and none of its entries halves causal attention.
    """
    is_backward = name.endswith("backward")
    query, _, value = args[1:4] if is_backward else args[:3]
    *queries, key_width = query.shape
    num_keys, value_width = value.shape[-2:]
    products = 3 * key_width + 2 * value_width if is_backward else key_width + value_width
    pairs = math.prod((*queries, num_keys))
    names = [argument.name for argument in func._schema.arguments]
    position = names.index("is_causal") if "is_causal" in names else len(args)
    is_causal = args[position] if position < len(args) else kwargs.get("is_causal", False)
    if is_causal:
        # CUDA's flash attention takes queries for the last positions: they see all earlier keys, and half of the others.
        late = queries[-1] if "flash_attention" in name and "cpu" not in name else num_keys
        pairs -= pairs * late / (2 * num_keys)
    return float(2 * pairs * products)


def _grouped_flops(left: torch.Tensor, right: torch.Tensor) -> float:
    """Count the products of each row of `left` with its group's matrix; with two matrices, groups split the depth."""
    depth = left.shape[-1]
    rows = left.numel() // max(1, depth)
    return 2.0 * rows * depth * int(right.shape[-1])
