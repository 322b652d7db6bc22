"""A mixture of experts in place of an MLP: router, routed experts, and a shared expert.

Shape legend: B batch   T positions   D hidden_size   N = B * T tokens   E experts   J experts per token
    S = N * J rows, one for each token and chosen expert
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.experts import Experts
from recollect.lab.models.mlp import MLP
from recollect.lab.models.router import RouterStatistics, Routing, TopKRouter

__all__ = ["MoELayer"]


class MoELayer(nn.Module):
    """Send each token through `moe_router_topk` experts and return the weighted sum. No token is dropped.

    Rows are gathered in both directions, never scattered with atomic additions, so that a GPU gives the same bits every time.

    Args:
        config: a model with experts.

    Example:
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> out, statistics = MoELayer(NAMED_CONFIGS["mixtral-tiny"])(torch.randn(2, 16, 64))
        >>> tuple(out.shape), int(statistics.tokens_per_expert.sum())
        ((2, 16, 64), 64)
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.router = TopKRouter(config)
        self.experts = Experts(config)
        self.shared_experts: MLP | None = None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = MLP(config, config.moe_shared_expert_intermediate_size)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, RouterStatistics]:
        """Return the output for the residual stream, and the router's statistics.

        Args:
            x_BTD: the normalised residual stream.
        """
        routing: Routing = self.router(x_BTD)
        out_BTD = self._routed(x_BTD.flatten(0, 1), routing).view_as(x_BTD)
        if self.shared_experts is not None:
            out_BTD = out_BTD + self.shared_experts(x_BTD)
        return out_BTD, routing.statistics

    def _routed(self, x_ND: Tensor, routing: Routing) -> Tensor:
        num_choices = routing.experts_NJ.shape[1]
        expert_S, order_S = routing.experts_NJ.flatten().sort(stable=True)
        ends_E = routing.statistics.tokens_per_expert.cumsum(0, dtype=torch.int32)
        rows_SD = x_ND[order_S // num_choices]
        rows_SD = self.experts(rows_SD, routing.probabilities_NJ.flatten()[order_S], expert_S, ends_E)
        # Undo the sort: the inverse of a permutation is its argsort.
        rows_SD = rows_SD[order_S.argsort()]
        out_ND: Tensor = rows_SD.unflatten(0, (-1, num_choices)).sum(dim=1)
        return out_ND
