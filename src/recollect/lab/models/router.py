"""Route tokens to experts: choose the experts, weight their outputs, balance their load.

Plans always keep the result of `topk`, so backward sees the experts that forward chose.

Shape legend: B batch   T positions   N = B * T tokens   E experts   J experts per token   G groups of experts
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.sequence import WholeSequence

# Keeps sigmoids divided by their sum finite if all of them are 0.
_LEAST_SUM = 1e-20


class RouterStatistics(NamedTuple):
    """Statistics of a layer's router in one forward.

    Returned, not stored: a layer may run again, or several times before a backward.
    """

    tokens_per_expert: Tensor
    """[E], number of tokens sent to each expert, int64."""
    aux_loss: Tensor | None
    """Weighted load-balancing loss, an fp32 scalar; None without such a loss or outside of training."""


class Routing(NamedTuple):
    """The routes of the tokens of a forward."""

    experts_NJ: Tensor
    probabilities_NJ: Tensor
    """Weights of their outputs, fp32."""
    statistics: RouterStatistics


class TopKRouter(nn.Module):
    """Score all experts for each token and choose the best ones.

    With "softmax" the weights are a softmax over the chosen experts' logits, or with `moe_router_pre_softmax` the chosen part
    of a softmax over all. With "sigmoid" they are the chosen sigmoids divided by their sum. `moe_router_num_groups` limits the
    choice to the groups whose best experts have the largest sum of scores.

    Attributes:
        expert_bias: [E], fp32 even if the model is cast; added to the scores to choose experts, but not to their weights. None
            without `moe_router_enable_expert_bias`.
        tokens_per_expert: [E], int64; tokens counted since the last `update_expert_bias`. None without a bias.
        sequence: this rank's part of each sequence.
        weight_of_all: maps the weight to the one that this rank uses, where other ranks route other tokens of a batch.
        counts_of_all: maps this rank's counts to those of all ranks, if they have their own batches.

    References:
        Fedus et al. 2021, "Switch Transformers", arXiv 2101.03961, equations 4 to 6: the auxiliary loss, here divided by J: it
            is 1 for an even load.
        DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437, section 2.1.2: sigmoids, groups, bias (equation 16) and the loss
            for each sequence (equations 17 to 20).
    """

    expert_bias: Tensor | None
    tokens_per_expert: Tensor | None

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.sequence = WholeSequence()
        self.weight_of_all: Callable[[Tensor], Tensor] = _same
        self.counts_of_all: Callable[[Tensor], Tensor] = self.sequence.counts
        self.num_experts = config.num_moe_experts or 0
        self.init_std = config.init_method_std
        self.weight = nn.Parameter(torch.empty(self.num_experts, config.hidden_size))
        has_bias = config.moe_router_enable_expert_bias
        bias = torch.empty(self.num_experts, dtype=torch.float32) if has_bias else None
        counts = torch.empty(self.num_experts, dtype=torch.int64) if has_bias else None
        self.register_buffer("expert_bias", bias)
        self.register_buffer("tokens_per_expert", counts, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)
        for buffer in self.buffers():
            nn.init.zeros_(buffer)

    def forward(self, x_BTD: Tensor) -> Routing:
        x_ND = x_BTD.flatten(0, 1)
        if self.config.moe_router_dtype == "fp32":
            x_ND = x_ND.float()
        logits_NE = F.linear(x_ND, self.weight_of_all(self.weight).to(x_ND.dtype)).float()
        if self.config.moe_router_score_function == "sigmoid":
            scores_NE = logits_NE.sigmoid()
            experts_NJ = self._choose(scores_NE)
            chosen_NJ = scores_NE.gather(1, experts_NJ)
            probabilities_NJ = chosen_NJ / (chosen_NJ.sum(dim=-1, keepdim=True) + _LEAST_SUM)
            scores_NE = scores_NE / (scores_NE.sum(dim=-1, keepdim=True) + _LEAST_SUM)
        else:
            scores_NE = logits_NE.softmax(dim=-1)
            experts_NJ = self._choose(scores_NE)
            if self.config.moe_router_pre_softmax:
                probabilities_NJ = scores_NE.gather(1, experts_NJ)
            else:
                probabilities_NJ = logits_NE.gather(1, experts_NJ).softmax(dim=-1)
        if self.config.moe_router_topk_scaling_factor is not None:
            probabilities_NJ = probabilities_NJ * self.config.moe_router_topk_scaling_factor
        tokens_per_expert = self._is_chosen(experts_NJ).sum(dim=0)
        aux_loss = self._aux_loss(scores_NE.unflatten(0, x_BTD.shape[:2]), experts_NJ)
        return Routing(experts_NJ, probabilities_NJ, RouterStatistics(tokens_per_expert, aux_loss))

    def count(self, statistics: RouterStatistics) -> None:
        """Count the tokens of a forward for the next `update_expert_bias`."""
        if self.tokens_per_expert is not None:
            self.tokens_per_expert += statistics.tokens_per_expert

    @torch.no_grad()
    def update_expert_bias(self) -> None:
        """Raise the bias of experts with fewer tokens than the mean, lower the others, and reset the counts.

        Call it once after each optimizer step, however many forwards the step had.
        """
        if self.expert_bias is None or self.tokens_per_expert is None:
            return
        counts = self.counts_of_all(self.tokens_per_expert).to(torch.float32)
        self.expert_bias += self.config.moe_router_bias_update_rate * (counts.mean() - counts).sign()
        self.tokens_per_expert.zero_()

    def _choose(self, scores_NE: Tensor) -> Tensor:
        """Return the chosen experts [N, J]; no gradient flows through the choice."""
        scores_NE = scores_NE.detach()
        if self.expert_bias is not None:
            scores_NE = scores_NE + self.expert_bias
        if self.config.moe_router_num_groups is not None:
            scores_NE = scores_NE.masked_fill(self._is_out_of_reach(scores_NE), -torch.inf)
        return scores_NE.topk(self.config.moe_router_topk, dim=-1).indices

    def _is_out_of_reach(self, scores_NE: Tensor) -> Tensor:
        """Return whether an expert is outside of the groups that a token may choose from, [N, E]."""
        groups, reach = self.config.moe_router_num_groups or 1, self.config.moe_router_group_topk or 1
        scores_NGE = scores_NE.unflatten(-1, (groups, -1))
        best = max(1, self.config.moe_router_topk // reach)
        scores_NG = scores_NGE.topk(best, dim=-1).values.sum(dim=-1)
        is_out_NG = torch.ones_like(scores_NG, dtype=torch.bool).scatter(
            1, scores_NG.topk(reach, dim=-1).indices, False
        )
        return is_out_NG.unsqueeze(-1).expand_as(scores_NGE).flatten(1)

    def _is_chosen(self, experts_NJ: Tensor) -> Tensor:
        shape = (experts_NJ.shape[0], self.num_experts)
        return torch.zeros(shape, dtype=torch.bool, device=experts_NJ.device).scatter(1, experts_NJ, True)

    def _aux_loss(self, scores_BTE: Tensor, experts_NJ: Tensor) -> Tensor | None:
        """Return E * sum over experts of (share of choices) * (mean score), weighted, over all tokens or per sequence."""
        kind, weight = self.config.moe_router_load_balancing_type, self.config.moe_aux_loss_coeff
        if kind == "none" or not weight or not self.training or not torch.is_grad_enabled():
            return None
        topk = self.config.moe_router_topk
        if self.expert_bias is not None or self.config.moe_router_num_groups is not None:
            # The loss counts the choices by scores only.
            experts_NJ = scores_BTE.detach().flatten(0, 1).topk(topk, dim=-1).indices
        is_chosen_BTE = self._is_chosen(experts_NJ).unflatten(0, scores_BTE.shape[:2])
        if kind == "aux_loss":
            scores_BTE, is_chosen_BTE = scores_BTE.flatten(0, 1).unsqueeze(0), is_chosen_BTE.flatten(0, 1).unsqueeze(0)
        counts_BE = self.sequence.counts(is_chosen_BTE.sum(dim=1))
        share_BE = counts_BE / (topk * scores_BTE.shape[1] * self.sequence.ranks)
        return weight * self.num_experts * (share_BE * scores_BTE.mean(dim=1)).sum(dim=-1).mean()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TopKRouter:
        """Keep the bias in fp32 under `.bfloat16()` and the like, where its small updates would be rounded away."""
        before = self.expert_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self.expert_bias
        if before is not None and after is not None and after.dtype != before.dtype:
            is_empty = before.is_meta or after.is_meta
            self.expert_bias = torch.empty_like(after, dtype=before.dtype) if is_empty else before.to(after.device)
        return self


def _same(weight: Tensor) -> Tensor:
    return weight
