"""The stages of a reference model in a pipeline, each a separate module, and all stages of one rank.

A rank's parameters have their names in the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recollect.errors import DataError
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel, MultiTokenPrediction, TransformerLayer
from recollect.lab.models.router import RouterStatistics


class LossStage(GPTModel):
    """Some consecutive layers of a model, with the embedding before the first and norm, LM head and loss after the last.

    As a pipeline's schedule runs it: the last one returns its loss, and nothing else. With multi-token prediction, it has a
    copy of the embedding as well. Backward of routers' losses starts at their own stage; the loss that the last stage returns
    has only its own. The step takes `router_losses`, of each forward before the last stage those of its routers. `ends` says
    whether the stage is the first and the last, which layers tell unless there are none.
    """

    def __init__(self, config: TransformerConfig, layers: range, ends: tuple[bool, bool] | None = None) -> None:
        # One is the fewest that a model has; the layers of a stage, of which there may be none, replace it.
        num_layers = max(len(layers), 1)
        super().__init__(config.changed(num_layers=num_layers, mtp_num_layers=None, first_last_layers_bf16=False))
        self.config = config
        self.router_losses: list[Tensor] = []
        self.decoder.layers = nn.ModuleList(TransformerLayer(config, layer) for layer in layers)
        self.is_first, self.is_last = ends or (layers.start == 0, layers.stop == config.num_layers)
        if self.is_last and config.mtp_num_layers is not None:
            self.mtp = MultiTokenPrediction(config)
        if not self.is_first and self.mtp is None:
            del self.embedding
        if not self.is_last:
            del self.output_layer
            self.decoder.final_layernorm = nn.Identity()  # type: ignore[assignment]

    def forward(self, x: Tensor, labels: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Run the stage; return the residual stream for the next one, of the last one the loss, or without labels the logits.

        `x` are token ids [B, T] of the first stage, of others the output of the stage before, [B, T, D] or this rank's part of
        it along the sequence. Only the last one needs `labels`, and with multi-token prediction, in training, `tokens`.
        """
        x_BTD: Tensor = self.embedding(x, self.compute_dtype) if self.is_first else x
        num_positions = x.shape[1] * (1 if self.is_first else self.sequence_ranks * self.sequence.ranks)
        rotary = None if self.rotary_pos_emb is None else self.rotary_pos_emb(x_BTD, num_positions)
        x_BTD, statistics = self.decoder(x_BTD, rotary)
        if not self.is_last:
            self._count(statistics)
            return self._with_losses(x_BTD, statistics)
        if labels is None:
            return self.output_layer(x_BTD)
        tokens = x if self.is_first else tokens
        if tokens is None:
            if self.mtp is not None and self.training:
                raise DataError(
                    "tokens: got None, expected token ids [B, T]: the last stage predicts several tokens, and embeds those in "
                    "between. Pass the tokens of the micro-batch to the last stage, too."
                )
            tokens = labels  # which nothing reads
        loss = self._losses(x_BTD, statistics, tokens, labels, rotary).loss
        assert loss is not None
        return loss

    def micro_batch(self, x: Tensor, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the arguments of `forward` for a micro-batch of which the stage receives `x`."""
        if not self.is_last:
            return {"x": x}
        embedded = {} if self.is_first or self.mtp is None else {"tokens": tokens}
        return {"x": x, "labels": labels, **embedded}

    def _with_losses(self, x_BTD: Tensor, statistics: list[RouterStatistics | None]) -> Tensor:
        """Return the residual stream; its backward also starts the backward of the routers' losses."""
        losses = [one.aux_loss for one in statistics if one is not None and one.aux_loss is not None]
        if not losses:
            return x_BTD
        loss = torch.stack(losses).sum()
        self.router_losses.append(self.sequence.shared(loss.detach()))
        return _WithLoss.apply(x_BTD, loss)  # type: ignore[no-untyped-call]


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (one,) = ctx.saved_tensors
        return grad_outputs[0], one


class PipelineRank(GPTModel):
    """The stages of one rank. Parameters and buffers have the names that they have in the whole model.

    Where embedding and LM head are one matrix, the last rank has a copy of it, under both names. With multi-token prediction it
    has a copy of the embedding.
    """

    def __init__(self, config: TransformerConfig, stages: dict[int, LossStage], layers: Sequence[range]) -> None:
        nn.Module.__init__(self)
        self.config = config
        # Modules in a dict are not children: their parameters are registered below, by other names.
        self.stages = dict(stages)
        own = {
            str(number): layer
            for stage, module in stages.items()
            for number, layer in zip(layers[stage], module.decoder.layers, strict=True)
        }
        first = next((stage for stage in stages.values() if stage.is_first), None)
        last = next((stage for stage in stages.values() if stage.is_last), None)
        if first is not None:
            self.embedding = first.embedding
        elif last is not None and last.mtp is not None:
            self.embedding = last.embedding
        elif last is not None and config.share_embeddings_and_output_weights:
            self.embedding = _embedding_of(last.output_layer)  # type: ignore[assignment]
        self.decoder = nn.Module()  # type: ignore[assignment]
        self.decoder.layers = nn.ModuleDict(own)  # type: ignore[assignment]
        if last is not None:
            self.decoder.final_layernorm = last.decoder.final_layernorm
            self.output_layer = last.output_layer
            self.mtp = last.mtp
        self.has_first, self.has_last = first is not None, last is not None

    @property
    def shared(self) -> tuple[nn.Parameter, ...]:
        """The parameters that both the first rank and the last have a copy of, in the same order."""
        config = self.config
        is_shared = config.mtp_num_layers is not None or config.share_embeddings_and_output_weights
        if not (is_shared and (self.has_first or self.has_last)):
            return ()
        alone = config.mtp_num_layers is None  # without the positions, which the last rank does not have
        embedding: nn.Module = self.embedding.get_submodule("word_embeddings") if alone else self.embedding
        return tuple(embedding.parameters())

    @property
    def loss_chunks(self) -> int:
        """Number of chunks of the last stage's loss; 1 if that stage is not here."""
        return next((stage.loss_chunks for stage in self.stages.values() if stage.is_last), 1)

    @loss_chunks.setter
    def loss_chunks(self, count: int) -> None:
        for stage in self.stages.values():
            if stage.is_last:
                stage.loss_chunks = count

    def train(self, mode: bool = True) -> PipelineRank:
        super().train(mode)
        for stage in self.stages.values():
            stage.train(mode)
        return self


def _embedding_of(head: nn.Module) -> nn.Module:
    """Return a hook that gives the LM head's matrix the name that it has as an embedding."""
    words, embedding = nn.Module(), nn.Module()
    words.register_parameter("weight", head.get_parameter("weight"))
    embedding.word_embeddings = words
    return embedding
