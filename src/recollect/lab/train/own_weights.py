"""Give each process its part of a new model's weights, and nothing else.

The model is built and spread on the meta device, where it takes no memory. What a process then has is drawn into place.
"""

from __future__ import annotations

import torch
from torch import nn

from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.seed_weights import SeedWeights
from recollect.lab.parallel.tensor import fused_parameters
from recollect.lab.train.stored_state import Fused, parts_of

__all__ = ["OwnWeights"]


class OwnWeights:
    """The weights of this process.

    Args:
        weights: those of the whole model, and the device where they go.
        tensor_ranks: those of tensor parallelism, which reorders rows.
    """

    def __init__(self, weights: SeedWeights, tensor_ranks: int) -> None:
        self._weights, self._tensor_ranks = weights, tensor_ranks

    @torch.no_grad()
    def draw(self, model: GPTModel) -> None:
        """Put weights in the place of parameters on the meta device, and zeros in that of buffers.

        They are new objects, with the hooks of the old ones, which whoever holds them still has.

        Args:
            model: with the names of the whole model; spread or not. Changed in place.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        fused = fused_parameters(model) if self._tensor_ranks > 1 else {}
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for place, parameter in [*module.named_parameters(recurse=False)]:
                if id(parameter) not in made:
                    name = names[id(parameter)]
                    made[id(parameter)] = self._drawn(parameter, name, fused.get(name))
                setattr(module, place, made[id(parameter)])
            for place, buffer in [*module.named_buffers(recurse=False)]:
                setattr(module, place, torch.zeros_like(buffer, device=self._weights.device))

    def _drawn(self, empty: nn.Parameter, name: str, fused: Fused | None) -> nn.Parameter:
        tensor = torch.empty_like(empty, device=self._weights.device)
        for chunk, part in parts_of(tensor, fused, self._tensor_ranks):
            self._weights.write(name, part, chunk.offsets)
        drawn = nn.Parameter(tensor, requires_grad=empty.requires_grad)
        for hook in (getattr(empty, "_backward_hooks", None) or {}).values():
            drawn.register_hook(hook)
        return drawn
