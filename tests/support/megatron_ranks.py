"""megatron-core's own model, wrapper and optimizer in two processes, with and without a budget: what each process checks.

`test_megatron_core.py` starts it as torchrun does: megatron_ranks.py LAYOUT.
"""

# ruff: noqa: E402, megatron-core is imported after what answers in place of CUDA

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import megatron_core_shim as shim

shim.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

import recollect
from recollect.errors import RecollectError
from recollect.plans.unit_plan import digest_of

SIZES = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 256, "attention_dropout": 0.1}
NOT_FUSED = ("gradient_accumulation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "bias_activation_fusion")
LENGTH, ROWS, STEPS = 64, 2, 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP": {"tensor_ranks": 2},
    "DP": {},
    "DP, distributed optimizer": {"is_sharded": True},
    "DP, distributed optimizer, bf16": {"is_sharded": True, "is_bf16": True},
}


def built(*, tensor_ranks: int = 1, is_sharded: bool = False, is_bf16: bool = False) -> tuple[list[Any], Any]:
    """The chunks and the optimizer, as `get_model` and `get_megatron_optimizer` make them."""
    torch.manual_seed(0)
    tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    switched_off: dict[str, Any] = dict.fromkeys(NOT_FUSED, False)
    config = TransformerConfig(
        **SIZES, **switched_off, tensor_model_parallel_size=tensor_ranks, use_cpu_initialization=True,
        bf16=is_bf16, params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    model = GPTModel(config, spec, vocab_size=128, max_sequence_length=LENGTH).train()
    inner = Float16Module(config, model) if is_bf16 else model
    chunk = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=is_sharded, bucket_size=None), inner
    )
    chunk.broadcast_params()
    return [chunk], get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-2, use_distributed_optimizer=is_sharded, bf16=is_bf16,
            params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
        ),
        [chunk],
    )  # fmt: skip


def trained(budget: str, **layout: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """The weights after some steps, and the plans."""
    (chunk,), optimizer = built(**layout)
    attached = recollect.attach([chunk], optimizer, budget, log=lambda line: None) if budget else None
    data_rank = parallel_state.get_data_parallel_rank()
    tokens = torch.randint(128, (STEPS, ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(data_rank))
    positions, is_hidden = torch.arange(LENGTH).expand(ROWS, -1), torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    for rows in tokens:
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        chunk(
            rows[:, :-1].contiguous(), positions, is_hidden, labels=rows[:, 1:].contiguous()
        ).float().mean().backward()
        chunk.finish_grad_sync()
        optimizer.step()
    plans = [] if attached is None else [step.plan for step in attached.planned]
    return [parameter.detach().clone() for parameter in chunk.module.parameters()], plans


def refused(**settings: Any) -> str:
    """The error of attaching to a model with such settings, as they are read where it runs."""
    chunks, optimizer = built()
    for name, value in settings.items():
        setattr(chunks[0].module.config, name, value)
    try:
        recollect.attach(chunks, optimizer, "80%")
    except RecollectError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layout = LAYOUTS[sys.argv[1]]
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=layout.get("tensor_ranks", 1))
    expected, _ = trained("", **layout)
    for budget in ("95%", "75%"):
        found, plans = trained(budget, **layout)
        assert all(map(torch.equal, expected, found)), budget
        digests: list[Any] = [None, None]
        dist.all_gather_object(digests, [digest_of(plan.units) for plan in plans])
        assert digests[0] == digests[1], "one plan for both"
        assert any(unit.actions for unit in plans[0].units.values())
    if sys.argv[1] == "DP":
        assert "it recomputes by itself (recompute_granularity='full')" in refused(recompute_granularity="full")
        assert not refused(recompute_granularity="selective", recompute_modules=[])
        assert "it offloads by itself (cpu_offloading=True)" in refused(cpu_offloading=True)
        assert "would run in CUDA graphs" in refused(cuda_graph_impl="local")


if __name__ == "__main__":
    main()
