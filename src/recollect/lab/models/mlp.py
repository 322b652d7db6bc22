"""The MLP of a layer, or a mixture of experts in its place: router, routed experts, and a shared expert. No token is dropped.

The routed experts are grouped matrix products over rows sorted by expert. Each expert's rows are contiguous, and `ends` gives
their ends. No shape depends on the routing, so a step can be recorded on fake tensors, and nothing waits for the device.

Shape legend: B batch   T positions   D hidden_size   F width inside an MLP or an expert, 2F before a gated activation
    N = B * T tokens   E experts   J experts per token   S = N * J rows, one for each token and chosen expert
    I, O input and output channels of a product
"""

import functools
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.fp8 import Fp8Product
from recollect.lab.models.linear import Linear, build_projection
from recollect.lab.models.router import RouterStatistics, Routing, TopKRouter

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


class Activation(nn.Module):
    """Activation of an MLP or an expert: f(x), or with a gate f(first half) * second half.

    Between an expert's two products it is multiplied by the router's probability. Here and not after the second product:
    backward then does not need that product's result. The multiplication is in fp32, like the router.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.function = _FUNCTIONS[config.activation_func]
        self.is_gated = config.gated_linear_unit

    def forward(self, x: Tensor | tuple[Tensor, ...], probabilities_S: Tensor | None = None) -> Tensor:
        """Map [..., F], or [..., 2F] with a gate, to [..., F]; of experts [S, F], times the probability of each row.

        Gate and the other half may be two tensors.
        """
        if isinstance(x, tuple) or self.is_gated:
            gate, linear = x if isinstance(x, tuple) else x.chunk(2, dim=-1)
            activated = self.function(gate) * linear
        else:
            activated = self.function(x)
        if probabilities_S is None:
            return activated
        return (activated * probabilities_S.unsqueeze(-1)).to(activated.dtype)


class MLP(nn.Module):
    """Two matrix products with an activation between them, applied to each position."""

    def __init__(self, config: TransformerConfig, ffn_hidden_size: int | None = None) -> None:
        super().__init__()
        width = config.ffn_hidden_size if ffn_hidden_size is None else ffn_hidden_size
        has_bias = config.add_bias_linear
        out_std = config.scaled_init_method_std
        self.linear_fc1 = build_projection(config, (width,) * (1 + config.gated_linear_unit), bias=has_bias)
        self.activation_func = Activation(config)
        self.linear_fc2 = Linear(width, config.hidden_size, bias=has_bias, init_std=out_std, config=config)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(self.activation_func(self.linear_fc1(x)))


class GroupedLinear(nn.Module):
    """A matrix product for groups of rows, with one matrix per group.

    `is_grouped` uses one grouped kernel, whose rows must start at multiples of 16 bytes, instead of a loop over the groups;
    fp64 always uses the loop, as the kernel does not support it. The two give the same bits on a CPU. The loop needs the
    number of rows of each group, so it waits for the device and cannot run on fake tensors.
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        init_std: float,
        is_grouped: bool,
        config: TransformerConfig | None = None,
    ) -> None:
        super().__init__()
        self.init_std = init_std
        self.is_grouped = is_grouped
        self.weight = nn.Parameter(torch.empty(num_groups, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_groups, out_features)) if bias else None
        self.fp8: Fp8Product | None = None
        if config is not None and config.fp8 is not None:
            self.fp8 = Fp8Product(config, num_groups, is_grouped=is_grouped)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x_SI: Tensor, ends_E: Tensor, group_S: Tensor | None = None) -> Tensor:
        """Map [S, I] to [S, O], without the bias.

        Rows are sorted by group: group e has those from `ends_E[e - 1]` to `ends_E[e]` (int32). Only 8-bit products need
        `group_S`.
        """
        if self.fp8 is not None:
            return self.fp8(x_SI, self.own(self.weight), group_S, ends_E)
        weight_EOI = self.own(self.weight).to(x_SI.dtype)
        if self.is_grouped and x_SI.dtype != torch.float64:
            return F.grouped_mm(x_SI, weight_EOI.transpose(1, 2), offs=ends_E)
        ends = ends_E.tolist()
        sizes = [end - start for start, end in itertools.pairwise([0, *ends])]
        groups = zip(x_SI.split(sizes), weight_EOI.unbind(), strict=True)
        return torch.cat([F.linear(rows, weight_OI) for rows, weight_OI in groups])

    def bias_of(self, group_S: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the bias [S, O] of each row, given its group; None without bias."""
        return None if self.bias is None else F.embedding(group_S, self.own(self.bias).to(dtype))

    def own(self, parameter: Tensor) -> Tensor:
        """Return a parameter of this rank's groups: all of them, unless ranks share them."""
        return parameter


class Experts(nn.Module):
    """The MLPs of all experts, each applied to the rows routed to it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width, hidden = config.moe_ffn_hidden_size, config.hidden_size
        into = 2 * width if config.gated_linear_unit else width
        of_each = functools.partial(
            GroupedLinear, config.num_moe_experts or 0, is_grouped=config.moe_grouped_gemm, config=config
        )
        self.linear_fc1 = of_each(hidden, into, bias=config.add_bias_linear, init_std=config.init_method_std)
        self.activation_func = Activation(config)
        self.linear_fc2 = of_each(width, hidden, bias=config.add_bias_linear, init_std=config.scaled_init_method_std)

    def forward(self, x_SD: Tensor, probabilities_S: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
        """Return `probability * expert(row)` of each row, [S, D]."""
        if self.linear_fc1.fp8 is None:
            return self._of_rows(x_SD, probabilities_S, expert_S, ends_E)
        place_S, row_P, expert_P, ends_E = aligned_rows(expert_S, ends_E, self.linear_fc1.fp8.multiple)
        # The last row, of zeros, for places that have none.
        x_PD, probabilities_P = (F.pad(t, (*[0] * (2 * t.dim() - 1), 1))[row_P] for t in (x_SD, probabilities_S))
        return self._of_rows(x_PD, probabilities_P, expert_P, ends_E)[place_S]

    def _of_rows(self, x_SD: Tensor, probabilities_S: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
        inside_SF = self.linear_fc1(x_SD, ends_E, expert_S)
        bias_SF = self.linear_fc1.bias_of(expert_S, x_SD.dtype)
        if bias_SF is not None:
            inside_SF = inside_SF + bias_SF
        out_SD: Tensor = self.linear_fc2(self.activation_func(inside_SF, probabilities_S), ends_E, expert_S)
        bias_SD = self.linear_fc2.bias_of(expert_S, x_SD.dtype)
        if bias_SD is None:
            return out_SD
        return out_SD + (bias_SD * probabilities_S.unsqueeze(-1)).to(x_SD.dtype)


def aligned_rows(expert_S: Tensor, ends_E: Tensor, multiple: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Place rows such that each expert has a multiple of them, as products in 8 bits need.

    There are P places, as many as any routing may need, since no shape depends on it: up to `multiple - 1` more per expert.

    Returns:
        The place of each row; the row of each place, S if none; the expert of each place; each expert's last place.
    """
    num_rows = len(expert_S)
    num_places = (num_rows + len(ends_E) * (multiple - 1)) // multiple * multiple
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    padded_E = (counts_E + multiple - 1) // multiple * multiple
    padded_ends_E = padded_E.cumsum(0, dtype=ends_E.dtype)
    moved_E = padded_ends_E - padded_E - ends_E + counts_E
    place_S = torch.arange(num_rows, device=expert_S.device) + moved_E[expert_S]
    row_P = torch.full((num_places,), num_rows, device=expert_S.device)
    row_P[place_S] = torch.arange(num_rows, device=expert_S.device)
    padded_ends_E[-1] = num_places
    places_P = torch.arange(num_places, device=expert_S.device, dtype=ends_E.dtype)
    return place_S, row_P, torch.searchsorted(padded_ends_E, places_P, right=True), padded_ends_E


class MoELayer(nn.Module):
    """Send each token through `moe_router_topk` experts and return the weighted sum. No token is dropped.

    Rows are gathered in both directions, never scattered with atomic additions: a GPU gives the same bits every time.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.router = TopKRouter(config)
        self.experts = Experts(config)
        self.shared_experts: MLP | None = None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = MLP(config, config.moe_shared_expert_intermediate_size)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, RouterStatistics]:
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
        return rows_SD.unflatten(0, (-1, num_choices)).sum(dim=1)
