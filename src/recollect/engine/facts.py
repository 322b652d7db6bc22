"""Collects the facts about an op that the tape needs before it may run it a second time.

Facts come from the op's schema and tags where those tell the truth; the tables below supply the rest. `OpMode` is the base of
the library's dispatch modes that may be active while the user's model trains.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from recollect._torch_private import (
    TorchDispatchMode,
    desugars,
    fake_mode,
    is_traceable_wrapper_subclass,
    tracing_mode,
    untraced,
)
from recollect.tensors import tensors_in


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFacts:
    """Facts about one op overload.

    `name`: as in value names, "mm" or "mylib:op" outside ATen.
    `is_view`: makes no storage: every result shares an argument's storage, or is not a tensor (`prim::device`).
    `is_lazy`: a view whose sign or conjugate is only applied when it is read, which its layout does not show.
    `writes`: positions and keywords of the arguments that are written in place.
    `is_random`: reads its device's generator, so a second run needs the same generator state.
    `draws_elsewhere`: draws from a state of its library's instead, which it moves on.
    `keeps`: results are kept whatever the plan says (`_INDEX_LIKE`, collectives and others; see `facts_of`).
    `keeps_on_cuda`: the same on a CUDA device, where the kernel's result depends on the order of atomic additions.
    `keeps_if_searched`: the same on a CUDA device while cuDNN searches for the fastest algorithm: each thread searches for
        itself, and backward has its own threads.
    `keeps_with_mask`: the same if an index tensor is a mask; a gather by integers can be recomputed like any other op.
    `creates`: makes a tensor with undefined or constant content, for something else to fill.
    `changes_layout_only`: an in-place op that changes shape and strides, not content (`squeeze_`).
    `overwrites`: an in-place op whose result does not depend on the old content.
    `num_returns`: number of results in the schema; None if the op returns a list of tensors.
    `dropout_position`: position of the probability of dropout; the op is not random if that is zero.
    `may_keep`: one of `keeps_on_cuda`, `keeps_if_searched`, `keeps_with_mask` and `device_keyword` is set, so the tape
        inspects the call and its result before dropping the result.
    `device_keyword`: whether the op can copy to a different device.
    `changes_storage`: writes to a storage, or changes how a tensor reads it (`changes_layout_only`, `is_lazy`).
    `follows_settings`: its result depends on switches of kernels or on the default dtype.
    `is_collective`: every rank has to run it at the same time.
    `may_replay`: a collective that makes new tensors, which can run again if all ranks run it again; `keeps` is still
        set, for callers that do not know whether they do.
    `writes_unseen`: its writes raise no version (c10d's collectives).
    `moves_storage`: changes which bytes a tensor refers to (`_MOVES`).
    `is_lift`: shows a tensor that Python made (`torch.tensor`) to PyTorch for the first time.
    `scales_first`: adds its first argument, times `beta`, to a product.
    `running_stats`: positions of statistics that the op updates without its schema saying so (batch norm), and of the
        flag that makes it do so.
    """

    name: str
    is_view: bool = False
    is_lazy: bool = False
    writes: tuple[int | str, ...] = ()
    is_random: bool = False
    draws_elsewhere: bool = False
    keeps: bool = False
    keeps_on_cuda: bool = False
    keeps_if_searched: bool = False
    keeps_with_mask: bool = False
    creates: Literal["undefined", "constant"] | None = None
    changes_layout_only: bool = False
    overwrites: bool = False
    num_returns: int | None = 1
    dropout_position: int | None = None
    device_keyword: bool = False
    may_keep: bool = False
    changes_storage: bool = False
    follows_settings: bool = False
    is_collective: bool = False
    may_replay: bool = False
    writes_unseen: bool = False
    moves_storage: bool = False
    is_lift: bool = False
    scales_first: bool = False
    running_stats: tuple[tuple[int, ...], int] | None = None

    def ignores_first(self, args: Any, kwargs: Any) -> bool:
        return self.scales_first and kwargs.get("beta", 1) == 0 and not is_traceable_wrapper_subclass(args[0])

    @property
    def changes_nothing(self) -> bool:
        """Whether it computes no value: a view, or a different way to read memory."""
        return self.is_view or self.is_lazy or self.changes_layout_only

    def updated_by(self, args: Any) -> tuple[int, ...]:
        return self.running_stats[0] if self.running_stats is not None and args[self.running_stats[1]] else ()

    def written_by(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        found = (
            kwargs.get(where) if isinstance(where, str) else args[where] if where < len(args) else None
            for where in self.writes
        )
        return tensors_in(list(found))


# The schemas of these promise a fresh tensor, but the result shares the argument's storage.
_UNANNOTATED_VIEWS = frozenset(
    {"_unsafe_view", "_reshape_alias", "lift", "lift_fresh", "detach", "unsafe_split", "unsafe_split_with_sizes"}
)

# The schema says that this writes to its argument, but it only informs the allocator.
_NO_WRITES = frozenset({"record_stream"})

_LAZY_VIEWS = frozenset({"_conj", "_neg_view"})

# Small results that others depend on: a choice that came out differently the second time would make the gradient wrong,
# not just rounded differently. (Ops whose output *shape* depends on data carry a tag and are kept for the same reason.)
_INDEX_LIKE = frozenset(
    {"topk", "sort", "msort", "argsort", "argmax", "argmin", "max", "min", "kthvalue", "median", "nanmedian", "mode"}
    | {"searchsorted", "bucketize", "multinomial", "randperm", "randint", "bincount", "histc", "aminmax"}
)

# One result of these is empty unless an argument requires grad, which none does below autograd.
_GRAD_DEPENDENT = frozenset({"_sparse_mm_reduce_impl"})

# To run a collective again, every rank has to do so at the same time.
_COLLECTIVE_NAMESPACES = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem", "fsdp"}
)

# These make new tensors and write to none, so a second run needs only the other ranks.
_FUNCTIONAL_COLLECTIVES = frozenset(
    {"all_gather_into_tensor", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor", "all_reduce", "broadcast"}
    | {"reduce_scatter_tensor_coalesced", "all_reduce_coalesced", "all_to_all_single", "shard_dim_alltoall"}
)
# The schemas of c10d's ops do not say that those with a trailing underscore write to their first argument, nor do these.
_UNANNOTATED_WRITES = {"irecv": 0, "batch_p2p_ops": 3}
# These pass on a collective's result: once it is there, or in a wrapper that waits for it when it is first read.
_PASS_ON_COLLECTIVES = frozenset({"wait_tensor", "_wrap_tensor_autograd"})

# CUDA kernels of these add in an order that varies between runs (torch.use_deterministic_algorithms lists them), so a
# second run need not give the same bits.
_ATOMIC_ON_CUDA = frozenset(
    {"index_add", "index_add_", "index_put", "index_put_", "_index_put_impl_", "put", "put_", "index_reduce"}
    | {"index_reduce_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "cumsum", "cumsum_"}
    | {"_embedding_bag", "segment_reduce", "bilinear", "histogram", "index_copy", "index_copy_"}
    | {"max_unpool2d", "max_unpool3d", "nll_loss2d_forward", "_cudnn_ctc_loss"}
    # Along the only dimension, as `cumsum`; PyTorch does not list them.
    | {"cumprod", "cumprod_", "logcumsumexp", "_logcumsumexp"}
)
_CONVOLUTIONS = frozenset({"convolution", "_convolution", "cudnn_convolution", "cudnn_convolution_transpose"})
# If two sources have the same target, the last write wins; a scalar source has no order.
_LAST_ONE_STAYS_ON_CUDA = frozenset({("scatter", "src"), ("scatter_", "src")})

# Recurrent layers with dropout between them: masks come from `dropout_state`, though schemas say that it is only read.
_DRAW_ELSEWHERE = frozenset({"_cudnn_rnn", "miopen_rnn", "_cudnn_init_dropout_state"})

# An index tensor of these types is a mask: it marks elements instead of giving their positions.
_MASKS = frozenset({torch.bool, torch.uint8})
# Tagged as having data-dependent shapes, which is only true if an index is a mask.
_GATHERS = frozenset({"index"})

# Kernels that PyTorch cannot see (Triton, ctypes) get their output buffer from one of these and fill it behind the
# dispatcher's back: later reads of the buffer do not see the op's result.
_UNDEFINED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
_CONSTANT = frozenset(
    {"zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full"}
)

# These change which bytes a tensor refers to: knowledge of its storage no longer holds.
_MOVES = frozenset({"set_", "resize_", "resize_as_", "_resize_output_"})

_OVERWRITES = frozenset(
    {"bernoulli_", "uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_", "fill_"}
    | {"zero_", "copy_"}
)

# Batch norm updates its running statistics without its schema saying so. It is run again without statistics, for which
# the same kernel computes the same output: positions of (mean, variance) and of `training`.
_RUNNING_STATS = {
    "native_batch_norm": ((3, 4), 5),
    "cudnn_batch_norm": ((3, 4), 5),
    "miopen_batch_norm": ((3, 4), 5),
}

# Products run on one of several libraries, in one of several precisions; the others make the default dtype out of none.
_FOLLOWS_SETTINGS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "convolution", "_convolution", "matmul"}
    | {"_scaled_mm_v2", "_scaled_grouped_mm_v2"}
    | {"_grouped_mm", "_scaled_mm", "mkldnn_rnn_layer", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_cudnn_rnn"}
    | {"arange", "linspace", "logspace", "rand", "randn", "empty", "zeros", "ones", "full", "scalar_tensor", "eye"}
    | {"div"}
)

# Fake tensors answer C++ queries through ops of the first of these; ops of the second name what runs in a trace.
_NO_COMPUTATION = frozenset({"prim", "profiler"})

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
    if not writes and namespace in _COLLECTIVE_NAMESPACES:
        writes = _unannotated_writes(namespace, name)
    is_unordered_on_cuda = name in _ATOMIC_ON_CUDA or (name, schema.overload_name) in _LAST_ONE_STAYS_ON_CUDA
    arguments = [argument.name for argument in schema.arguments]
    dropout = "dropout" if name in _DRAW_ELSEWHERE else "dropout_p"
    is_collective = namespace in _COLLECTIVE_NAMESPACES
    is_foreign = namespace not in _REPLAYABLE_NAMESPACES and not is_collective
    tags = func.tags
    changes_layout_only = torch.Tag.inplace_view in tags and name not in _MOVES
    return OpFacts(
        name=name if namespace == "aten" else f"{namespace}:{name}",
        is_view=namespace in _NO_COMPUTATION
        or name in _NO_WRITES
        or (is_collective and name in _PASS_ON_COLLECTIVES)
        or (not writes and name not in _LAZY_VIEWS and (bool(aliased) or name in _UNANNOTATED_VIEWS)),
        is_lazy=name in _LAZY_VIEWS,
        writes=writes,
        # A custom op can read the generator without a tag that says so (flash-attn's dropout does).
        is_random=torch.Tag.nondeterministic_seeded in tags or is_foreign,
        draws_elsewhere=name in _DRAW_ELSEWHERE,
        keeps=not (writes or any("Tensor" in str(r.type) for r in returns))
        or name in _INDEX_LIKE
        or name in _GRAD_DEPENDENT
        or is_collective
        or (torch.Tag.dynamic_output_shape in tags and name not in _GATHERS)
        or torch.Tag.data_dependent_output in tags
        or name in _MOVES,
        keeps_on_cuda=is_unordered_on_cuda,
        keeps_if_searched=name in _CONVOLUTIONS,
        keeps_with_mask=name in _GATHERS,
        creates="undefined" if name in _UNDEFINED else "constant" if name in _CONSTANT else None,
        changes_layout_only=changes_layout_only,
        overwrites=name in _OVERWRITES,
        num_returns=None if any("[]" in str(r.type) or "List" in str(r.type) for r in returns) else len(returns),
        dropout_position=arguments.index(dropout) if dropout in arguments else None,
        device_keyword=name == "_to_copy",
        may_keep=is_unordered_on_cuda or name in _CONVOLUTIONS or name in _GATHERS or name == "_to_copy",
        changes_storage=bool(writes) or changes_layout_only or name in _LAZY_VIEWS,
        follows_settings=is_foreign or name in _FOLLOWS_SETTINGS,
        is_collective=is_collective,
        may_replay=is_collective and name in _FUNCTIONAL_COLLECTIVES and not writes,
        writes_unseen=is_collective and bool(writes),
        moves_storage=name in _MOVES,
        is_lift=name in ("lift", "lift_fresh"),
        scales_first=any(a.name == "beta" and a.kwarg_only for a in schema.arguments) and not writes,
        running_stats=_RUNNING_STATS.get(name),
    )


def _unannotated_writes(namespace: str, name: str) -> tuple[int, ...]:
    if namespace == "c10d":
        return (0,) if name.endswith("_") else ()
    return (_UNANNOTATED_WRITES[name],) if name in _UNANNOTATED_WRITES else ()


def results_of(output: Any) -> Sequence[Any]:
    return output if isinstance(output, (tuple, list)) else (output,)


def must_keep_result(facts: OpFacts, args: Any, output: Any, kwargs: Any) -> bool:
    """Whether to keep this call's result: rule 4, on CUDA or for masks, or a copy between devices (it would sync)."""
    if facts.keeps_with_mask:
        return any(index is not None and index.dtype in _MASKS for index in args[1])
    if facts.keeps_on_cuda or facts.keeps_if_searched:
        return varies_on_cuda(facts, output)
    # PyTorch also names the device in copies that stay on it (the last op of `rms_norm` in bf16).
    return facts.device_keyword and kwargs.get("device") is not None and bool(output.device != args[0].device)


def varies_on_cuda(facts: OpFacts, output: Any) -> bool:
    """Whether a second run of an op on a CUDA device need not give the same bits."""
    varies = facts.keeps_on_cuda or (facts.keeps_if_searched and torch.backends.cudnn.benchmark)
    return varies and any(tensor.is_cuda for tensor in tensors_in(output))


class OpMode(TorchDispatchMode):
    """A dispatch mode that leaves `torch.compile` alone: compiled code runs compiled, and the mode is not traced.

    Ops on DTensors and their kin reappear as ops on their inner tensors.
    """

    # Ops that run other ops (random ops of DTensors on CUDA, flex attention) come like any other; `facts_of` knows them.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = fake_mode()

    def is_foreign(self) -> bool:
        """Whether this is not part of the step but a trial on fake tensors, as DTensors make before an op runs, or traced."""
        return fake_mode() is not self._fakes or tracing_mode() is not None

    @untraced
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(desugars(kind) for kind in types):
            return NotImplemented
        return self.run_op(func, args, kwargs or {})

    def run_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if "__torch_dispatch__" in vars(cls):
            untraced(vars(cls)["__torch_dispatch__"])

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled regions run compiled: the mode sees each as one opaque op."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Keep torch from wrapping `__torch_dispatch__` (1 us per op); `untraced` serves the same purpose.
        return False
