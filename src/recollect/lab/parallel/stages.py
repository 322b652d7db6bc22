"""Cut a reference model into the stages of a pipeline, each a module of its own."""

from __future__ import annotations

from torch import Tensor, nn

from recollect.errors import NotYetError
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel, GPTOutput
from recollect.lab.models.layer import TransformerLayer

__all__ = ["StageModel"]


class StageModel(GPTModel):
    """Some consecutive layers of a model, with the embedding before the first and norm, LM head and loss after the last.

    Args:
        config: the whole model.
        layers: those of this stage.

    Raises:
        NotYetError: a model with experts or multi-token prediction, whose losses would have to pass through the stages.

    Example:
        >>> import torch
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> last = StageModel(NAMED_CONFIGS["llama-tiny"], range(2, 4))
        >>> hidden = torch.randn(1, 16, 64)
        >>> last(hidden, torch.zeros(1, 16, dtype=torch.int64)).loss.shape
        torch.Size([])
    """

    def __init__(self, config: TransformerConfig, layers: range) -> None:
        clashing = {"num_moe_experts": config.num_moe_experts, "mtp_num_layers": config.mtp_num_layers}
        if any(value is not None for value in clashing.values()):
            raise NotYetError(
                settings={name: value for name, value in clashing.items() if value is not None},
                needs="losses that pass through the stages of a pipeline",
                advice="Use one stage for this model.",
            )
        super().__init__(config.changed(num_layers=len(layers)))
        self.config = config
        self.decoder.layers = nn.ModuleList(TransformerLayer(config, layer) for layer in layers)
        self.is_first, self.is_last = layers.start == 0, layers.stop == config.num_layers
        if not self.is_first:
            del self.embedding
        if not self.is_last:
            del self.output_layer
            self.decoder.final_layernorm = nn.Identity()  # type: ignore[assignment]

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor | GPTOutput:  # type: ignore[override]
        """Run the stage.

        Args:
            x: of the first stage, token ids [B, T]; of others, what the stage before returns, [B, T, D] or this rank's part
                of it along the sequence.
            labels: [B, T]; of the last stage.

        Returns:
            The residual stream, for the next stage; of the last one, see `GPTModel`.
        """
        x_BTD: Tensor = self.embedding(x, self.compute_dtype) if self.is_first else x
        num_positions = x.shape[1] * (1 if self.is_first else self.sequence_ranks * self.sequence.ranks)
        rotary = None if self.rotary_pos_emb is None else self.rotary_pos_emb(x_BTD, num_positions)
        x_BTD, _ = self.decoder(x_BTD, rotary)
        if not self.is_last:
            return x_BTD
        if labels is None:
            return GPTOutput(self.output_layer(x_BTD), None)
        logits_BTV, loss = self._predict(x_BTD, labels)
        return self._output(logits_BTV, loss, loss)
