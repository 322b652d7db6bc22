"""`torch._grouped_mm`, the product of experts, in bf16: run again or kept."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from device_models import decoder
from device_steps import RecordProperty, check_plans, skipped_if
from function_units import UNITS, Unit, two_units
from gradients import gradients, step_of
from watch import Watch

NUM_EXPERTS = 4
Product = Callable[..., Tensor]
PRODUCTS: dict[str, Product | None] = {
    "torch._grouped_mm": getattr(torch, "_grouped_mm", None),
    "F.grouped_mm": getattr(F, "grouped_mm", None),
}
# What PyTorch says where a device or its version has none.
REFUSALS = ("grouped_mm", "grouped gemm", "Grouped gemm", "not implemented", "compute capability")
every_product = pytest.mark.parametrize("name", PRODUCTS)


class Weights(nn.Module):
    """One matrix for each expert."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(NUM_EXPERTS, width, width) / width**0.5)


def _experts(product: Product) -> Callable[[Unit, Tensor], Tensor]:
    """Tokens sorted by their expert, one product for all, and back again; as mixtures of experts do it."""

    def mixture(unit: Unit, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        choice = tokens[:, :NUM_EXPERTS].detach().argmax(-1)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=NUM_EXPERTS)
        ends = counts.cumsum(0).to(torch.int32)
        mixed = product(tokens[order].sin(), unit.experts.matrices, offs=ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return F.silu(mixed)[back].view_as(hidden)

    return mixture


def _model(name: str, device: torch.device) -> tuple[nn.Module, Tensor]:
    product = PRODUCTS[name]
    if product is None:
        pytest.skip(f"{name} is not in torch {torch.__version__}")
    width = two_units(lambda unit, hidden: hidden, device)[1].shape[-1]
    torch.manual_seed(1)
    model, data = two_units(_experts(product), device, torch.bfloat16, experts=Weights(width))
    with skipped_if(name, *REFUSALS):
        model(data).backward()
    return model, data


@every_product
def test_gradients(name: str, kernels: str, device: torch.device, record_property: RecordProperty) -> None:
    model, data = _model(name, device)
    check_plans(model, UNITS, lambda: gradients(model, data), record_property)


def test_experts_of_hugging_face_use_it(device: torch.device) -> None:
    """So that `mixtral_grouped` of the other tests is about it."""
    case = decoder("mixtral_grouped", device, torch.bfloat16)
    with Watch() as watch:
        step_of(case, case.model())
    if device.type == "cpu" and not any("grouped_mm" in op for op in watch.ops):
        pytest.skip("Transformers has another way on this CPU")
    assert any("grouped_mm" in op for op in watch.ops)
