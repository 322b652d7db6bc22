"""The decoder-only transformer of all models here, under Megatron's names.

Shape legend, used as suffixes in this folder:
    B batch   T positions   D hidden_size   V vocab_size
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recollect.errors import UnsupportedModelError
from recollect.loss.chunked import chunked_cross_entropy
from recollect.models.config import TransformerConfig
from recollect.models.embedding import LanguageModelEmbedding
from recollect.models.layer import TransformerLayer
from recollect.models.linear import Linear
from recollect.models.norm import build_norm
from recollect.models.rotary import Rotary, RotaryEmbedding

__all__ = ["GPTModel", "GPTOutput"]

IGNORE_INDEX = -100


class GPTOutput(NamedTuple):
    """What a forward returns.

    Attributes:
        logits: [B, T, V] in the compute dtype; None if the loss was computed in chunks.
        loss: an fp32 scalar; None without labels.
    """

    logits: Tensor | None
    loss: Tensor | None


class TransformerBlock(nn.Module):
    """The layers, and the norm after the last one.

    Args:
        config: the model.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(config, layer) for layer in range(config.num_layers))
        self.final_layernorm = build_norm(config, config.hidden_size)

    def forward(self, x_BTD: Tensor, rotary: Rotary | None) -> Tensor:
        """Return the residual stream after the last layer, normalised."""
        for layer in self.layers:
            x_BTD = layer(x_BTD, rotary)
        out_BTD: Tensor = self.final_layernorm(x_BTD)
        return out_BTD


class GPTModel(nn.Module):
    """A language model: GPT, Llama, Mixtral, DeepSeek-V3, or what a configuration makes of their parts.

    Args:
        config: dimensions and parts; `recollect.models.sizes` has the published ones by name.
        compute_dtype: dtype of activations and of the weights inside matrix products; None: the dtype of the weights.

    Attributes:
        loss_chunks: parts in which output matrix and loss are computed where there are labels; with more than one the
            logits are not there as a whole, and the output has None. A plan sets it.

    Example:
        >>> from recollect.models.sizes import NAMED_CONFIGS
        >>> model = GPTModel(NAMED_CONFIGS["gpt-tiny"])
        >>> tokens = torch.randint(256, (2, 17))
        >>> out = model(tokens[:, :-1], labels=tokens[:, 1:])
        >>> tuple(out.logits.shape), out.loss.dtype
        ((2, 16, 256), torch.float32)

    Limitations: training only: no key-value cache, no padding mask, no scaled rotary frequencies.
    """

    def __init__(self, config: TransformerConfig, *, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if config.mtp_num_layers is not None:
            raise UnsupportedModelError(
                f"mtp_num_layers: got {config.mtp_num_layers}, but multi-token prediction is not built yet."
            )
        self.config = config
        self.compute_dtype = compute_dtype
        self.loss_chunks = 1
        self.embedding = LanguageModelEmbedding(config)
        self.rotary_pos_emb: RotaryEmbedding | None = None
        if config.position_embedding_type == "rope" or config.multi_latent_attention:
            self.rotary_pos_emb = RotaryEmbedding(config)
        self.decoder = TransformerBlock(config)
        self.output_layer = Linear(config.hidden_size, config.vocab_size, bias=False, init_std=config.init_method_std)
        if config.share_embeddings_and_output_weights:
            self.output_layer.weight = self.embedding.word_embeddings.weight

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters; a tied matrix counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> GPTOutput:
        """Predict the token after each position.

        Args:
            tokens: [B, T] token ids, int64.
            labels: [B, T]; `labels[b, t]` is the token after `tokens[b, t]` (already shifted), -100 where none counts.

        Returns:
            Logits [B, T, V], None with labels and more than one of `loss_chunks`; with labels, the mean cross entropy in fp32.

        Raises:
            ValueError: more positions than the model has learned.
        """
        x_BTD = self.embedding(tokens, self.compute_dtype)
        rotary = None if self.rotary_pos_emb is None else self.rotary_pos_emb(x_BTD)
        x_BTD = self.decoder(x_BTD, rotary)
        if labels is not None and self.loss_chunks > 1:
            weight = self.output_layer.weight
            loss = chunked_cross_entropy(x_BTD, weight, labels, num_chunks=self.loss_chunks, ignore_index=IGNORE_INDEX)
            return GPTOutput(None, loss)
        logits_BTV = self.output_layer(x_BTD)
        if labels is None:
            return GPTOutput(logits_BTV, None)
        loss = F.cross_entropy(logits_BTV.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
        return GPTOutput(logits_BTV, loss)
