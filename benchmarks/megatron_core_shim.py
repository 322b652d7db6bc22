"""Run megatron-core on a CPU, in place of the CUDA, Transformer Engine and `grouped_gemm` that it expects.

megatron-core asks CUDA for devices, random states and streams wherever it runs. Here those calls are answered by the CPU's.
What it computes, saves and recomputes stays its own code, with four exceptions, each named where it is made: the grouped
product of the experts is PyTorch's (`grouped_gemm` is a CUDA extension); functions that it hands to `torch.compile` run as they
are written, so that their ops can be counted; its unfused attention is told the width of latent attention's values, which
it knows of only in Transformer Engine's; and PyTorch's norms take sequence parallelism, as Apex's do.

The changes are to the process: use it in one that does nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import types
from typing import Any

import torch
from torch import Tensor

VERSION = "0.16.1"
INSTALL = (
    f"megatron-core is not importable. Without changing this environment: "
    f"pip install --no-deps --target DIRECTORY megatron-core=={VERSION}, and DIRECTORY on PYTHONPATH."
)


def is_installed() -> bool:
    """Return whether megatron-core can be imported."""
    return importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None


def grouped_matmul(x: Tensor, weights: Tensor, tokens_per_expert: Tensor, trans_b: bool = False) -> Tensor:
    """Multiply the rows of `x` [tokens, in], sorted by expert, with their expert's matrix in `weights` [experts, in, out]."""
    ends = tokens_per_expert.to(device=x.device).cumsum(0).to(torch.int32)
    return torch._grouped_mm(x, weights.transpose(-2, -1) if trans_b else weights, offs=ends)


class _Stream:
    """A stream that never has pending work."""

    def wait_stream(self, other: object) -> None:
        """Return at once."""

    def wait_event(self, event: object) -> None:
        """Return at once."""

    def record_event(self, event: object = None) -> _Event:
        """Return True: nothing is pending."""
        return _Event()

    def synchronize(self) -> None:
        """Return at once."""


class _Event:
    """An event that has already happened."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, *args: object) -> None:
        """It has happened."""

    def wait(self, *args: object) -> None:
        """It has happened."""

    def synchronize(self) -> None:
        """It has happened."""


def _answer_for_cuda() -> None:
    cpu = torch.device("cpu")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: cpu
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.Stream = _Stream
    cuda.Event = _Event
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_stream = _Stream
    cuda.synchronize = lambda device=None: None
    for name in ("tensor", "zeros", "ones", "full", "empty"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # Its optimizers compare what `type()` says with "torch.cuda.FloatTensor".
    tensor_class: Any = Tensor
    type_of = Tensor.type
    tensor_class.type = lambda self, *args, **kwargs: (
        type_of(self, *args, **kwargs) if args or kwargs else type_of(self).replace("torch.", "torch.cuda.", 1)
    )


def _on_cpu(make: Any) -> Any:
    """Wrap a function that makes tensors: what its optimizers ask CUDA for comes from the CPU."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        tensor: Tensor = make(*args, **{**kwargs, "device": "cpu"} if str(device).startswith("cuda") else kwargs)
        return tensor

    return made


def _without_compile() -> None:
    """Run code that megatron-core would compile eagerly, so that its ops are seen one by one."""
    import megatron.core.jit as jit

    jit.disable_jit_fuser()


def _random_states() -> None:
    import megatron.core.tensor_parallel.random as random

    module: Any = random
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


def _without_transformer_engine() -> None:
    """`CheckpointWithoutOutput` asks Transformer Engine for its FP8 state even without FP8."""
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils

    module: Any = random
    state = types.SimpleNamespace(is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None)
    module.FP8GlobalStateManager = state
    module.fp8_autocast = lambda **kwargs: contextlib.nullcontext()
    module.activation_recompute_forward = lambda **kwargs: contextlib.nullcontext()
    utils: Any = moe_utils
    utils.te_general_gemm = None


def _exchanged_rows() -> None:
    """Have numbers of rows leave a tensor, as they do when they come from CUDA: an exchange takes numbers."""
    from megatron.core.transformer.moe import token_dispatcher

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module: Any = token_dispatcher
    module.maybe_move_tensor_to_cpu = moved


def _latent_attention() -> None:
    """Let the local spec's attention accept the two arguments that latent attention passes."""
    from megatron.core.models import backends
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LatentDotProductAttention(DotProductAttention):  # type: ignore[misc, unused-ignore]
        """Megatron's attention, with values of a different width than keys."""

        def __init__(
            self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
        ) -> None:
            super().__init__(*args, **kwargs)
            if v_channels is not None:
                self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    provider: Any = backends.LocalSpecProvider
    provider.core_attention = lambda self: LatentDotProductAttention
    module: Any = multi_latent_attention
    module.HAVE_TE = False  # it mistakes its own stand-ins for Transformer Engine's classes


def _sequence_parallel_norms() -> None:
    """Let PyTorch's norms say that ranks add up their gradients, as Apex's do, which need CUDA."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make: Any = WrappedTorchNorm.__new__

    def made(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        is_parallel, config.sequence_parallel = config.sequence_parallel, False
        norm = make(cls, config, *args, **kwargs)
        config.sequence_parallel = is_parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = is_parallel
        return norm

    wrapped: Any = WrappedTorchNorm
    wrapped.__new__ = made


def install() -> None:
    """Make megatron-core run here; call before anything else imports it.

    Raises:
        ImportError: it is not installed.
    """
    if not is_installed():
        raise ImportError(INSTALL)
    _answer_for_cuda()
    ops = types.SimpleNamespace(gmm=grouped_matmul)
    sys.modules.setdefault("grouped_gemm", types.SimpleNamespace(ops=ops))  # type: ignore[arg-type]
    _without_compile()
    _random_states()
    _without_transformer_engine()
    _exchanged_rows()
    _latent_attention()
    _sequence_parallel_norms()


def start(seed: int = 0) -> None:
    """Set up its process groups, of this process only, and its random states; call again to reset the latter."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
