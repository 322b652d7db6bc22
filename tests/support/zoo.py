"""Tiny, randomly initialised, unmodified models that nobody here wrote, each with a batch and the paths of its layers.

Every model builds and steps in well under a second and is a stand-in for its big sister: the same code runs. The
Hugging Face models are built from their config classes, so nothing is downloaded; `use_cache` and the dropout rates
stay at the model's defaults (or are raised where the default is zero).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from resnet import ResNet

Batch = Tensor | tuple[Any, ...] | dict[str, Any]

SEQUENCES, TOKENS, VOCABULARY = 2, 12, 64
FIRST_WORD = 3  # ids below are padding, begin and end


@dataclass(frozen=True)
class Case:
    """A model to train one step of.

    `layers` are the paths of the repeated blocks. `is_random` says that a training step draws random numbers.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    layers: tuple[str, ...]
    loss_fn: Callable[[Any], Tensor] | None = None
    is_random: bool = False

    def model(self) -> nn.Module:
        """The same weights on every call, in training mode."""
        torch.manual_seed(0)
        return self.build().train()

    def data(self, seed: int = 0) -> Batch:
        torch.manual_seed(1000 + seed)
        return self.batch()


def _tokens() -> dict[str, Any]:
    ids = torch.randint(FIRST_WORD, VOCABULARY, (SEQUENCES, TOKENS))
    return {"input_ids": ids, "labels": ids}


def _padded_tokens() -> dict[str, Any]:
    mask = torch.ones(SEQUENCES, TOKENS, dtype=torch.long)
    mask[1, -4:] = 0
    return {**_tokens(), "attention_mask": mask}


def _images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(SEQUENCES, 3, 16, 16), "labels": torch.arange(SEQUENCES)}


def _speech() -> dict[str, Any]:
    return {"input_features": torch.randn(SEQUENCES, 8, 32), "labels": _tokens()["labels"]}


def _mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


_IDS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_DECODER: dict[str, Any] = {**_IDS, **_ENCODER, "num_key_value_heads": 2, "max_position_embeddings": 32}
_SEQ2SEQ: dict[str, Any] = {
    **_IDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 1,
}


def _numbered(prefix: str, count: int = 2) -> tuple[str, ...]:
    return tuple(f"{prefix}.{i}" for i in range(count))


def _hugging_face(
    name: str,
    family: str,
    head: str,
    layers: tuple[str, ...],
    config: Mapping[str, Any],
    *,
    batch: Callable[[], Batch] = _tokens,
    config_class: str = "",
    is_random: bool = False,
) -> Case:
    """A row made of `transformers.<family><head>` and its config class."""

    def build() -> nn.Module:
        made = getattr(transformers, config_class or f"{family}Config")(**config)
        model: nn.Module = getattr(transformers, f"{family}{head}")(made)
        return model

    return Case(name, build, batch, layers, is_random=is_random)


def deepseek_v3(width: int) -> dict[str, Any]:
    """One dense layer, then routed experts; latent attention with every projection."""
    return {
        "num_key_value_heads": 4,
        "moe_intermediate_size": width // 2,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": width // 2,
        "q_lora_rank": width // 2,
        "qk_rope_head_dim": width // 4,
        "qk_nope_head_dim": width // 4,
        "v_head_dim": width // 4,
    }


def _decoders() -> list[Case]:
    layers = _numbered("model.layers")
    deepseek = {**_DECODER, "num_hidden_layers": 3, **deepseek_v3(32)}
    mixtral = {**_DECODER, "num_local_experts": 4, "output_router_logits": True}
    qwen = {**_DECODER, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    gemma = {**_DECODER, "head_dim": 8}
    phi = {**_DECODER, "num_key_value_heads": 4, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1}
    gpt2 = {**_IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    bloom = {**_IDS, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    mamba = {**_IDS, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 4}
    hub = _numbered("transformer.h")
    return [
        _hugging_face("llama", "Llama", "ForCausalLM", layers, _DECODER),
        _hugging_face("llama_padded", "Llama", "ForCausalLM", layers, _DECODER, batch=_padded_tokens),
        _hugging_face("mixtral", "Mixtral", "ForCausalLM", layers, mixtral),
        _hugging_face("mixtral_eager", "Mixtral", "ForCausalLM", layers, {**mixtral, "attn_implementation": "eager"}),
        _hugging_face("deepseek_v3", "DeepseekV3", "ForCausalLM", _numbered("model.layers", 3), deepseek),
        _hugging_face("qwen3_moe", "Qwen3Moe", "ForCausalLM", layers, qwen),
        _hugging_face("gemma", "Gemma", "ForCausalLM", layers, gemma),
        _hugging_face(
            "gemma3", "Gemma3", "ForCausalLM", layers, {**gemma, "sliding_window": 8}, config_class="Gemma3TextConfig"
        ),
        _hugging_face("phi", "Phi", "ForCausalLM", layers, phi, is_random=True),
        _hugging_face("phi3", "Phi3", "ForCausalLM", layers, {**_DECODER, "resid_pdrop": 0.1}, is_random=True),
        _hugging_face("gpt2", "GPT2", "LMHeadModel", hub, gpt2, is_random=True),
        _hugging_face("bloom", "Bloom", "ForCausalLM", hub, bloom, is_random=True),
        _hugging_face("mamba", "Mamba", "ForCausalLM", _numbered("backbone.layers"), mamba),
    ]


def _others() -> list[Case]:
    both = _numbered("model.encoder.layers") + _numbered("model.decoder.layers")
    t5 = {**_IDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    vit = {**_ENCODER, "image_size": 16, "patch_size": 4, "num_labels": 5, "hidden_dropout_prob": 0.1}
    whisper = {
        **_SEQ2SEQ,
        "num_mel_bins": 8,
        "max_source_positions": 16,
        "max_target_positions": 16,
        "dropout": 0.1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    bert = {**_IDS, **_ENCODER}
    blocks = _numbered("encoder.block") + _numbered("decoder.block")
    layers = _numbered("encoder.layers") + _numbered("decoder.layers")
    return [
        _hugging_face(
            "bert", "Bert", "ForMaskedLM", _numbered("bert.encoder.layer"), bert, batch=_padded_tokens, is_random=True
        ),
        _hugging_face("t5", "T5", "ForConditionalGeneration", blocks, t5, is_random=True),
        _hugging_face("bart", "Bart", "ForConditionalGeneration", both, _SEQ2SEQ, is_random=True),
        _hugging_face("whisper", "Whisper", "ForConditionalGeneration", both, whisper, batch=_speech, is_random=True),
        _hugging_face(
            "vit", "ViT", "ForImageClassification", _numbered("vit.layers"), vit, batch=_images, is_random=True
        ),
        Case("transformer", _transformer, _two_sequences, layers, _mean_square, is_random=True),
        Case("resnet", ResNet, _one_image, ("stages.0", "stages.1", "stages.2"), _mean_square),
    ]


def _transformer() -> nn.Module:
    return nn.Transformer(32, 4, 2, 2, 64, dropout=0.1, batch_first=True)


def _two_sequences() -> Batch:
    return (torch.randn(SEQUENCES, 8, 32), torch.randn(SEQUENCES, 6, 32))


def _one_image() -> Batch:
    return torch.randn(4, 3, 8, 8)


ZOO: dict[str, Case] = {case.name: case for case in [*_decoders(), *_others()]}
