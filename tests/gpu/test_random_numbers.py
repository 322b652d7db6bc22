"""Random ops run again with the numbers that they drew in forward, and no generator notices."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_backends import REFUSALS, every_backend
from device_steps import RecordProperty, check_plans, generator_states, skipped_if
from function_units import UNITS, TwoUnits, Unit, two_units
from gradients import Step, gradients
from policies import FULL
from recollect.applying import apply_policy

_OWN = "generator"


def functional_dropout(unit: Unit, hidden: Tensor) -> Tensor:
    return F.dropout(hidden.sin(), 0.3).exp()


def dropout_in_place(unit: Unit, hidden: Tensor) -> Tensor:
    return F.dropout(hidden.sin(), 0.3, inplace=True).exp()


def alpha_dropout(unit: Unit, hidden: Tensor) -> Tensor:
    return F.alpha_dropout(hidden.sin(), 0.3, training=True).exp()


def bernoulli(unit: Unit, hidden: Tensor) -> Tensor:
    return hidden.exp() * torch.bernoulli(hidden.detach().sigmoid()).sin()


def rand(unit: Unit, hidden: Tensor) -> Tensor:
    return hidden.exp() * torch.rand(hidden.shape, device=hidden.device).sin()


def randn_like(unit: Unit, hidden: Tensor) -> Tensor:
    return (hidden + 0.1 * torch.randn_like(hidden)).exp()


def gumbel(unit: Unit, hidden: Tensor) -> Tensor:
    return F.gumbel_softmax(hidden.sin(), tau=0.7).exp()


def own_rand(unit: Unit, hidden: Tensor) -> Tensor:
    noise = torch.rand(hidden.shape, device=hidden.device, generator=getattr(unit, _OWN))
    return hidden.exp() * noise.sin()


def own_bernoulli(unit: Unit, hidden: Tensor) -> Tensor:
    mask = torch.empty_like(hidden).bernoulli_(0.7, generator=getattr(unit, _OWN))
    return hidden.exp() * mask.cos()


def own_and_default(unit: Unit, hidden: Tensor) -> Tensor:
    noise = torch.zeros_like(hidden).normal_(0, 0.1, generator=getattr(unit, _OWN))
    return F.dropout((hidden + noise).exp(), 0.2).sin()


DRAWS = (
    functional_dropout,
    dropout_in_place,
    alpha_dropout,
    bernoulli,
    rand,
    randn_like,
    gumbel,
    own_rand,
    own_bernoulli,
    own_and_default,
)


def _step(model: TwoUnits, data: Tensor, seed: int = 0) -> Callable[[], Step]:
    """A step under seeds of its own; where the generators stand afterwards is one of its results."""
    own = [torch.Generator(data.device) for _ in UNITS]
    for unit, generator in zip(model.units, own, strict=True):
        setattr(unit, _OWN, generator)

    def step() -> Step:
        for index, generator in enumerate(own):
            generator.manual_seed(100 * seed + index)
        found = gradients(model, data, seed=seed)
        return {**found, **generator_states(data.device, *own)}

    return step


@pytest.mark.parametrize("draw", DRAWS)
def test_draws(draw: Callable[[Unit, Tensor], Tensor], device: torch.device, record_property: RecordProperty) -> None:
    model, data = two_units(draw, device)
    plain = check_plans(model, UNITS, _step(model, data), record_property)
    assert not plain.varying


@every_backend
def test_dropout_in_fused_attention(
    backend: SDPBackend, kernels: str, device: torch.device, record_property: RecordProperty
) -> None:
    def attention(unit: Unit, hidden: Tensor) -> Tensor:
        heads = hidden.unflatten(-1, (4, -1)).transpose(1, 2)
        with sdpa_kernel([backend]):
            mixed = F.scaled_dot_product_attention(heads, heads.sin(), heads.cos(), dropout_p=0.2, is_causal=True)
        return mixed.transpose(1, 2).flatten(2).exp()

    model, data = two_units(attention, device, torch.bfloat16)
    with skipped_if(f"{backend.name} with dropout", *REFUSALS):
        model(data)
    check_plans(model, UNITS, _step(model, data), record_property)


class Gated(nn.Module):
    """Multiplies by what recurrent layers compute, with dropout between them. [n, t, d] -> [n, t, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(64, 64, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        gate = self.layers(hidden.detach())[0].exp()
        self.seen = gate.detach()
        return hidden * gate


def test_dropout_between_recurrent_layers(device: torch.device) -> None:
    """cuDNN draws from a state of its own, which nobody can set back: no two steps are alike, but each is by itself."""
    model, hidden = Gated().to(device), torch.randn(4, 32, 64, device=device, requires_grad=True)
    with apply_policy(model, [""], FULL):
        for _ in range(3):
            hidden.grad = None
            model(hidden).sum().backward()
            assert hidden.grad is not None and torch.equal(hidden.grad, model.seen)
