"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shape legend, used as suffixes below:
    B batch   T positions   D hidden_size   F intermediate_size   V vocab_size
    H query heads   K key and value heads   C channels of one head (D = H * C)

Attribute names follow Hugging Face, so that plans read the same for both. Weights keep their own dtype; each matrix
product casts them to the dtype of its input. A model with fp32 weights and `compute_dtype=torch.bfloat16` therefore
trains as under autocast, but without its global state and without its cache that holds all bf16 copies until the end
of forward: a copy is one more value that a plan can drop.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recollect.loss.chunked import chunked_cross_entropy
from recollect.models.sizes import SIZES, LlamaConfig

__all__ = ["SIZES", "Llama", "LlamaConfig", "LlamaOutput"]

INIT_STD = 0.02  # GPT-2 and Llama; the matrices that write into the residual stream get INIT_STD / sqrt(2 * num_layers)
IGNORE_INDEX = -100


class LlamaOutput(NamedTuple):
    """What a forward returns.

    Attributes:
        logits: [B, T, V] in the compute dtype; None if the loss was computed in chunks.
        loss: an fp32 scalar; None without labels.
    """

    logits: Tensor | None
    loss: Tensor | None


class Linear(nn.Linear):
    """A matrix product without bias whose weight is cast to the dtype of the input."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw weights as GPT-2 does."""
        nn.init.normal_(self.weight, std=INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root mean square norm, fp32 inside; one fused kernel on CUDA, plain ops on a CPU."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x_BTD, self.weight.shape, self.weight.to(x_BTD.dtype), self.eps)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the rotary positions, computed once a forward and shared by all layers."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [T, 1, C] in the dtype and on the device of `x_BTD`."""
        # Derived each time: `model.bfloat16()` would cast a buffer too, and bf16 cannot tell large angles apart.
        channel = torch.arange(0, self.head_dim, 2, device=x_BTD.device, dtype=torch.float32)
        position = torch.arange(x_BTD.shape[1], device=x_BTD.device, dtype=torch.float32)
        angle = torch.outer(position, self.theta ** (-channel / self.head_dim))
        angle_T1C = torch.cat((angle, angle), dim=-1).unsqueeze(1)
        return angle_T1C.cos().to(x_BTD.dtype), angle_T1C.sin().to(x_BTD.dtype)


def _rotate(x_BTHC: Tensor, cos_T1C: Tensor, sin_T1C: Tensor) -> Tensor:
    first, second = x_BTHC.chunk(2, dim=-1)
    return x_BTHC * cos_T1C + torch.cat((-second, first), dim=-1) * sin_T1C


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.is_grouped = config.num_kv_heads != config.num_heads
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, config.hidden_size)
        self.k_proj = Linear(config.hidden_size, kv_size)
        self.v_proj = Linear(config.hidden_size, kv_size)
        self.o_proj = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_BTD: Tensor, cos_T1C: Tensor, sin_T1C: Tensor) -> Tensor:
        """Mix positions; position t sees 0..t."""
        q_BTHC = self.q_proj(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTKC = self.k_proj(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTKC = self.v_proj(x_BTD).unflatten(-1, (-1, self.head_dim))
        q_BTHC = _rotate(q_BTHC, cos_T1C, sin_T1C)
        k_BTKC = _rotate(k_BTKC, cos_T1C, sin_T1C)
        mixed_BHTC = F.scaled_dot_product_attention(
            q_BTHC.transpose(1, 2),
            k_BTKC.transpose(1, 2),
            v_BTKC.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.is_grouped,
        )
        out_BTD: Tensor = self.o_proj(mixed_BHTC.transpose(1, 2).flatten(2))
        return out_BTD


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)
        self.act_fn = nn.SiLU()

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map each position on its own; F channels inside."""
        out_BTD: Tensor = self.down_proj(self.act_fn(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out_BTD


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on a normalised copy and added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_BTD: Tensor, cos_T1C: Tensor, sin_T1C: Tensor) -> Tensor:
        """Return the residual stream after this layer."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_T1C, sin_T1C)
        out_BTD: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out_BTD


class Llama(nn.Module):
    """Llama-style decoder with its language-model head.

    Args:
        config: dimensions, see `LlamaConfig`; `SIZES` has the published ones by name.
        compute_dtype: dtype of activations and of the weights inside matrix products; None: the dtype of the weights.

    Attributes:
        loss_chunks: parts in which output matrix and loss are computed where there are labels; with more than one the
            logits are not there as a whole, and the output has None. A plan sets it.

    Example:
        >>> model = Llama(SIZES["tiny"])
        >>> tokens = torch.randint(256, (2, 17))
        >>> out = model(tokens[:, :-1], labels=tokens[:, 1:])
        >>> tuple(out.logits.shape), out.loss.dtype
        ((2, 16, 256), torch.float32)

    Limitations: training only: no key-value cache, no padding mask, no scaled rotary frequencies.
    """

    def __init__(self, config: LlamaConfig, *, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.loss_chunks = 1
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config.head_dim, config.rope_theta)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self._init_weights()

    def _init_weights(self) -> None:
        nn.init.normal_(self.embed_tokens.weight, std=INIT_STD)
        residual_std = INIT_STD / (2 * self.config.num_layers) ** 0.5
        for name, weight in self.layers.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=residual_std)

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters; a tied matrix counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> LlamaOutput:
        """Predict the token after each position.

        Args:
            tokens: [B, T] token ids, int64.
            labels: [B, T]; `labels[b, t]` is the token after `tokens[b, t]` (already shifted), -100 where none counts.

        Returns:
            Logits [B, T, V], None with labels and more than one of `loss_chunks`; with labels, the mean cross entropy in fp32.
        """
        x_BTD = self.embed_tokens(tokens)
        x_BTD = x_BTD.to(self.compute_dtype or x_BTD.dtype)
        cos_T1C, sin_T1C = self.rotary_emb(x_BTD)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_T1C, sin_T1C)
        x_BTD = self.norm(x_BTD)
        if labels is not None and self.loss_chunks > 1:
            return LlamaOutput(None, self._chunked_loss(x_BTD, labels))
        logits_BTV = self.lm_head(x_BTD)
        if labels is None:
            return LlamaOutput(logits_BTV, None)
        loss = F.cross_entropy(logits_BTV.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
        return LlamaOutput(logits_BTV, loss)

    def _chunked_loss(self, x_BTD: Tensor, labels: Tensor) -> Tensor:
        weight = self.lm_head.weight
        return chunked_cross_entropy(x_BTD, weight, labels, num_chunks=self.loss_chunks, ignore_index=IGNORE_INDEX)
