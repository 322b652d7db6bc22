"""Dimensions of Llama-style decoders, the published ones by name. Imports no torch: `--help` must be quick."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Dimensions of a Llama-style decoder.

    Args:
        vocab_size: number of token ids.
        hidden_size: width of the residual stream.
        num_layers: number of decoder layers.
        num_heads: query heads; must divide `hidden_size`, the quotient must be even (rotary pairs).
        num_kv_heads: key and value heads; must divide `num_heads`. 0: as many as `num_heads`.
        intermediate_size: width inside the feed-forward part. 0: 8/3 of `hidden_size`, up to a multiple of 64.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in RMSNorm.
        tie_embeddings: use the embedding matrix as the output matrix.

    Raises:
        ValueError: a dimension is not positive, or one that must divide another does not.

    Example:
        >>> SIZES["7b"].num_parameters
        6738415616
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 0
    intermediate_size: int = 0
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.intermediate_size == 0:
            object.__setattr__(self, "intermediate_size", -(-8 * self.hidden_size // (3 * 64)) * 64)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"LlamaConfig.{name}: got {getattr(self, name)}, expected at least 1.")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"LlamaConfig.hidden_size: got {self.hidden_size}, expected a multiple of 2 * num_heads = "
                f"{2 * self.num_heads}, because rotary embedding turns pairs of channels."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"LlamaConfig.num_kv_heads: got {self.num_kv_heads}, "
                f"expected a divisor of num_heads = {self.num_heads}."
            )

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Exact number of trainable parameters; a tied matrix counts once."""
        d, f = self.hidden_size, self.intermediate_size
        attention = 2 * d * d + 2 * d * self.num_kv_heads * self.head_dim
        layer = attention + 3 * d * f + 2 * d
        vocabulary = self.vocab_size * d * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + d + vocabulary


def _size(vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
    )


# Sources: 160m is JackFram/llama-160m, 1b TinyLlama-1.1B, 7b, 13b and 70b Llama 2 (arXiv 2307.09288), 8b Llama 3
# (arXiv 2407.21783). tiny and demo are ours: bytes as tokens, small enough for tests and for two CPU cores.
SIZES: dict[str, LlamaConfig] = {
    "tiny": _size(256, 64, 192, 2, 4, 2),
    "demo": _size(256, 256, 704, 8, 4, 2),
    "160m": _size(32_000, 768, 3072, 12, 12, 12),
    "1b": _size(32_000, 2048, 5632, 22, 32, 4),
    "7b": _size(32_000, 4096, 11_008, 32, 32, 32),
    "8b": LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        rope_theta=500_000.0,
    ),
    "13b": _size(32_000, 5120, 13_824, 40, 40, 40),
    "70b": _size(32_000, 8192, 28_672, 80, 64, 8),
}
