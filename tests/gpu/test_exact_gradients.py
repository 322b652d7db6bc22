"""Gradients, loss and buffers of a planned step equal those of the plain step, whatever the device and its kernels.

They are equal to the bit wherever the plain step repeats itself to the bit, which it does with deterministic kernels. With
the default ones these do not, on CUDA, because they add with atomics, in an order that changes from run to run:

| kernel | where the models here run it |
|---|---|
| backward of fused attention: flash, efficient, cuDNN (the default on an H100 in 16 bits) | gradient of the query |
| `scatter_add`, `index_add` with an index given twice | gradient of what `gather` and `index_select` read |
| backward of a convolution, by some of cuDNN's algorithms | ResNet, Whisper, ViT, Mamba |
| backward of bilinear and bicubic interpolation | none |
| `cumsum` of floats, `histc`, `embedding_bag` | none in a differentiated place |

There the bound of `device_steps.PlainStep` holds, and the report of the test has the names.
"""

import pytest
import torch

from device_models import DECODERS, decoder
from device_steps import FULL_ONLY, PLANS, RecordProperty, check_plans, moved
from gradients import gradients, step_of
from policies import FULL, KEEP_ALL, Random
from recollect.applying import apply_policy
from watch import Watch
from zoo import ZOO, Case

# All of them run on the CPU in tests/integration/test_exact_gradients.py.
_ON_CPU = {"gpt2", "resnet"}

every_case = pytest.mark.parametrize("case", ZOO.values(), ids=ZOO)


@every_case
def test_models_of_the_zoo(case: Case, device: torch.device, record_property: RecordProperty) -> None:
    if device.type == "cpu" and case.name not in _ON_CPU:
        pytest.skip("the CPU's own tests run it under more plans")
    model, batch = case.model().to(device), moved(case.data(), device)
    check_plans(model, case.layers, lambda: gradients(model, batch, case.loss_fn), record_property)


def test_convolutions_of_which_each_thread_searches_the_fastest_kernel(
    cuda: torch.device, record_property: RecordProperty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    case = ZOO["resnet"]
    model, batch = case.model().to(cuda), moved(case.data(), cuda)
    check_plans(model, case.layers, lambda: gradients(model, batch, case.loss_fn), record_property)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DECODERS)
def test_larger_decoders(name: str, dtype: torch.dtype, device: torch.device, record_property: RecordProperty) -> None:
    case = decoder(name, device, dtype)
    model = case.model()
    check_plans(model, case.layers, lambda: step_of(case, model), record_property, {**FULL_ONLY, "random-1": Random(1)})


@pytest.mark.parametrize("name", DECODERS)
def test_default_kernels(name: str, cuda: torch.device, record_property: RecordProperty) -> None:
    torch.use_deterministic_algorithms(False)
    case = decoder(name, cuda)
    model = case.model()
    check_plans(
        model, case.layers, lambda: step_of(case, model), record_property, {"full": FULL, "random-1": Random(1)}
    )


@pytest.mark.parametrize("name", ["llama", "mixtral_grouped"])
def test_plans_do_recompute(name: str, device: torch.device) -> None:
    """Without this, an engine that keeps everything on a device would pass every other test of this folder."""
    case = decoder(name, device)
    model = case.model()
    with Watch() as watch:
        step_of(case, model)
    plain = watch.computing_ops().total()
    counts = {}
    for plan, policy in {"keep-all": KEEP_ALL, "random-1": PLANS["random-1"], "full": FULL}.items():
        with apply_policy(model, case.layers, policy), Watch() as watch:
            step_of(case, model)
        counts[plan] = watch.computing_ops().total()
    assert counts["keep-all"] == plain
    assert plain < counts["random-1"] < counts["full"]
