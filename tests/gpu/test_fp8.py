"""Products in 8 bits by the device's kernels: the same bits when they run again, and close to the emulation."""

import pytest
import torch

from device_steps import sized
from fp8_models import LAYERS, RECIPES, batches, different, model_of, step
from policies import FULL, NOTHING_KEPT, Random
from recollect.applying import apply_policy
from recollect.errors import HardwareError
from recollect.lab.models.fp8 import Fp8Product
from recollect.lab.models.gpt import GPTModel


def model_on(device: torch.device, kind: str, recipe: str) -> GPTModel:
    # One kernel for all experts exists for few recipes; a loop over them for all.
    changes = {"moe_grouped_gemm": False} if kind == "experts" else {}
    width = sized(device, 128, 1024)
    return model_of(kind, recipe, hidden_size=width, ffn_hidden_size=width, **changes).to(device)


def or_skip(model: GPTModel, device: torch.device) -> None:
    try:
        step(model, [tuple(t.to(device) for t in batch) for batch in batches(model, 1)], "one by one")  # type: ignore[misc]
    except HardwareError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_histories_scales_and_gradients_are_equal(device: torch.device, kind: str, recipe: str) -> None:
    or_skip(model_on(device, kind, recipe), device)
    found = []
    for policy in (None, FULL, NOTHING_KEPT, Random(1)):
        model = model_on(device, kind, recipe)
        given = [tuple(t.to(device) for t in batch) for batch in batches(model, 4)]
        torch.manual_seed(0)
        if policy is None:
            found.append(step(model, given, "in flight"))  # type: ignore[arg-type]
            continue
        with apply_policy(model, LAYERS, policy):
            found.append(step(model, given, "in flight"))  # type: ignore[arg-type]
        assert different(found[0], found[-1]) == [], policy


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_compute_what_the_emulation_does(cuda: torch.device, recipe: str) -> None:
    """Up to the rounding of the result to bf16, and the order and width of a sum over 256 products: a few parts in 2^8."""
    config = model_of("dense", recipe).config
    product = Fp8Product(config).to(cuda)
    results = []
    for emulated in (None, True):
        product.emulated = emulated
        torch.manual_seed(0)
        x = torch.randn(256, 256, device=cuda, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(384, 256, device=cuda, requires_grad=True)
        product.eval()  # so that both runs have the same scales
        try:
            out = product(x, weight)
        except HardwareError as error:
            pytest.skip(str(error))
        for scaling in product.scalings.values():
            scaling.multiplier.fill_(1.0)  # type: ignore[operator]
        out.backward(torch.randn_like(out))
        results.append([out, x.grad, weight.grad])
    for kernel, emulation in zip(*results, strict=True):
        error = (kernel.float() - emulation.float()).norm() / emulation.float().norm()
        assert error < 2**-6
