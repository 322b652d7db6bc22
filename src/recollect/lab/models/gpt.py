"""The decoder-only transformer behind all reference models, with Megatron's module names.

Shape legend, used as suffixes in this folder:
    B batch   T positions   D hidden_size   V vocab_size
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from recollect.errors import DataError
from recollect.lab.models.attention import LatentAttention, Rotary, RotaryEmbedding, SelfAttention
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.linear import Embedding, Linear, build_norm
from recollect.lab.models.mlp import MLP, MoELayer
from recollect.lab.models.router import RouterStatistics, TopKRouter
from recollect.lab.models.sequence import WholeSequence
from recollect.loss.chunked import chunked_cross_entropy

IGNORE_INDEX = -100


def cross_entropy(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Return the mean cross entropy of the labels that are not ignored, in fp32."""
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORE_INDEX)


class GPTOutput(NamedTuple):
    """Result of a forward."""

    logits: Tensor | None
    """[B, T, V] in the compute dtype; None if the loss was computed in chunks."""
    loss: Tensor | None
    """The loss to train on, an fp32 scalar; None without labels. In training mode it includes the routers' auxiliary losses
    and the loss of multi-token prediction."""
    lm_loss: Tensor | None = None
    """Mean cross entropy of the next token only; None without labels."""


class LanguageModelEmbedding(nn.Module):
    """Word embeddings plus learned positions, if the model has them, then dropout."""

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
        """Map token ids [B, T] to [B, T, D], of this rank's positions, in `dtype`; None: that of the weights."""
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


class TransformerLayer(nn.Module):
    """Attention and MLP, each applied to the normalised residual stream and added to it."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        config = config.of_layer(layer)
        self.hidden_dropout = config.hidden_dropout
        self.input_layernorm = build_norm(config, config.hidden_size)
        self.self_attention: nn.Module = (
            LatentAttention(config) if config.multi_latent_attention else SelfAttention(config)
        )
        self.pre_mlp_layernorm = build_norm(config, config.hidden_size)
        self.mlp: nn.Module = MoELayer(config) if config.is_moe_layer(layer) else MLP(config)

    def forward(self, x_BTD: Tensor, rotary: Rotary | None) -> tuple[Tensor, RouterStatistics | None]:
        x_BTD = x_BTD + self._dropped(self.self_attention(self.input_layernorm(x_BTD), rotary))
        out = self.mlp(self.pre_mlp_layernorm(x_BTD))
        out_BTD, statistics = out if isinstance(out, tuple) else (out, None)
        return x_BTD + self._dropped(out_BTD), statistics

    def _dropped(self, x_BTD: Tensor) -> Tensor:
        return F.dropout(x_BTD, self.hidden_dropout) if self.training and self.hidden_dropout else x_BTD


def shifted(tokens_BT: Tensor, places: int, fill: int) -> Tensor:
    """Shift every sequence left by `places`, and append `fill`."""
    return F.pad(tokens_BT[:, places:], (0, min(places, tokens_BT.shape[1])), value=fill)


class MultiTokenPredictionLayer(nn.Module):
    """One depth: combine the state of position t with the token k places later, and apply a layer."""

    def __init__(self, config: TransformerConfig, depth: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.enorm = build_norm(config, hidden)
        self.hnorm = build_norm(config, hidden)
        layer = config.num_layers + depth
        self.eh_proj: nn.Module = Linear(
            2 * hidden, hidden, bias=False, init_std=config.init_method_std, config=config.of_layer(layer)
        )
        self.transformer_layer = TransformerLayer(config, layer)
        self.final_layernorm = build_norm(config, hidden)

    def forward(
        self, x_BTD: Tensor, embedded_BTD: Tensor, rotary: Rotary | None
    ) -> tuple[Tensor, RouterStatistics | None]:
        """Return the input of the LM head and the next depth, and the router's statistics."""
        both = torch.cat((self.enorm(embedded_BTD), self.hnorm(x_BTD)), dim=-1)
        x_BTD, statistics = self.transformer_layer(self.eh_proj(both), rotary)
        return self.final_layernorm(x_BTD), statistics


class MultiTokenPrediction(nn.Module):
    """Depths 1 to `mtp_num_layers`, each building on the previous one, with the embedding and LM head of the model.

    The last positions of a sequence lack the tokens that a depth needs; their outputs are computed but excluded from the loss.

    References:
        DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437, section 2.2, equations 21 to 25. The embedding comes first in the
        concatenation and the residual stream is normalised once more before it, as in the released weights and in Megatron.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        depths = range(config.mtp_num_layers or 0)
        self.layers = nn.ModuleList(MultiTokenPredictionLayer(config, depth) for depth in depths)

    def forward(
        self, x_BTD: Tensor, embedded_BTD: Sequence[Tensor], rotary: Rotary | None
    ) -> tuple[list[Tensor], list[RouterStatistics | None]]:
        """Run every depth on the normalised output of the decoder, and the embeddings of the tokens as many places later.

        Return for each depth the input of the LM head, [B, T, D], and its router's statistics.
        """
        outputs, statistics = [], []
        for layer, embedded in zip(self.layers, embedded_BTD, strict=True):
            x_BTD, layer_statistics = layer(x_BTD, embedded, rotary)
            outputs.append(x_BTD)
            statistics.append(layer_statistics)
        return outputs, statistics


class TransformerBlock(nn.Module):
    """All layers and the final norm."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(config, layer) for layer in range(config.num_layers))
        self.final_layernorm = build_norm(config, config.hidden_size)

    def forward(self, x_BTD: Tensor, rotary: Rotary | None) -> tuple[Tensor, list[RouterStatistics | None]]:
        statistics = []
        for layer in self.layers:
            x_BTD, layer_statistics = layer(x_BTD, rotary)
            statistics.append(layer_statistics)
        return self.final_layernorm(x_BTD), statistics


class GPTModel(nn.Module):
    """A language model: GPT, Llama, Mixtral, DeepSeek-V3, or any combination of their parts.

    Args:
        config: dimensions and parts; `recollect.lab.models.sizes` has published models by name.
        compute_dtype: dtype of activations and of the weights inside matrix products; None: the dtype of the weights.

    Attributes:
        loss_chunks: number of chunks in which LM head and loss are computed if there are labels; with more than one, the output
            has no logits. A plan sets it.
        sequence: this rank's part of each sequence; tokens and labels are whole all the same.
        sequence_ranks: among how many ranks the residual stream is split along the sequence.
        cross_entropy: from logits and labels [B, T] to the loss, a scalar; a different one where logits are split over ranks.
        vocabulary_group: these ranks, if they are.

    Limitations: training only: no key-value cache, no padding mask, no scaled rotary frequencies.
    """

    def __init__(self, config: TransformerConfig, *, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.loss_chunks = 1
        self.sequence = WholeSequence()
        self.sequence_ranks = 1
        self.cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy
        self.vocabulary_group: dist.ProcessGroup | None = None
        self.embedding = LanguageModelEmbedding(config)
        self.rotary_pos_emb: RotaryEmbedding | None = None
        if config.position_embedding_type == "rope" or config.multi_latent_attention:
            self.rotary_pos_emb = RotaryEmbedding(config)
        self.decoder = TransformerBlock(config)
        self.output_layer = Linear(config.hidden_size, config.vocab_size, bias=False, init_std=config.init_method_std)
        if config.share_embeddings_and_output_weights:
            self.output_layer.weight = self.embedding.word_embeddings.weight
        self.mtp = MultiTokenPrediction(config) if config.mtp_num_layers is not None else None

    @property
    def num_parameters(self) -> int:
        """Number of parameters; a tied matrix counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def update_expert_bias(self) -> None:
        """Update the biases that balance the experts' load, if the model has any; call it after each optimizer step.

        Every forward in training mode since the last call counts its tokens, so gradients may be accumulated.

        Limitations: counts the tokens of this process, or of the ranks that `recollect.lab.parallel` has registered.
        """
        for router in self.routers:
            router.update_expert_bias()

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> GPTOutput:
        """Predict the token after each position of `tokens`, [B, T] ids.

        `labels[b, t]` is the token after `tokens[b, t]` (already shifted), or -100 to ignore the position. With them there are
        losses in fp32, and with `loss_chunks` above 1 no logits [B, T, V].
        """
        x_BTD = self.embedding(tokens, self.compute_dtype)
        rotary = None if self.rotary_pos_emb is None else self.rotary_pos_emb(x_BTD, tokens.shape[1])
        x_BTD, statistics = self.decoder(x_BTD, rotary)
        if labels is None:
            return GPTOutput(self.output_layer(x_BTD), None)
        return self._losses(x_BTD, statistics, tokens, labels, rotary)

    def _losses(
        self,
        x_BTD: Tensor,
        statistics: list[RouterStatistics | None],
        tokens: Tensor,
        labels: Tensor,
        rotary: Rotary | None,
    ) -> GPTOutput:
        """Return logits and losses from the normalised output of the decoder, and count where its tokens went."""
        logits_BTV, lm_loss = self._predict(x_BTD, labels)
        loss = lm_loss
        if self.training and self.mtp is not None:
            mtp_loss, mtp_statistics = self._mtp_loss(self.mtp, x_BTD, tokens, labels, rotary)
            loss, statistics = loss + mtp_loss, statistics + mtp_statistics
        for one in statistics:
            if one is not None and one.aux_loss is not None:
                loss = loss + one.aux_loss
        self._count(statistics)
        whole_lm_loss = self.sequence.shared(lm_loss)
        return GPTOutput(logits_BTV, whole_lm_loss if loss is lm_loss else self.sequence.shared(loss), whole_lm_loss)

    def _predict(self, x_BTD: Tensor, labels: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the logits, or None if the loss is computed in chunks, and the loss of this rank."""
        own, logits_BTV = self.sequence.own(labels), None
        if self.loss_chunks > 1:
            mean = chunked_cross_entropy(
                x_BTD,
                self.output_layer.weight,
                own,
                num_chunks=self.loss_chunks,
                ignore_index=IGNORE_INDEX,
                group=self.vocabulary_group,
            )
        else:
            logits_BTV = self.output_layer(x_BTD)
            mean = self.cross_entropy(logits_BTV, own)
        return logits_BTV, self.sequence.loss(mean, labels)

    def _mtp_loss(
        self, mtp: MultiTokenPrediction, x_BTD: Tensor, tokens: Tensor, labels: Tensor, rotary: Rotary | None
    ) -> tuple[Tensor, list[RouterStatistics | None]]:
        """Return the weighted mean loss of all depths (arXiv 2412.19437, equation 25), and their routers' statistics."""
        depths = range(1, len(mtp.layers) + 1)
        embedded_BTD = [self.embedding(shifted(tokens, depth, fill=0), self.compute_dtype) for depth in depths]
        outputs, statistics = mtp(x_BTD, embedded_BTD, rotary)
        losses = []
        for depth, output_BTD in zip(depths, outputs, strict=True):
            targets = shifted(labels, depth, fill=IGNORE_INDEX)
            _, loss = self._predict(output_BTD, targets)
            # The mean over no labels is nan; a sequence may have labels for the next token only.
            losses.append(torch.where((targets != IGNORE_INDEX).any(), loss, torch.zeros_like(loss)))
        return self.config.mtp_loss_scaling_factor * torch.stack(losses).mean(), statistics

    @property
    def routers(self) -> list[TopKRouter]:
        return [module for module in self.modules() if isinstance(module, TopKRouter)]

    def _count(self, statistics: list[RouterStatistics | None]) -> None:
        if not (self.training and torch.is_grad_enabled()):
            return
        for router, one in zip(self.routers, (one for one in statistics if one is not None), strict=True):
            router.count(one)
