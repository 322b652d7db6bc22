"""What the tape has to know about an op before it may run it a second time.

Everything is read off the op's schema and tags where they tell the truth; the tables below hold what they do not tell.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFacts:
    """Facts about one op overload.

    `name`: as in value names, "mm" or "mylib:op" outside of ATen.
    `is_view`: makes no storage: every result shares that of an argument, or is no tensor (`prim::device`).
    `is_lazy`: a view that differs from its base by a sign or conjugate that is applied when it is read; no layout tells it.
    `writes`: positions and keywords of the arguments that are written in place.
    `is_random`: reads the generator of its device, so that a second run needs the same generator state.
    `keeps`: results are kept whatever the plan says (see `_ALWAYS_KEPT`).
    `keeps_on_cuda`: the same on a CUDA device, where the kernel's result depends on the order of atomic additions.
    `keeps_with_mask`: the same where an index tensor is a mask; a gather by integers is computed again like any other op.
    `creates`: makes a tensor of undefined or constant content, to be filled by somebody else.
    `changes_layout_only`: an in-place op that changes shape and strides, not the content (`squeeze_`).
    `overwrites`: an in-place op whose result does not depend on the old content.
    `num_returns`: results by schema; None where the op returns a list of tensors.
    `dropout_position`: position of an argument `dropout_p`; the op is not random where that is zero.
    `may_keep`: one of `keeps_on_cuda`, `keeps_with_mask` and `device_keyword`, so that the tape looks at the call and its
        result before it drops it.
    `device_keyword`: whether the op can copy to another device.
    `changes_storage`: writes to a storage, or has a tensor mean something else by it (`changes_layout_only`, `is_lazy`).
    `running_stats`: positions of statistics that the op updates behind its schema's back (batch norm), and of the flag
        that says so.
    """

    name: str
    is_view: bool = False
    is_lazy: bool = False
    writes: tuple[int | str, ...] = ()
    is_random: bool = False
    keeps: bool = False
    keeps_on_cuda: bool = False
    keeps_with_mask: bool = False
    creates: Literal["undefined", "constant"] | None = None
    changes_layout_only: bool = False
    overwrites: bool = False
    num_returns: int | None = 1
    dropout_position: int | None = None
    device_keyword: bool = False
    may_keep: bool = False
    changes_storage: bool = False
    running_stats: tuple[tuple[int, ...], int] | None = None


# Their schema says "fresh tensor", but the result shares the argument's storage.
_UNANNOTATED_VIEWS = frozenset({"_unsafe_view", "_reshape_alias", "lift", "lift_fresh", "detach"})

# Says that it writes to its argument, and tells the allocator something instead.
_NO_WRITES = frozenset({"record_stream"})

_LAZY_VIEWS = frozenset({"_conj", "_neg_view"})

# Small results that other results hang on: a choice that came out differently the second time would be a wrong gradient,
# not a rounding error. (Ops whose output *shape* depends on data carry a tag and are kept for the same reason.)
_INDEX_LIKE = frozenset(
    {"topk", "sort", "msort", "argsort", "argmax", "argmin", "max", "min", "kthvalue", "median", "nanmedian", "mode"}
    | {"searchsorted", "bucketize", "multinomial", "randperm", "randint", "bincount", "histc", "aminmax"}
)

# A result of these is empty unless an argument requires grad, which it never does below autograd.
_GRAD_DEPENDENT = frozenset({"_sparse_mm_reduce_impl"})

# Every rank would have to run a collective again at the same moment.
_COLLECTIVE_NAMESPACES = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem", "fsdp"}
)

# CUDA kernels of these add in an order that changes from run to run
# (torch.use_deterministic_algorithms lists them), so a second run need not give the same bits.
_ATOMIC_ON_CUDA = frozenset(
    {"index_add", "index_add_", "index_put", "index_put_", "_index_put_impl_", "put", "put_", "index_reduce"}
    | {"index_reduce_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "cumsum", "cumsum_"}
    | {"_embedding_bag", "segment_reduce", "bilinear", "histogram", "index_copy", "index_copy_"}
    | {"max_unpool2d", "max_unpool3d", "nll_loss2d_forward"}
)
# Where two sources have one target, the last one stays; a number has no order.
_LAST_ONE_STAYS_ON_CUDA = frozenset({("scatter", "src"), ("scatter_", "src")})

# Tagged as ops whose shape depends on data, which they are only where an index is a mask.
_GATHERS = frozenset({"index"})

# Kernels that PyTorch cannot see (Triton, ctypes) get their output buffer from one of these and fill it behind the
# dispatcher: what is read from such a buffer is not what the op made.
_UNDEFINED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
_CONSTANT = frozenset(
    {"zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full"}
)

# These change which bytes a tensor is about: what was known of its storage does not hold any more.
_MOVES = frozenset({"set_", "resize_", "resize_as_", "_resize_output_"})

_OVERWRITES = frozenset(
    {"bernoulli_", "uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_", "fill_"}
    | {"zero_", "copy_"}
)

# Batch norm updates its running statistics, and its schema does not say so. Without statistics to update, the same
# kernel computes the same output, so that is how it is run again: positions of (mean, variance) and of `training`.
_RUNNING_STATS = {
    "native_batch_norm": ((3, 4), 5),
    "cudnn_batch_norm": ((3, 4), 5),
    "miopen_batch_norm": ((3, 4), 5),
}

# Fake tensors answer what C++ asks about them by ops of this namespace.
_QUESTIONS = "prim"

_REPLAYABLE_NAMESPACES = frozenset({"aten", "prims", "torchvision"})


@functools.cache
def facts_of(func: Any) -> OpFacts:
    """Return the facts about an op; higher-order ops (compiled code, flex attention) are opaque and kept."""
    if not isinstance(func, torch._ops.OpOverload):
        return OpFacts(name=str(getattr(func, "__name__", func)), keeps=True, num_returns=None)
    schema = func._schema
    namespace, name = schema.name.split("::")
    returns = schema.returns
    aliased = [r.alias_info for r in returns if r.alias_info is not None]
    writes: tuple[int | str, ...] = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and name not in _NO_WRITES
    )
    is_unordered_on_cuda = name in _ATOMIC_ON_CUDA or (name, schema.overload_name) in _LAST_ONE_STAYS_ON_CUDA
    arguments = [argument.name for argument in schema.arguments]
    is_foreign = namespace not in _REPLAYABLE_NAMESPACES
    tags = func.tags
    changes_layout_only = torch.Tag.inplace_view in tags and name not in _MOVES
    return OpFacts(
        name=name if namespace == "aten" else f"{namespace}:{name}",
        is_view=namespace == _QUESTIONS
        or name in _NO_WRITES
        or (not writes and name not in _LAZY_VIEWS and (bool(aliased) or name in _UNANNOTATED_VIEWS)),
        is_lazy=name in _LAZY_VIEWS,
        writes=writes,
        # A custom op can read the generator without a tag that says so (flash-attn's dropout does).
        is_random=torch.Tag.nondeterministic_seeded in tags or is_foreign,
        keeps=name in _INDEX_LIKE
        or name in _GRAD_DEPENDENT
        or namespace in _COLLECTIVE_NAMESPACES
        or (torch.Tag.dynamic_output_shape in tags and name not in _GATHERS)
        or torch.Tag.data_dependent_output in tags
        or name in _MOVES,
        keeps_on_cuda=is_unordered_on_cuda,
        keeps_with_mask=name in _GATHERS,
        creates="undefined" if name in _UNDEFINED else "constant" if name in _CONSTANT else None,
        changes_layout_only=changes_layout_only,
        overwrites=name in _OVERWRITES,
        num_returns=None if any("[]" in str(r.type) or "List" in str(r.type) for r in returns) else len(returns),
        dropout_position=arguments.index("dropout_p") if "dropout_p" in arguments else None,
        device_keyword=name == "_to_copy",
        may_keep=is_unordered_on_cuda or name in _GATHERS or name == "_to_copy",
        changes_storage=bool(writes) or changes_layout_only or name in _LAZY_VIEWS,
        running_stats=_RUNNING_STATS.get(name),
    )
