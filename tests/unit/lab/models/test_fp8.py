"""Products in 8 bits against the definitions of their recipes, and what of them is saved."""

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fp8_reference as reference
from recollect.errors import DataError, HardwareError
from recollect.lab.models import fp8
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.fp8 import Fp8Product
from recollect.lab.models.fp8_casts import E4M3, E5M2, Cast, DelayedScaling, cast
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.mlp import GroupedLinear, aligned_rows

SIZES = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 64}
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


def config(recipe: str = "tensorwise", fp8: str | None = "e4m3", **changes: Any) -> TransformerConfig:
    return TransformerConfig(**{**SIZES, "fp8": fp8, "fp8_recipe": recipe, **changes})


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of very different sizes, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-12, 12, shape, generator=generator).float())
    tensor = torch.randn(shape, generator=generator) * sizes
    return torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, tensor).to(dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_to_the_nearest_even_number_and_saturates(name: str) -> None:
    numbers = reference.numbers_of(name)
    between = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2, numbers * 1.03, [1e9, 3e38]]).astype(
        np.float32
    )
    between = np.concatenate([between, -between])
    values = torch.from_numpy(between).unsqueeze(0)
    found = cast(values, torch.ones(1, 1), FORMATS[name])
    np.testing.assert_array_equal(found.values.float().numpy()[0], reference.rounded(between, name))
    assert torch.finfo(FORMATS[name]).max == numbers[-1] == reference.TOPS[name]


def check_cast(found: Cast, values: Any, multipliers: Any, dtype: torch.dtype) -> None:
    assert found.values.dtype is dtype and found.values.element_size() == 1
    np.testing.assert_array_equal(found.values.float().numpy(), values)
    np.testing.assert_array_equal(found.scale.float().numpy(), np.float32(1) / multipliers)
    blocks = [whole // part for whole, part in zip(values.shape, multipliers.shape, strict=True)]
    expected = values * np.kron(np.float32(1) / multipliers, np.ones(blocks, np.float32))
    np.testing.assert_array_equal(found.whole().numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_blocks_have_the_scales_of_the_definition(recipe: str, dtype: torch.dtype) -> None:
    product = Fp8Product(config(recipe))
    size = {"blockwise": 128, "mxfp8": 32}[recipe]
    for role in ("input", "weight", "gradient"):
        tensor = drawn(256, 128, seed=len(role), dtype=dtype)
        along, across = product.casts(tensor, role, None, is_recorded=False)
        rows = size if (recipe, role) == ("blockwise", "weight") else 1
        for found, shape in ((along, (rows, size)), (across, (size, rows))):
            check_cast(found, *reference.cast_blocks(tensor.float().numpy(), *shape, "e4m3"), E4M3)
            assert found.scale.dtype is (torch.float8_e8m0fnu if recipe == "mxfp8" else torch.float32)


@pytest.mark.parametrize("fp8", ["e4m3", "hybrid"])
def test_a_whole_tensor_has_one_scale_and_each_expert_its_own(fp8: str) -> None:
    product, experts = Fp8Product(config(fp8=fp8)), Fp8Product(config(fp8=fp8), 3)
    expert_S = torch.tensor([0] * 16 + [2] * 32)
    for role in ("input", "gradient", "weight"):
        name = "e5m2" if (fp8, role) == ("hybrid", "gradient") else "e4m3"
        tensor = drawn(48, 32)
        matrix = tensor.numpy()
        scale = np.array([[reference.scale_of(reference.amax_of(matrix), name)]])
        first, second = product.casts(tensor, role, None, is_recorded=False)
        assert first is second
        check_cast(first, reference.rounded(matrix * scale, name), scale, FORMATS[name])
        if role == "weight":
            continue
        scale = np.array([[reference.scale_of(reference.amax_of(matrix[expert_S == e]), name)] for e in expert_S])
        found = experts.casts(tensor, role, expert_S, is_recorded=False)[0]
        check_cast(found, reference.rounded(matrix * scale, name), scale, FORMATS[name])
    stack = torch.stack([drawn(16, 32, seed=seed) for seed in range(3)])
    found = experts.casts(stack, "weight", None, is_recorded=False)[0]
    for matrix, values, scale in zip(stack.numpy(), found.values, found.scale, strict=True):
        expected = np.array([[reference.scale_of(reference.amax_of(matrix), "e4m3")]])
        check_cast(Cast(values, scale), reference.rounded(matrix * expected, "e4m3"), expected, E4M3)


@pytest.mark.parametrize(("recipe", "fp8"), [*itertools.product(RECIPES[:3], ("e4m3", "hybrid")), ("mxfp8", "e4m3")])
def test_forward_and_backward_multiply_the_casts(recipe: str, fp8: str) -> None:
    torch.manual_seed(0)
    product = Fp8Product(config(recipe, fp8))
    x, weight = (drawn(256, 128, dtype=torch.bfloat16) / 64).requires_grad_(), (drawn(384, 128) / 64).requires_grad_()
    gradient = drawn(256, 384, seed=3, dtype=torch.bfloat16)
    out = product(x, weight)
    twin = copy.deepcopy(product)  # at the state after that forward, which has no effect on gradients
    saved = out.grad_fn.saved_tensors
    out.backward(gradient)
    if recipe == "delayed":  # the first forward: all scales are 1
        product = Fp8Product(config(recipe, fp8))
        twin = product
    inputs, weights = (
        product.casts(t.detach(), r, None, is_recorded=False) for t, r in ((x, "input"), (weight, "weight"))
    )
    gradients = twin.casts(gradient, "gradient", None, is_recorded=False)
    assert torch.equal(out, (inputs[0].whole() @ weights[0].whole().T).bfloat16())
    assert torch.equal(x.grad, (gradients[0].whole() @ weights[1].whole()).bfloat16())  # type: ignore[arg-type]
    assert torch.equal(weight.grad, gradients[1].whole().T @ inputs[1].whole())  # type: ignore[arg-type]
    # One byte an element, and the scales.
    large = [tensor for tensor in saved if tensor is not None and tensor.numel() > 3072]
    assert [(tensor.element_size(), tensor.numel()) for tensor in large] == [(1, 256 * 128), (1, 384 * 128)]


@pytest.mark.parametrize("algorithm", ["most_recent", "max"])
@pytest.mark.parametrize("length", [1, 4])
def test_histories_roll_once_a_forward(length: int, algorithm: str) -> None:
    settings = config("delayed", "hybrid", fp8_amax_history_len=length, fp8_amax_compute_algo=algorithm, fp8_margin=1)
    product = Fp8Product(settings)
    names = {"input": "e4m3", "weight": "e4m3", "gradient": "e5m2"}
    expected = {role: reference.History(length, algorithm == "max", name, margin=1) for role, name in names.items()}
    for step in range(7):
        tensors = {
            "input": drawn(32, 128, seed=step) * (step != 3),  # all zeros once
            "weight": drawn(16, 128, seed=step + 50) * 10.0**step,
            "gradient": drawn(32, 16, seed=step + 90) * 0.1**step,
        }
        if step == 5:
            tensors["gradient"][0, 0] = torch.inf
        x, weight = tensors["input"].requires_grad_(), tensors["weight"].requires_grad_()
        used = {role: expected[role].next_scale(tensors[role].detach().numpy()) for role in names}
        product(x, weight).backward(tensors["gradient"])
        left, right = (
            torch.from_numpy(reference.rounded(tensors[role].detach().numpy() * scale, names[role]) * (1 / scale))
            for role, scale in used.items()
            if role != "input"
        )
        assert x.grad is not None and torch.equal(x.grad, right @ left)
        for role, scaling in product.scalings.items():
            assert scaling.amax_history.squeeze(1).tolist() == expected[role].rows, (step, role)
            assert scaling.multiplier.item() == expected[role].scale, (step, role)


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_multiply_as_layers_of_their_own_would(recipe: str) -> None:
    torch.manual_seed(0)
    multiple = {"blockwise": 128, "mxfp8": 32}.get(recipe, 16)
    counts = [multiple, 0, 2 * multiple]
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    expert = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    results = []
    for is_grouped in (True, False):
        settings = {"bias": False, "init_std": 0.02, "is_grouped": is_grouped, "config": config(recipe)}
        torch.manual_seed(0)
        experts = GroupedLinear(3, 128, 256, **settings)
        x = (drawn(sum(counts), 128) / 64).requires_grad_()
        out = experts(x, ends, expert)
        out.backward(drawn(*out.shape, seed=2))
        results.append([out, x.grad, experts.weight.grad])
        start = 0
        for e, count in enumerate(counts):
            alone = Fp8Product(config(recipe))
            rows = x.detach()[start : start + count].requires_grad_()
            weight = experts.weight[e].detach().requires_grad_()
            if count:
                alone(rows, weight).backward(drawn(*out.shape, seed=2)[start : start + count])
                torch.testing.assert_close(x.grad[start : start + count], rows.grad, rtol=1e-6, atol=0)
                torch.testing.assert_close(experts.weight.grad[e], weight.grad, rtol=1e-6, atol=1e-9)
            start += count
    assert all(map(torch.equal, *results))


def test_rows_of_experts_are_aligned_whatever_the_routing() -> None:
    for counts in ([3, 0, 5, 8], [0, 0, 0, 16], [16, 0, 0, 0], [4, 4, 4, 4]):
        expert = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
        ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
        place, row, expert_of_place, padded_ends = aligned_rows(expert, ends, 8)
        assert len(row) == (16 + 4 * 7) // 8 * 8 == padded_ends[-1]
        assert torch.equal(row[place], torch.arange(16)) and (row == 16).sum() == len(row) - 16
        assert torch.equal(expert_of_place[place], expert)
        assert all(end % 8 == 0 for end in padded_ends.tolist())
        assert torch.equal(padded_ends.long(), torch.searchsorted(expert_of_place, torch.arange(4), right=True))


def test_what_stays_in_16_bits() -> None:
    latent = {"multi_latent_attention": True, "kv_lora_rank": 128, "q_lora_rank": 128, "mtp_num_layers": 1}
    model = GPTModel(config("blockwise", **latent))
    eight = {name.removesuffix(".fp8") for name, module in model.named_modules() if isinstance(module, Fp8Product)}
    attention = "decoder.layers.0.self_attention"
    # 128 + 64 channels are not a multiple of 128.
    assert f"{attention}.linear_kv_down_proj" not in eight
    assert {
        f"{attention}.{name}" for name in ("linear_q_down_proj", "qkv_up_proj.linear_kv_up_proj", "linear_proj")
    } < eight
    assert "mtp.layers.0.eh_proj" in eight and "output_layer" not in eight
    model = GPTModel(config(first_last_layers_bf16=True, num_layers_at_end_in_bf16=2, num_moe_experts=2))
    eight = {name for name, module in model.named_modules() if isinstance(module, Fp8Product)}
    assert {name.split(".")[2] for name in eight} == {"1"}
    assert not any("router" in name for name in eight) and any("experts.linear_fc1" in name for name in eight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fp8": None, "fp8_recipe": "delayed", "fp8_margin": 1},
            "fp8_margin: got 1, expected 0, the default, if fp8 is None",
        ),
        (
            {"fp8": None, "fp8_recipe": "delayed", "first_last_layers_bf16": True},
            "first_last_layers_bf16: got True, expected False",
        ),
        ({"fp8": "e5m2"}, "fp8: got 'e5m2', expected 'e4m3', 'hybrid', or None"),
        ({"fp8_recipe": "custom"}, "fp8_recipe: got 'custom', expected one of delayed, tensorwise, blockwise, mxfp8"),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, "fp8: got 'hybrid', expected 'e4m3' with fp8_recipe 'mxfp8'"),
        ({"fp8_amax_history_len": 0}, "fp8_amax_history_len: got 0, expected at least 1"),
        ({"fp8_margin": -1}, "fp8_margin: got -1, expected at least 0"),
        ({"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 4}, "num_layers_at_start_in_bf16: got 1"),
        (
            {"fp8_recipe": "blockwise", "hidden_size": 64},
            "hidden_size: got 64, expected a multiple of 128 with fp8_recipe",
        ),
        ({"fp8_recipe": "mxfp8", "ffn_hidden_size": 80}, "ffn_hidden_size: got 80, expected a multiple of 32"),
        ({"kv_channels": 10}, r"kv_channels \* num_attention_heads: got 40, expected a multiple of 16"),
        ({"num_moe_experts": 2, "moe_ffn_hidden_size": 24}, "moe_ffn_hidden_size: got 24, expected a multiple of 16"),
        (
            {"multi_latent_attention": True, "v_head_dim": 6},
            r"num_attention_heads \* \(qk_head_dim \+ v_head_dim\): got",
        ),
    ],
)
def test_what_a_model_cannot_have(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**{"recipe": changes.pop("fp8_recipe", "tensorwise"), **changes})


def test_tokens_that_do_not_divide() -> None:
    with pytest.raises(DataError, match="'mxfp8': got 48 tokens, expected a multiple of 32. Change the batch size"):
        Fp8Product(config("mxfp8"))(drawn(48, 128), drawn(32, 128))
    with pytest.raises(DataError, match="'tensorwise': got 24 output channels, expected a multiple of 16"):
        Fp8Product(config())(drawn(48, 128), drawn(24, 128))


@pytest.mark.parametrize(
    ("recipe", "capability", "is_grouped", "message"),
    [
        (
            "tensorwise",
            (8, 0),
            False,
            "capability 8.0, which has no kernel for it, expected one of at least 8.9. Choose",
        ),
        ("blockwise", (10, 0), False, "capability 10.0, which has no kernel for it, expected one from 9.0 to 9.9"),
        (
            "mxfp8",
            (9, 0),
            False,
            "capability 9.0, which has no kernel .* at least 10.0.*or multiply in fp32: fp8_emulated",
        ),
        ("mxfp8", (10, 0), True, "got moe_grouped_gemm True, for which there is no kernel, expected False"),
        ("delayed", (8, 9), True, None),
        ("blockwise", (9, 0), False, None),
    ],
)
def test_devices_without_a_kernel(
    monkeypatch: pytest.MonkeyPatch, recipe: str, capability: tuple[int, int], is_grouped: bool, message: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    check = fp8.check_kernel.__wrapped__
    if message is None:
        check(recipe, torch.device("cuda"), is_grouped=is_grouped)
        return
    with pytest.raises(
        HardwareError, match=f"fp8_recipe '{recipe}': got .*{message}" if is_grouped is False else message
    ):
        check(recipe, torch.device("cuda"), is_grouped=is_grouped)


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_get_what_they_ask_for(recipe: str) -> None:
    """On fake tensors PyTorch checks shapes, layouts and dtypes as its CUDA kernels do; what they compute only a GPU tells."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        product = Fp8Product(config(recipe, fp8_emulated=False))
        x, weight = torch.empty(256, 384).bfloat16().requires_grad_(), torch.empty(640, 384).requires_grad_()
        out = product(x, weight)
        out.backward(torch.empty(256, 640).bfloat16())
    assert (out.shape, out.dtype) == ((256, 640), torch.bfloat16)
    assert (weight.grad.shape, weight.grad.dtype, x.grad.dtype) == ((640, 384), torch.float32, torch.bfloat16)


def test_scales_in_the_order_of_blackwell() -> None:
    """Tiles of 128 rows x 4: within one, 16 bytes a row, of the rows r, r + 32, r + 64, r + 96."""
    rows, columns = 160, 6
    scale = torch.arange(rows * columns).remainder(251).to(torch.uint8).view(rows, columns)
    order = fp8._swizzled(scale.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert len(order) == 256 * 8
    for row in range(rows):
        for column in range(columns):
            tile = (row // 128) * 2 + column // 4
            place = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
            assert order[place] == scale[row, column]


def test_delayed_scales_are_numbers_of_a_module() -> None:
    scaling = DelayedScaling(config("delayed", fp8_amax_history_len=3), 2, E4M3)
    assert {name: tuple(buffer.shape) for name, buffer in scaling.named_buffers()} == {
        "amax_history": (3, 2),
        "multiplier": (2,),
    }
    assert scaling(torch.tensor([448.0, 1.0]), is_recorded=True).tolist() == [1, 1]
    assert scaling(torch.tensor([1.0, 1.0]), is_recorded=False).tolist() == [1, 448]
