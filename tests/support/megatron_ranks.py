"""megatron-core's own model, wrapper, optimizer and schedules in two processes, with and without a budget.

`test_megatron_core.py` starts it as torchrun does, under a meter: megatron_ranks.py KIND, a key of `CASES`.
"""

# ruff: noqa: E402, megatron-core is imported after what answers in place of CUDA

import gc
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import megatron_core_shim as shim

shim.install()

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

import recollect
from allocator_meter import AllocatorMeter
from recollect.errors import BudgetTooSmallError, RecollectError
from recollect.integrations.megatron import RecomputeConfig
from recollect.plans.unit_plan import digest_of

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 128, "attention_dropout": 0.1}
NOT_FUSED = ("gradient_accumulation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "bias_activation_fusion")
LENGTH, ROWS, MICRO_BATCHES, STEPS = 32, 2, 2, 3
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {
        "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "add_bias_linear": False,
        "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01,
    },
    "latent": {
        "multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8,
        "v_head_dim": 8, "rope_type": "rope", "normalization": "RMSNorm", "add_bias_linear": False,
    },
}  # fmt: skip
TENSOR = {"tensor_model_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2, "deallocate_pipeline_outputs": True, "pipeline_dtype": torch.float32}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "sharded": {"is_sharded": True},
    "sharded, bf16": {"is_sharded": True, "bf16": True},
    "tensor": TENSOR,
    "sequence": TENSOR | {"sequence_parallel": True},
    "expert": {"expert_model_parallel_size": 2},
    "pipeline": PIPELINE,
    "interleaved": PIPELINE | {"virtual_pipeline_model_parallel_size": 2, "num_layers": 4},
}
CASES: dict[str, tuple[tuple[str, str], ...]] = {
    # Megatron wants sequence parallelism where experts are under tensor parallelism.
    "sequence": (("dense", "sequence"),),
    "tensor": (("dense", "tensor"), ("experts", "sequence")),
    "tensor, latent": (("latent", "tensor"), ("latent", "sequence")),
    "data": (("dense", "data"), ("dense", "sharded, bf16"), ("experts", "expert")),
    "data, sharded": (("dense", "sharded"), ("latent", "sharded")),
    "pipeline": (("dense", "interleaved"), ("latent", "pipeline")),
    "pipeline, experts": (("dense", "pipeline"), ("experts", "interleaved")),
}
FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MODULES = {"dense": ("core_attn", "layernorm"), "experts": (), "latent": ("core_attn", "mla_up_proj")}
# Of a layer's three dropouts; a GPU's states are 16 bytes each. And of its two all-reduces in place, whose results stay.
STATES_BYTES, REDUCED_BYTES = 3 * torch.get_rng_state().nbytes, 2 * 4 * LENGTH * ROWS * 32
METER = AllocatorMeter()


def chunks_of(model: str, *, is_sharded: bool = False, **fields: Any) -> list[Any]:
    """The chunks, as `get_model` makes them."""
    torch.manual_seed(0)
    tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    switched_off: dict[str, Any] = dict.fromkeys(NOT_FUSED, False)
    dtype = torch.bfloat16 if fields.get("bf16") else torch.float32
    config = (MLATransformerConfig if model == "latent" else TransformerConfig)(
        **SIZES | switched_off | MODELS[model] | fields, params_dtype=dtype, use_cpu_initialization=True
    )
    config.finalize_model_grads_func = finalize_model_grads
    chunks = []
    num_chunks = config.virtual_pipeline_model_parallel_size
    for stage in range(num_chunks) if num_chunks else [None]:
        where = {"ignore_virtual": False, "vp_stage": stage}
        inner = GPTModel(
            config, get_gpt_decoder_block_spec(config, False, normalization=config.normalization, vp_stage=stage),
            vocab_size=128, max_sequence_length=LENGTH, pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where), vp_stage=stage,
            position_embedding_type="rope" if model == "latent" else "learned_absolute",
        ).train()  # fmt: skip
        sharing = DistributedDataParallelConfig(use_distributed_optimizer=is_sharded, bucket_size=None)
        chunks.append(DistributedDataParallel(config, sharing, Float16Module(config, inner) if config.bf16 else inner))
        chunks[-1].broadcast_params()
    return chunks


def optimizer_of(chunks: list[Any], *, is_sharded: bool = False, bf16: bool = False, **_: Any) -> Any:
    settings = {"bf16": bf16, "params_dtype": torch.bfloat16 if bf16 else torch.float32, "lr": 1e-2}
    return get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", use_distributed_optimizer=is_sharded, **settings), chunks
    )


def forward_backward(chunks: list[Any], tokens: torch.Tensor, at_loss: Callable[[], object] = lambda: None) -> None:
    """One step of Megatron's schedule. tokens: [micro-batches, rows, length + 1]. `at_loss` is called when forward has run."""
    positions, is_hidden = torch.arange(LENGTH).expand(ROWS, -1), torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()

    def forward_step(batches: Iterator[torch.Tensor], chunk: Any) -> Any:
        rows = next(batches)
        output = chunk(rows[:, :-1].contiguous(), positions, is_hidden, labels=rows[:, 1:].contiguous())

        def loss_of(losses: torch.Tensor) -> Any:
            at_loss()
            return losses.float().mean(), {}

        return output, loss_of

    for chunk in chunks:
        chunk.zero_grad_buffer()
    batches = [iter(tokens) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=batches if len(chunks) > 1 else batches[0], model=chunks,
        num_microbatches=len(tokens), seq_length=LENGTH, micro_batch_size=ROWS, forward_only=False,
    )  # fmt: skip


def tokens_of(step: int) -> torch.Tensor:
    seed = 10 * step + parallel_state.get_data_parallel_rank()
    return torch.randint(128, (MICRO_BATCHES, ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def digests_of(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Of the bits of each; tensors themselves would count as what the process holds."""
    return [hashlib.sha256(t.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for t in tensors]


def trained(budget: int | str, model: str, **layout: Any) -> tuple[list[str], Any]:
    """Digests of the last gradients and of the weights after some steps; and the step that was planned."""
    gc.collect()
    before_bytes = METER.now_bytes()
    chunks = chunks_of(model, **layout)
    optimizer = optimizer_of(chunks, **layout)
    attached = recollect.attach(chunks, optimizer, budget, log=lambda line: None) if budget else None
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    peaks_bytes = []
    for step in range(STEPS):
        gc.collect()
        METER.restart()
        optimizer.zero_grad()
        forward_backward(chunks, tokens_of(step))
        gradients = digests_of(parameter.main_grad for parameter in parameters)
        optimizer.step()
        peaks_bytes.append(METER.peak_bytes())
    found = gradients + digests_of(parameters)
    if attached is None:
        return found, None
    attached.remove()
    *others, planned = attached.planned
    assert not others or model == "experts", "a step in which experts get more tokens is recorded"
    most_bytes = max(peak for step, peak in enumerate(peaks_bytes) if step not in attached.recorded_steps)
    # What was there before is left out: it may be more than this model's, and part of it is no tensor.
    over_bytes = most_bytes - before_bytes - max(step.peak_bytes for step in attached.planned)
    assert over_bytes <= 0, (budget, peaks_bytes, planned.plan)
    return found, planned


def check(model: str, layout: dict[str, Any]) -> None:
    """Gradients and weights are those without a budget, under one plan for the ranks of a stage."""
    expected, _ = trained("", model, **layout)
    budget: int | str = "90%"
    for _ in range(1 + (model == "dense")):
        found, planned = trained(budget, model, **layout)
        assert found == expected, budget
        assert any(unit.actions for unit in planned.plan.units.values())
        digests: list[Any] = [None, None]
        dist.all_gather_object(digests, digest_of(planned.plan.units))
        assert digests[0] == digests[1] or "pipeline_model_parallel_size" in layout, "one plan for the ranks of a stage"
        with pytest.raises(BudgetTooSmallError) as refusal:
            recollect.plan(planned.profile, 1)
        least = torch.tensor(refusal.value.least_peak_bytes)
        dist.all_reduce(least, dist.ReduceOp.MAX)  # Ranks of a stage share one budget.
        budget = int(1.02 * least)


def counted(chunk: Any) -> tuple[list[str], int, int]:
    """Digests of the gradients of a second step; and what it keeps from forward for backward, and its peak, in bytes."""
    kept_bytes: list[int] = []
    for _ in range(2):
        torch.manual_seed(0)
        tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
        gc.collect()
        METER.restart()
        before_bytes = METER.now_bytes()
        forward_backward([chunk], tokens_of(0)[:1], lambda: kept_bytes.append(METER.now_bytes()))
        peak_bytes = METER.peak_bytes()
    gradients = digests_of(parameter.main_grad for parameter in chunk.parameters())
    return gradients, kept_bytes[-1] - before_bytes, peak_bytes - before_bytes


def check_recompute(model: str, layout: dict[str, Any]) -> None:
    """Megatron's settings have the gradients of its own recompute, keep no more, and peak no higher."""
    (chunk,) = chunks_of(model, **layout)
    plain, _, _ = counted(chunk)
    profile = recollect.record(
        chunk.module, None, step=lambda: forward_backward([chunk], tokens_of(0)[:1]), collectives="replay"
    )
    selective = [{"recompute_granularity": "selective", "recompute_modules": [name]} for name in MODULES[model]]
    for setting in (FULL, *selective):
        (own,) = chunks_of(model, **layout | setting)
        gradients, kept_bytes, peak_bytes = counted(own)
        with recollect.apply(chunk.module, recollect.megatron_plan(profile, RecomputeConfig(**setting))):
            found = counted(chunk)
        assert found[0] == gradients == plain, (model, setting)
        spared_bytes = SIZES["num_layers"] * (STATES_BYTES + (REDUCED_BYTES if layout == TENSOR else 0))
        # What experts exchange stays, as do a router's choices.
        assert model == "experts" or found[1] <= kept_bytes + spared_bytes, (model, setting, found, kept_bytes)
        assert found[2] <= 1.01 * peak_bytes, (model, setting, found, peak_bytes)


def refused(**settings: Any) -> str:
    """The error of attaching to a model with such settings, as they are read where it runs."""
    chunks = chunks_of("dense")
    for name, value in settings.items():
        setattr(chunks[0].module.config, name, value)
    try:
        recollect.attach(chunks, optimizer_of(chunks), "80%")
    except RecollectError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_refusals() -> None:
    assert "it recomputes by itself (recompute_granularity='full')" in refused(recompute_granularity="full")
    assert not refused(recompute_granularity="selective", recompute_modules=[])
    assert "it offloads by itself (cpu_offloading=True)" in refused(cpu_offloading=True)
    assert "would run in CUDA graphs" in refused(cuda_graph_impl="local")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for model, layout in CASES[sys.argv[1]]:
        print(model, layout, flush=True)
        fields = LAYOUTS[layout]
        sizes = {name: size for name, size in fields.items() if name.endswith("_parallel_size")}
        parallel_state.initialize_model_parallel(**sizes)
        check(model, fields)
        if not fields.keys() & {"pipeline_model_parallel_size", "is_sharded"}:
            check_recompute(model, fields)
        if (model, layout) == ("dense", "data"):
            check_refusals()
        parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main()
