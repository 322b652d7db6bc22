"""The models of the loops: unmodified Hugging Face models and plain modules, random, small, with most bytes in activations."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from loops.loop import VOCABULARY

__all__ = ["Critic", "Generator", "bert", "gpt2", "llama", "t5", "vit"]

_IDS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4}


def llama(**changes: Any) -> nn.Module:
    """Return a decoder of four layers."""
    config = transformers.LlamaConfig(**{**_IDS, **_SIZES, "max_position_embeddings": 256, **changes})
    return transformers.LlamaForCausalLM(config).train()


def gpt2() -> nn.Module:
    """Return a decoder of four layers with dropout."""
    config = transformers.GPT2Config(**_IDS, n_embd=64, n_layer=4, n_head=4, n_positions=256)
    return transformers.GPT2LMHeadModel(config).train()


def t5() -> nn.Module:
    """Return an encoder and a decoder of three layers each, with dropout."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=176, num_layers=3, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).train()


def bert() -> nn.Module:
    """Return a text encoder of four layers with dropout."""
    return transformers.BertModel(transformers.BertConfig(**_IDS, **_SIZES, max_position_embeddings=256)).train()


def vit() -> nn.Module:
    """Return an image encoder of four layers."""
    return transformers.ViTModel(transformers.ViTConfig(**_SIZES, image_size=16, patch_size=2)).train()


class _Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.activation = nn.SiLU()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + self.second(self.activation(self.first(self.activation(self.norm(images)))))


class Generator(nn.Module):
    """Makes images of 16 x 16 from noise."""

    def __init__(self, noise: int = 32, channels: int = 32, num_blocks: int = 4) -> None:
        super().__init__()
        self.channels = channels
        self.enter = nn.Linear(noise, channels * 16 * 16)
        self.blocks = nn.ModuleList([_Block(channels) for _ in range(num_blocks)])
        self.leave = nn.Conv2d(channels, 3, 1)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """Return images for noise of shape (images, channels)."""
        images = self.enter(noise).view(len(noise), self.channels, 16, 16)
        for block in self.blocks:
            images = block(images)
        return torch.tanh(self.leave(images))


class Critic(nn.Module):
    """Gives each image a number."""

    def __init__(self, channels: int = 32, num_blocks: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, channels, 1)
        self.blocks = nn.ModuleList([_Block(channels) for _ in range(num_blocks)])
        self.leave = nn.Linear(channels, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return a number for each image."""
        images = self.enter(images)
        for block in self.blocks:
            images = block(images)
        return self.leave(images.mean((2, 3))).squeeze(1)
