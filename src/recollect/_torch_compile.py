"""Every private name of PyTorch's compiler that the compile engine uses, each with the reason why a public one is not enough.

Importing this imports the compiler, which takes seconds: only files that compile something import it, inside functions where
they are imported by others.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch import fx
from torch._dynamo import compiled_autograd, eval_frame
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._inductor.graph import GraphLowering
from torch.utils.checkpoint import CheckpointPolicy

from recollect._torch_dynamo import ERRORS, TracedWhole

__all__ = ["ERRORS", "CustomPartitionerFn", "get_hash_for_files"]

# Fused code computes with more bits than a 16-bit value in memory has. Without this, results would depend on the plan.
ROUNDED_AS_IN_MEMORY = {"emulate_precision_casts": True}

# Joint graphs carry these in `Node.meta`; nothing public tells the module and the op that a node was traced from.
_OP, _AUTOGRAD, _SIDE, _POLICY = "original_aten", "seq_nr", "partitioner_tag", "recompute"


class CompiledWhole(TracedWhole):
    """A function that Inductor compiles into one graph with some options, or whose call raises an error."""

    most_traces = 256  # PyTorch's own limit on those of all plans together.

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        # As `torch.compile` makes it of options.
        backend = torch._TorchCompileInductorWrapper(None, {**ROUNDED_AS_IN_MEMORY, **options}, None)
        super().__init__(function, backend, dynamic=True)


@contextmanager
def quiet_cache() -> Iterator[None]:
    """Keep PyTorch 2.11 from logging a traceback wherever a partitioner keeps its code out of the cache on disk."""
    logger = logging.getLogger("torch._inductor.codecache")

    def says_something(record: logging.LogRecord) -> bool:
        return record.msg != "Failed to pickle cache key"

    logger.addFilter(says_something)
    try:
        yield
    finally:
        logger.removeFilter(says_something)


@contextmanager
def on_fake_tensors(run_kernel: Callable[[str, Any], None]) -> Iterator[None]:
    """Within the block, only code that allocates and calls kernels is compiled, to run on fake tensors, but no kernels.

    It allocates, frees and calls ops of libraries as on real tensors. Nothing of it gets into caches, in memory or on disk.
    `run_kernel` is called in place of each kernel, with its code in C++ and its arguments.
    """

    def load(graph: Any) -> Any:
        code, _ = graph.codegen()
        names: dict[str, Any] = {"__name__": __name__}
        exec(compile(code.value, "<code on fake tensors>", "exec"), names)  # noqa: S102 - Inductor's own text
        # These create and inspect real memory, unseen by fake tensors.
        names |= {
            "empty_strided_cpu": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
            "reinterpret_tensor": lambda tensor, size, stride, offset=0: tensor.as_strided(
                size, stride, tensor.storage_offset() + offset
            ),
            **dict.fromkeys(("assert_size_stride", "assert_alignment"), lambda *_: None),
        }
        return SimpleNamespace(call=names["call"], __file__=None)

    # No C++ compiler is asked what it can do.
    settings = {"force_disable_caches": True, "cpp.vec_isa_ok": True, "compile_threads": 1}
    with (
        mock.patch.object(GraphLowering, "compile_to_module", load),
        mock.patch.object(AsyncCompile, "cpp_pybinding", lambda _, types, code: lambda *args: run_kernel(code, args)),
        inductor_config.patch(settings),
    ):
        yield


def settings_in_the_way() -> Iterator[tuple[str, object, str]]:
    """Return global settings under which compiled code would not follow a plan: name, value, and why."""
    if dynamo_config.disable:
        yield "torch._dynamo.config.disable", True, "nothing is compiled"
    if dynamo_config.compiled_autograd or compiled_autograd.compiled_autograd_enabled:
        yield "torch._dynamo.config.compiled_autograd", True, "backward is recompiled"
    if eval_frame._stance.stance != "default":
        yield "torch.compiler.set_stance", eval_frame._stance.stance, "units would run without their plan"
    if captures_graphs():
        yield "torch._inductor.config.triton.cudagraphs", True, "CUDA graphs hold what is kept in their own pool"
    if functorch_config.activation_memory_budget != 1:
        budget = functorch_config.activation_memory_budget
        yield "torch._functorch.config.activation_memory_budget", budget, "it decides as well what is kept"


def captures_graphs() -> bool:
    return bool(inductor_config.triton.cudagraphs)


def settings_of(compiled: Any) -> dict[str, Any] | None:
    """Return Inductor's settings for what `torch.compile` returned; None for a different backend.

    The public `get_compiler_config` knows none of what was compiled with `fullgraph=True`.
    """
    backend: Any = inspect.getclosurevars(compiled.get_compiler_config).nonlocals["self"].callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend.get_compiler_config() if hasattr(backend, "get_compiler_config") else None


def has_new_settings() -> bool:
    """Whether a setting is in the way that is often changed later; those of `config` take microseconds to read."""
    return compiled_autograd.compiled_autograd_enabled or eval_frame._stance.stance != "default"


def partitioned(joint: fx.GraphModule, inputs: Any, **settings: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph into forward and backward as PyTorch's own partitioner does, obeying the tags of its nodes."""
    # On CUDA a random op that runs again (all attention counts as one) would otherwise draw from a generator of its own: other
    # numbers than without a plan, and its seed would be drawn from the CPU's generator.
    with functorch_config.patch(graphsafe_rng_functionalization=False):
        halves: tuple[fx.GraphModule, fx.GraphModule] = min_cut_rematerialization_partition(joint, inputs, **settings)
    return halves


def merge_equal_nodes(joint: fx.GraphModule) -> None:
    """Drop nodes that nothing reads, and duplicates of other nodes, as the partitioner does first."""
    joint.graph.eliminate_dead_code()
    if functorch_config.cse:
        joint.graph = fx_graph_cse(joint.graph)
    joint.recompile()


def set_policy(node: fx.Node, *, keep: bool) -> None:
    """Tag a node of a joint graph: have its result saved if backward needs it, or never saved."""
    node.meta[_POLICY] = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE


def has_policy(node: fx.Node) -> bool:
    """Whether a node is tagged; nodes inside `torch.utils.checkpoint` come tagged."""
    return node.meta.get(_POLICY) is not None


def clear_policy(node: fx.Node) -> None:
    node.meta.pop(_POLICY, None)


def is_of_backward(node: fx.Node) -> bool:
    return str(node.meta.get(_SIDE, "")) in ("is_backward", "must_be_in_backward")


def traced_op(node: fx.Node) -> Any:
    """Return the op that a node was traced from, which may be one of several that it became; None if unknown."""
    op = node.meta.get(_OP)
    if op is None and isinstance(node.target, torch._ops.OperatorBase) and not is_made_by_inductor(node):
        op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return op
    # Graphs are copied, and ops with them.
    namespace, name = op._schema.name.split("::")
    return getattr(getattr(getattr(torch.ops, namespace), name), op._overloadname)


def autograd_number(node: fx.Node) -> int | None:
    """Return a number that the nodes of one op share, if autograd recorded it; None for nodes that Inductor inserted."""
    return node.meta.get(_AUTOGRAD)


def is_seeds(node: fx.Node) -> bool:
    """Whether a node draws the seeds of all random numbers of a graph."""
    return node.target is torch.ops.prims.inductor_seeds.default


def is_made_by_inductor(node: fx.Node) -> bool:
    """Whether a node is one of those that stand in for random ops."""
    return str(node.target).startswith("prims.inductor_")


def is_effect(node: fx.Node) -> bool:
    """Whether a node runs an op with side effects, which PyTorch always keeps."""
    return str(node.target) == "with_effects"
