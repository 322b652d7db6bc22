"""Hugging Face's decoders, unmodified, as small as a CPU wants them or large enough for the kernels of a GPU."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from device_steps import sized
from zoo import FIRST_WORD, Case, deepseek_v3


def decoder(name: str, device: torch.device, dtype: torch.dtype = torch.float32, num_layers: int = 0) -> Case:
    """Return one of `DECODERS`: model and batch on the device."""
    width, vocabulary, tokens, depth = sized(device, (32, 64, 12, 2), (512, 4096, 256, 4))
    depth = num_layers or depth
    family, changes = DECODERS[name]
    sizes = _gpt2 if name == "gpt2" else _common
    config = {**sizes(width, depth, tokens), "vocab_size": vocabulary, **_IDS, **changes(width)}
    head = "LMHeadModel" if name == "gpt2" else "ForCausalLM"

    def build() -> nn.Module:
        made = getattr(transformers, f"{family}Config")(**config)
        model: nn.Module = getattr(transformers, f"{family}{head}")(made)
        return model.to(device, dtype)

    def batch() -> dict[str, Any]:
        ids = torch.randint(FIRST_WORD, vocabulary, (2, tokens)).to(device)
        return {"input_ids": ids, "labels": ids}

    prefix = "transformer.h" if name == "gpt2" else "model.layers"
    return Case(name, build, batch, tuple(f"{prefix}.{i}" for i in range(depth)))


_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _common(width: int, depth: int, tokens: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": depth,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": tokens,
    }


def _gpt2(width: int, depth: int, tokens: int) -> dict[str, Any]:
    return {"n_embd": width, "n_layer": depth, "n_head": 4, "n_positions": tokens}


def _nothing(width: int) -> dict[str, Any]:
    return {}


def _dropout(width: int) -> dict[str, Any]:
    return {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}


def _experts(implementation: str) -> Callable[[int], dict[str, Any]]:
    return lambda width: {"num_local_experts": 4, "experts_implementation": implementation}


DECODERS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "llama": ("Llama", _nothing),
    "gpt2": ("GPT2", _dropout),
    "mixtral_grouped": ("Mixtral", _experts("grouped_mm")),
    "mixtral_eager": ("Mixtral", _experts("eager")),
    "deepseek_v3": ("DeepseekV3", deepseek_v3),
}
