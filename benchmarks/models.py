"""The models of the benchmarks: the reference Llama, and unmodified Hugging Face models with random weights."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel

ModelName = Literal[
    "reference",
    "dense",
    "moe",
    "mla",
    "gpt2",
    "bert",
    "falcon",
    "gemma2",
    "neox",
    "olmo2",
    "opt",
    "phi",
    "qwen3",
    "starcoder2",
]
HUGGING_FACE: tuple[ModelName, ...] = ("dense", "moe", "mla")
DESCRIPTIONS: dict[ModelName, str] = {
    "reference": "reference Llama",
    "dense": "dense (Hugging Face Llama)",
    "moe": "MoE (Hugging Face Mixtral, 4 experts, 2 a token, grouped)",
    "mla": "MLA and MoE (Hugging Face DeepSeek-V3, 8 experts, 2 a token, 1 shared, grouped)",
    "gpt2": "GPT-2 with dropout (Hugging Face)",
    "bert": "BERT with dropout (Hugging Face)",
    "falcon": "Falcon (Hugging Face)",
    "gemma2": "Gemma 2 (Hugging Face)",
    "neox": "GPT-NeoX (Hugging Face)",
    "olmo2": "OLMo 2 (Hugging Face)",
    "opt": "OPT with dropout (Hugging Face)",
    "phi": "Phi (Hugging Face)",
    "qwen3": "Qwen 3 (Hugging Face)",
    "starcoder2": "StarCoder 2 (Hugging Face)",
}
# Class of model and of configuration, and what the common sizes do not say.
_OTHERS: dict[str, tuple[str, str, float, dict[str, Any]]] = {
    "falcon": ("FalconForCausalLM", "FalconConfig", 4, {"new_decoder_architecture": False}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", 8 / 3, {"head_dim": 64, "sliding_window": 256}),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", 4, {}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", 8 / 3, {}),
    "opt": ("OPTForCausalLM", "OPTConfig", 4, {"max_position_embeddings": 4096}),
    "phi": ("PhiForCausalLM", "PhiConfig", 4, {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", 8 / 3, {"head_dim": 64}),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", 4, {}),
}
_HEAD_CHANNELS = 64


def build(name: ModelName, *, hidden_size: int, num_layers: int, num_heads: int, vocab_size: int) -> nn.Module:
    """Return a model in training mode; `num_heads` 0 means one per 64 channels."""
    heads = num_heads or max(1, hidden_size // _HEAD_CHANNELS)
    if name == "reference":
        sizes = llama_config(
            vocab_size=vocab_size, hidden_size=hidden_size, num_layers=num_layers, num_attention_heads=heads
        )
        return GPTModel(sizes)
    if name == "gpt2":
        return _gpt2(hidden_size, num_layers, heads, vocab_size).train()
    if name == "bert":
        return _bert(hidden_size, num_layers, heads, vocab_size).train()
    config: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        # As in every training script: the key-value cache is for generation.
        "use_cache": False,
    }
    if name in _OTHERS:
        return _other(*_OTHERS[name], hidden_size, config).train()
    return {"dense": _dense, "moe": _mixture, "mla": _latent}[name](hidden_size, config).train()


def _dense(hidden_size: int, config: dict[str, Any]) -> nn.Module:
    import transformers

    sizes = {"intermediate_size": _rounded(hidden_size * 8 / 3)}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, **sizes))


def _mixture(hidden_size: int, config: dict[str, Any]) -> nn.Module:
    """Return a mixture with two of four experts, as wide as the model: about as many FLOPs per token as the dense model."""
    import transformers

    sizes = {"intermediate_size": _rounded(hidden_size), "num_local_experts": 4, "num_experts_per_tok": 2}
    loss = {"output_router_logits": True}  # the auxiliary loss that balances experts
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**config, **sizes, **loss))


def _latent(hidden_size: int, config: dict[str, Any]) -> nn.Module:
    """Return a model of DeepSeek-V3's proportions: narrow latent vectors, one dense layer, then routed and shared experts."""
    import transformers

    heads = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    latents = {"q_lora_rank": _rounded(hidden_size / 2), "kv_lora_rank": _rounded(hidden_size / 4)}
    experts = {
        "intermediate_size": _rounded(hidden_size * 8 / 3),
        "moe_intermediate_size": _rounded(hidden_size / 2),
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
    }
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**config, **heads, **latents, **experts))


def _gpt2(hidden_size: int, num_layers: int, num_heads: int, vocab_size: int) -> nn.Module:
    import transformers

    sizes = {"vocab_size": vocab_size, "n_embd": hidden_size, "n_layer": num_layers, "n_head": num_heads}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
    )


def _bert(hidden_size: int, num_layers: int, num_heads: int, vocab_size: int) -> nn.Module:
    import transformers

    sizes = {"hidden_size": hidden_size, "intermediate_size": 4 * hidden_size, "vocab_size": vocab_size}
    layers = {"num_hidden_layers": num_layers, "num_attention_heads": num_heads}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **layers, pad_token_id=0))


def _other(
    model: str, config: str, width: float, special: dict[str, Any], hidden_size: int, common: dict[str, Any]
) -> nn.Module:
    import transformers

    feed_forward = _rounded(hidden_size * width)
    sizes = {"intermediate_size": feed_forward, "ffn_dim": feed_forward, "ffn_hidden_size": feed_forward}
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**common, **sizes, **special))
    return made


def _rounded(size: float) -> int:
    return max(16, 16 * round(size / 16))


def model_inputs(name: ModelName, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the batch: Hugging Face's models shift the labels themselves."""
    if name == "reference":
        return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, :-1].contiguous()}
