"""Stands in for Megatron-LM's file of this name, which megatron-core has from 0.19 on, and whose loop needs CUDA.

Model, wrapper and optimizer are megatron-core's. As in Megatron's own, `setup_model_and_optimizer` loads the checkpoint, too.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

NOT_FUSED = ("gradient_accumulation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "bias_activation_fusion")
ROWS, LENGTH = 2, 64


def setup_model_and_optimizer(checkpoint: Path = Path("none")) -> tuple[list[Any], Any, None]:
    tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    torch.manual_seed(0)
    types: Any = {"bf16": True, "params_dtype": torch.bfloat16}
    config = TransformerConfig(
        num_layers=3, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True, **types,
        **dict.fromkeys(NOT_FUSED, False),
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="LayerNorm"), vocab_size=128, max_sequence_length=LENGTH
    )
    sharded: Any = {"use_distributed_optimizer": True}
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(**sharded), Float16Module(config, model))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, **types, **sharded), [chunk])
    if checkpoint.exists():
        chunk.load_state_dict(torch.load(checkpoint))
        optimizer.reload_model_params()
    return [chunk], optimizer, None


def pretrain(checkpoint: Path, first: int, last: int) -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    rank = dist.get_rank()
    checkpoint = checkpoint.with_suffix(f".{rank}")
    (chunk,), optimizer, _ = setup_model_and_optimizer(checkpoint)
    positions, is_hidden = torch.arange(LENGTH).expand(ROWS, -1), torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    for step in range(first, last):
        tokens = torch.randint(128, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(2 * step + rank))
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        chunk(tokens[:, :-1], positions, is_hidden, labels=tokens[:, 1:].contiguous()).float().mean().backward()
        chunk.finish_grad_sync()
        optimizer.step()
    torch.save(chunk.state_dict(), checkpoint)
