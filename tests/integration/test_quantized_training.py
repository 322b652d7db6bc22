"""Training whose linears are custom autograd Functions: as lean as the tools' own checkpointing, or leaner, and exact."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import recollect
from blocks import Computes
from budgets import least_bytes
from gradients import assert_same_gradients, gradients
from predictions import IDS, LEAN_LOOP
from recollect.measuring.meter import measure_peak
from recollect.profile.profile import Profile
from tiers import long, long_but

# What is left out are scalars that PyTorch makes out of sight; a KiB is added for them.
MOST_OVER_BYTES = 2048
# torchao's float8 tensors multiply out of a recording's sight: the fp32 operands of an emulated product in backward.
OPERAND_BYTES = 4 * 96 * (192 + 64) * 4


def _lora(base: nn.Module, width: int, out_width: int) -> Computes:
    """A frozen linear with a trained product of two narrow matrices beside it."""
    parts = {
        "drop": nn.Dropout(0.1),
        "down": nn.Linear(width, 4, bias=False),
        "up": nn.Linear(4, out_width, bias=False),
    }
    return Computes(lambda self, x: self.base(x) + self.up(self.down(self.drop(x))), base=base, **parts)


def _llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, use_cache=False, **sizes, **IDS))


def _with_linears(model: Any, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    for module in list(model.model.layers.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, make(child))
    result: nn.Module = model
    return result


def _qlora() -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")

    def quantized(linear: nn.Linear) -> nn.Module:
        four_bit = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, quant_type="nf4", compute_dtype=torch.float32
        )
        four_bit.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        return _lora(four_bit.to("cpu"), linear.in_features, linear.out_features)

    model = _llama().requires_grad_(False)
    _with_linears(model, quantized)
    model.enable_input_require_grads()
    return model


def _float8(recipe: str) -> nn.Module:
    float8 = pytest.importorskip("torchao.float8", reason="needs torchao")
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    model: nn.Module = float8.convert_to_float8_training(
        _llama(), config=config, module_filter_fn=lambda module, name: name != "lm_head"
    )
    return model


_FLOAT8 = [partial(_float8, recipe) for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")]


def _mxfp8() -> nn.Module:
    config = pytest.importorskip("torchao.prototype.moe_training.config", reason="needs torchao")
    from torchao.quantization import quantize_

    recipe = config.MXFP8TrainingOpConfig.from_recipe(config.MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    model = _llama().bfloat16()
    quantize_(model, recipe, filter_fn=lambda module, name: type(module) is nn.Linear and name != "lm_head")
    return model


def _peak_bytes(model: nn.Module, batch: dict[str, Tensor], profile: Profile) -> int:
    model.zero_grad()

    def step() -> None:
        model(**batch).loss.backward()

    return profile.persistent_bytes + measure_peak(step, device="cpu").peak_growth_bytes


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("make", [_qlora, *long_but(_FLOAT8[:1], _FLOAT8), *long([_mxfp8])])
def test_as_lean_as_checkpointing_and_exact(make: Callable[[], Any]) -> None:
    model = make().train()
    tokens = torch.randint(0, 64, (4, 96))
    batch = {"input_ids": tokens, "labels": tokens}
    profile = recollect.record(model, batch, **LEAN_LOOP)
    expected = gradients(model, batch)
    least = least_bytes(profile)
    plans = [
        recollect.plan(profile, least),
        recollect.plan(profile, round(1.3 * least)),
        recollect.classic_plan(profile, "full"),
    ]
    for plan in plans:
        with recollect.apply(model, plan):
            measured = _peak_bytes(model, batch, profile)
            assert_same_gradients(expected, gradients(model, batch))
        unseen_bytes = OPERAND_BYTES if make in _FLOAT8 else 0
        assert measured - unseen_bytes <= (plan.predicted_peak_bytes or 0) <= measured + MOST_OVER_BYTES
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = _peak_bytes(model, batch, profile)
    assert least < checkpointed
    # Full recompute frees some values later than the tool does.
    assert (plans[-1].predicted_peak_bytes or 0) <= 1.01 * checkpointed
