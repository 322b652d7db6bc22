"""Fused attention, one backend at a time: run again, or kept, it gives the same gradients."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_backends import REFUSALS, every_backend
from device_steps import RecordProperty, check_plans, skipped_if
from function_units import UNITS, Unit, two_units
from gradients import gradients
from policies import FULL, NOTHING_KEPT, Policy, Random
from recollect.plans.action import Action


@dataclass(frozen=True)
class KeepAttention:
    """Drop every value but what attention returns."""

    drops_outputs = False

    def action(self, unit_path: str, value_name: str) -> Action:
        return Action.KEEP if "scaled_dot_product" in value_name else Action.RECOMPUTE

    def acts_in(self, unit_path: str, module_path: str) -> bool:
        return True

    def output_action(self, unit_path: str) -> Action:
        return Action.KEEP


PLANS: dict[str, Policy | KeepAttention] = {
    "full": FULL,
    "nothing-kept": NOTHING_KEPT,
    "keep-attention": KeepAttention(),
    "random-1": Random(1),
}


def _attention(
    backend: SDPBackend, *, is_causal: bool = True, num_groups: int = 4, is_masked: bool = False
) -> Callable[[Unit, Tensor], Tensor]:
    """Attention of four heads that choose their backend in forward; backward and replay run outside of the choice."""

    def attend(unit: Unit, hidden: Tensor) -> Tensor:
        heads = hidden.unflatten(-1, (4, -1)).transpose(1, 2)
        keys, values = heads[:, :num_groups].sin(), heads[:, :num_groups].cos()
        mask = None
        if is_masked:
            tokens = hidden.shape[1]
            mask = torch.zeros(tokens, tokens, dtype=hidden.dtype, device=hidden.device)
            mask = mask.masked_fill(torch.ones_like(mask).triu(2).bool(), float("-inf"))
        with sdpa_kernel([backend]):
            mixed = F.scaled_dot_product_attention(
                heads, keys, values, attn_mask=mask, is_causal=is_causal, enable_gqa=num_groups < 4
            )
        return mixed.transpose(1, 2).flatten(2).exp()

    return attend


def _check(
    attend: Callable[[Unit, Tensor], Tensor],
    what: str,
    device: torch.device,
    record_property: RecordProperty,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    model, data = two_units(attend, device, dtype)
    with skipped_if(what, *REFUSALS):
        model(data)
    check_plans(model, UNITS, lambda: gradients(model, data), record_property, PLANS)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@every_backend
def test_backends(
    backend: SDPBackend, is_causal: bool, kernels: str, device: torch.device, record_property: RecordProperty
) -> None:
    _check(_attention(backend, is_causal=is_causal), backend.name, device, record_property)


@every_backend
def test_grouped_queries(
    backend: SDPBackend, kernels: str, device: torch.device, record_property: RecordProperty
) -> None:
    _check(_attention(backend, num_groups=2), f"{backend.name} with grouped queries", device, record_property)


@every_backend
def test_masks(backend: SDPBackend, device: torch.device, record_property: RecordProperty) -> None:
    attend = _attention(backend, is_causal=False, is_masked=True)
    _check(attend, f"{backend.name} with a mask", device, record_property)
