"""Build megatron-core's `GPTModel` with its local spec, by sets of its fields.

Attention is unfused (scores, softmax and dropout as ops of their own): megatron-core has no other without Transformer Engine,
and that is where `core_attn` recompute matters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import megatron_core_shim as shim

VOCAB_SIZE = 128


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its batch, and the selective module sets that apply to it.

    Attributes:
        fields: of its `TransformerConfig`.
        selective: sets of modules, joined by "+".
    """

    description: str
    fields: Mapping[str, Any]
    selective: tuple[str, ...]
    batch_size: int = 2
    seq_length: int = 128
    is_bf16: bool = False

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        num_layers: int = self.fields["num_layers"]
        return num_layers


_COMMON: dict[str, Any] = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "ffn_hidden_size": 512}
_DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_LLAMA: dict[str, Any] = {
    **_COMMON,
    "ffn_hidden_size": 352,
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_MIXTRAL: dict[str, Any] = {
    **_LLAMA,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 192,
    "moe_grouped_gemm": True,
    "moe_aux_loss_coeff": 0.01,
    "moe_router_load_balancing_type": "aux_loss",
}
_DEEPSEEK: dict[str, Any] = {
    **_MIXTRAL,
    "num_query_groups": 4,
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 96,
    "moe_layer_freq": (0, 1, 1, 1),
    "moe_shared_expert_intermediate_size": 96,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "multi_latent_attention": True,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
}

CASES: dict[str, Case] = {
    "gpt": Case(
        description="GPT: LayerNorm, GELU, learned positions, biases, dropout 0.1, fp32",
        fields={**_COMMON, **_DROPOUT, "position_embedding_type": "learned_absolute"},
        selective=("core_attn", "mlp", "layernorm", "core_attn+layernorm", "core_attn+mlp"),
    ),
    "gpt-no-bias": Case(
        description="GPT without biases, dropout 0.1, fp32",
        fields={**_COMMON, **_DROPOUT, "position_embedding_type": "learned_absolute", "add_bias_linear": False},
        selective=("core_attn", "mlp", "layernorm", "core_attn+layernorm", "core_attn+mlp", "core_attn+mlp+layernorm"),
    ),
    "llama": Case(
        description="Llama: RMSNorm, SwiGLU, rotary positions, 2 query groups, fp32",
        fields={**_LLAMA, "position_embedding_type": "rope"},
        selective=("core_attn", "mlp", "layernorm", "core_attn+layernorm", "core_attn+mlp", "core_attn+mlp+layernorm"),
    ),
    "mixtral": Case(
        description="Mixtral: 4 experts, 2 a token, grouped products, auxiliary loss, bf16",
        fields={**_MIXTRAL, "position_embedding_type": "rope"},
        selective=(
            "core_attn",
            "layernorm",
            "moe_act",
            "moe",
            "core_attn+moe_act",
            "layernorm+moe_act",
            "core_attn+moe",
        ),
        is_bf16=True,
    ),
    "deepseek-v3": Case(
        description="DeepSeek-V3: latent attention, a dense layer, then 8 experts in 2 groups and a shared one, bf16",
        fields={**_DEEPSEEK, "position_embedding_type": "rope"},
        selective=(
            "core_attn",
            "mlp",
            "layernorm",
            "moe_act",
            "moe",
            "shared_experts",
            "mla_up_proj",
            "core_attn+mla_up_proj+moe_act",
            "mlp+moe+mla_up_proj",
        ),
        is_bf16=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Megatron's recompute fields."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)


def settings(case: Case) -> list[Setting]:
    """Return no recompute, `full` with both methods and several numbers of layers, and the case's selective sets."""
    found = [Setting(name="none")]
    counts = {"uniform": (1, 2, 3), "block": (1, 2)}
    for method, numbers in counts.items():
        for number in numbers:
            chosen = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": number}
            found.append(Setting(name=f"full {method} {number}", fields=chosen))
    for names in case.selective:
        chosen = {"recompute_granularity": "selective", "recompute_modules": names.split("+")}
        found.append(Setting(name=f"selective {names}", fields=chosen))
    return found


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, functions for its loss and its random state before a step, and bytes of tables shared by steps."""

    model: nn.Module
    forward: Callable[[], Tensor]
    reset: Callable[[], None]
    table_bytes: Callable[[], int]


def tokens_of(case: Case) -> tuple[Tensor, Tensor]:
    """Return tokens and labels, [batch, sequence] each."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(VOCAB_SIZE, (case.batch_size, case.seq_length + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def megatron_subject(case: Case, setting: Setting) -> Subject:
    """Build megatron-core's model with a recompute setting."""
    import torch.nn.functional as F
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    shim.start()
    chosen: dict[str, Any] = {**case.fields, **setting.fields}
    positions = chosen.pop("position_embedding_type")
    if "activation_func" in chosen:
        chosen["activation_func"] = getattr(F, chosen["activation_func"])
    if "moe_layer_freq" in chosen:
        chosen["moe_layer_freq"] = list(chosen["moe_layer_freq"])
    is_latent = chosen.get("multi_latent_attention", False)
    has_legacy = "moe_use_legacy_grouped_gemm" in inspect.signature(TransformerConfig).parameters
    dtype = torch.bfloat16 if case.is_bf16 else torch.float32
    config = (MLATransformerConfig if is_latent else TransformerConfig)(
        **chosen,
        **({"rope_type": "rope", "qk_layernorm": True} if is_latent else {}),
        # Later versions have grouped products only with Transformer Engine; without it, experts run one after another.
        **({"moe_use_legacy_grouped_gemm": True} if has_legacy and chosen.get("moe_grouped_gemm") else {}),
        **({"moe_token_dispatcher_type": "alltoall"} if chosen.get("num_moe_experts") else {}),
        bf16=case.is_bf16,
        params_dtype=dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=case.seq_length,
        position_embedding_type=positions,
        share_embeddings_and_output_weights=False,
    ).to(dtype)
    tokens, labels = tokens_of(case)
    position_ids = torch.arange(case.seq_length).expand(case.batch_size, -1)
    is_hidden = torch.ones(1, 1, case.seq_length, case.seq_length).triu(1).bool()

    def forward() -> Tensor:
        loss: Tensor = model(tokens, position_ids, is_hidden, labels=labels).float().mean()
        return loss

    return Subject(
        model=model.train(),
        forward=forward,
        reset=shim.start,
        table_bytes=lambda: _megatron_table_bytes(model, case.seq_length),
    )


def _megatron_table_bytes(model: nn.Module, seq_length: int) -> int:
    """Return the buffer that all layers' scores start from, and the rotary angles of each module that has them."""
    from megatron.core import parallel_state

    scores = sum(tensor.nbytes for tensor in parallel_state.get_global_memory_buffer().buffer.values())
    frequencies = [tensor for module in model.modules() if (tensor := getattr(module, "inv_freq", None)) is not None]
    return scores + sum(2 * one.numel() * seq_length * 4 for one in frequencies)
