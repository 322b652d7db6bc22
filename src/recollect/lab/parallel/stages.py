"""Cut a reference model into the stages of a pipeline, each a module of its own."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from recollect.errors import DataError
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel, GPTOutput
from recollect.lab.models.layer import TransformerLayer
from recollect.lab.models.multi_token_prediction import MultiTokenPrediction
from recollect.lab.models.router import RouterStatistics

__all__ = ["StageModel"]


class StageModel(GPTModel):
    """Some consecutive layers of a model, with the embedding before the first and norm, LM head and loss after the last.

    With multi-token prediction, the last stage has a copy of the embedding as well. Losses of routers go backward from where
    they are; the loss that the last stage returns has only its own.

    Args:
        config: the whole model.
        layers: those of this stage.

    Example:
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> last = StageModel(NAMED_CONFIGS["llama-tiny"], range(2, 4))
        >>> hidden = torch.randn(1, 16, 64)
        >>> last(hidden, torch.zeros(1, 16, dtype=torch.int64)).loss.shape
        torch.Size([])
    """

    def __init__(self, config: TransformerConfig, layers: range) -> None:
        super().__init__(config.changed(num_layers=len(layers), mtp_num_layers=None))
        self.config = config
        self.decoder.layers = nn.ModuleList(TransformerLayer(config, layer) for layer in layers)
        self.is_first, self.is_last = layers.start == 0, layers.stop == config.num_layers
        if self.is_last and config.mtp_num_layers is not None:
            self.mtp = MultiTokenPrediction(config)
        if not self.is_first and self.mtp is None:
            del self.embedding
        if not self.is_last:
            del self.output_layer
            self.decoder.final_layernorm = nn.Identity()  # type: ignore[assignment]

    def forward(  # type: ignore[override]
        self, x: Tensor, labels: Tensor | None = None, tokens: Tensor | None = None
    ) -> Tensor | GPTOutput:
        """Run the stage.

        Args:
            x: of the first stage, token ids [B, T]; of others, what the stage before returns, [B, T, D] or this rank's part
                of it along the sequence.
            labels: [B, T]; of the last stage.
            tokens: [B, T] token ids; of a last stage with multi-token prediction, in training.

        Returns:
            The residual stream, for the next stage; of the last one, see `GPTModel`.

        Raises:
            DataError: a last stage with multi-token prediction got no tokens in training.
        """
        x_BTD: Tensor = self.embedding(x, self.compute_dtype) if self.is_first else x
        num_positions = x.shape[1] * (1 if self.is_first else self.sequence_ranks * self.sequence.ranks)
        rotary = None if self.rotary_pos_emb is None else self.rotary_pos_emb(x_BTD, num_positions)
        x_BTD, statistics = self.decoder(x_BTD, rotary)
        if not self.is_last:
            self._count(statistics)
            return self._with_losses(x_BTD, statistics)
        if labels is None:
            return GPTOutput(self.output_layer(x_BTD), None)
        tokens = x if self.is_first else tokens
        if tokens is None:
            if self.mtp is not None and self.training:
                raise DataError(
                    "tokens: got None, expected token ids [B, T]: the last stage predicts several tokens, and embeds those in "
                    "between. Pass the tokens of the micro-batch to the last stage, too."
                )
            tokens = labels  # which nothing reads
        return self._losses(x_BTD, statistics, tokens, labels, rotary)

    def _with_losses(self, x_BTD: Tensor, statistics: list[RouterStatistics | None]) -> Tensor:
        """Return the residual stream; its backward begins that of the routers' losses."""
        losses = [one.aux_loss for one in statistics if one is not None and one.aux_loss is not None]
        if not losses:
            return x_BTD
        loss = torch.stack(losses).sum()
        self.note_router_loss(loss)
        result: Any = _WithLoss.apply(x_BTD, loss)  # type: ignore[no-untyped-call]
        return cast(Tensor, result)

    def note_router_loss(self, loss: Tensor) -> None:
        """Take the losses of the routers of a stage before the last, a scalar, which no output has."""


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (one,) = ctx.saved_tensors
        return grad_outputs[0], one
