"""Map token ids to the residual stream: word embedding, learned positions, dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recollect.errors import DataError
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.linear import Embedding
from recollect.lab.models.sequence import WholeSequence

__all__ = ["LanguageModelEmbedding"]


class LanguageModelEmbedding(nn.Module):
    """Word embeddings plus learned positions, if the model has them, then dropout.

    Args:
        config: the model.

    Attributes:
        sequence: what this rank has of each sequence.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        std = config.init_method_std
        self.dropout = config.hidden_dropout
        self.sequence = WholeSequence()
        self.max_positions = config.max_position_embeddings
        self.word_embeddings = Embedding(config.vocab_size, config.hidden_size, init_std=std)
        self.position_embeddings: Embedding | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = Embedding(self.max_positions, config.hidden_size, init_std=std)

    def forward(self, tokens: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Map token ids [B, T] to [B, T, D], of this rank's positions, in `dtype`; None: that of the weights.

        Raises:
            DataError: more positions than the model has learned.
        """
        x_BTD: Tensor = self.word_embeddings(self.sequence.own(tokens))
        if self.position_embeddings is not None:
            num_positions = tokens.shape[1]
            if num_positions > self.max_positions:
                raise DataError(
                    f"tokens: got {num_positions} positions, expected at most max_position_embeddings = "
                    f"{self.max_positions}, because positions are learned. Shorten the sequences, or build a model with more."
                )
            positions = self.sequence.own(torch.arange(num_positions, device=tokens.device))
            x_BTD = x_BTD + self.position_embeddings(positions)
        x_BTD = x_BTD.to(dtype or x_BTD.dtype)
        return F.dropout(x_BTD, self.dropout) if self.training and self.dropout else x_BTD
