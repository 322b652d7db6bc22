"""Defaults that make a transformer a GPT, a Llama, a Mixtral or a DeepSeek-V3, apart from its dimensions. Imports no torch.

The functions take any fields of `TransformerConfig`, which override their defaults. They raise ValueError for fields that clash
and TypeError for missing or unknown ones.
"""

from typing import Any

from recollect.lab.models.config import TransformerConfig


def gpt_config(**fields: Any) -> TransformerConfig:
    """Describe a GPT-2 or GPT-3: LayerNorm, GELU, learned positions, biases, dropout, tied embeddings.

    References:
        Radford et al. 2019, and the released code of GPT-2 (dropout, epsilon, the approximation of GELU, initialisation).
    """
    defaults = {"activation_func": "gelu_tanh", "share_embeddings_and_output_weights": True}
    return TransformerConfig(**{**defaults, **fields})


def llama_config(**fields: Any) -> TransformerConfig:
    """Describe a Llama: RMSNorm, SwiGLU, rotary positions, neither biases nor dropout.

    Without `ffn_hidden_size`, the MLP's width is 8/3 of `hidden_size`, rounded up to a multiple of 64.

    References:
        Touvron et al. 2023, arXiv 2302.13971, section 2.2.
    """
    defaults = {
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "ffn_hidden_size": -(-8 * fields.get("hidden_size", 0) // (3 * 64)) * 64,
    }
    return TransformerConfig(**{**defaults, **fields})


def mixtral_config(**fields: Any) -> TransformerConfig:
    """Describe a Mixtral: a Llama with routed experts instead of MLPs, two per token, chosen by a softmax router.

    References:
        Jiang et al. 2024, arXiv 2401.04088, table 1.
    """
    defaults = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.02, "moe_grouped_gemm": True}
    return llama_config(**{**defaults, **fields})


def deepseek_v3_config(**fields: Any) -> TransformerConfig:
    """Describe a DeepSeek-V3: latent attention, shared and routed experts, sigmoid routing, multi-token prediction.

    References:
        DeepSeek-AI 2024, arXiv 2412.19437, sections 2.1, 2.2 and 4.2.
    """
    defaults = {
        "multi_latent_attention": True,
        "rotary_interleaved": True,
        "layernorm_epsilon": 1e-6,
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 1e-4,
        "moe_grouped_gemm": True,
        "mtp_num_layers": 1,
    }
    return llama_config(**{**defaults, **fields})
