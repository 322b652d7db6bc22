"""What Megatron forbids or cannot do for reasons of its engine, and works on the tape: one test for each row of the table.

The table "Freedoms" in docs/megatron.md names these tests.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from gradients import assert_same_gradients, gradients
from predictions import LEAN_LOOP
from recollect.integrations.megatron import RULES, RecomputeConfig, TrainingSetting, megatron_plan
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from watch import Watch

PAGE = Path(__file__).parents[2] / "docs" / "megatron.md"
FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 4}


def loss_of(output: Any) -> Tensor:
    return output.loss


def built(config: TransformerConfig, sequences: int = 2) -> tuple[GPTModel, dict[str, Tensor], recollect.Profile]:
    torch.manual_seed(0)
    model, tokens = GPTModel(config).train(), torch.randint(0, config.vocab_size, (sequences, 12))
    batch = {"tokens": tokens, "labels": tokens}
    return model, batch, recollect.record(model, batch, **LEAN_LOOP)


def selective(*modules: str, **others: Any) -> RecomputeConfig:
    return RecomputeConfig(recompute_granularity="selective", recompute_modules=modules, **others)


def num_ops(model: nn.Module, batch: dict[str, Tensor], name: str = "") -> int:
    with Watch() as watch:
        gradients(model, batch, loss_of)
    counts = watch.computing_ops()
    return counts[name] if name else counts.total()


def assert_exact_and_leaner(model: GPTModel, batch: dict[str, Tensor], plan: recollect.Plan) -> None:
    expected, plain = gradients(model, batch, loss_of), num_ops(model, batch)
    with recollect.apply(model, plan):
        assert_same_gradients(expected, gradients(model, batch, loss_of))
        assert num_ops(model, batch) > plain


def test_moe_act_needs_grouped_gemm() -> None:
    config = replace(NAMED_CONFIGS["mixtral-tiny"], moe_grouped_gemm=False)
    model, batch, profile = built(config)
    assert_exact_and_leaner(model, batch, megatron_plan(profile, selective("moe_act"), TrainingSetting.of(config)))


def test_shared_experts_overlap() -> None:
    config = NAMED_CONFIGS["deepseek-v3-tiny"]
    model, batch, profile = built(config)
    setting = TrainingSetting.of(config, moe_shared_expert_overlap=True)
    assert_exact_and_leaner(model, batch, megatron_plan(profile, selective("shared_experts"), setting))


def test_mtp_uniform() -> None:
    config = NAMED_CONFIGS["deepseek-v3-tiny"]
    model, batch, profile = built(config)
    plan = megatron_plan(profile, RecomputeConfig(**FULL), TrainingSetting.of(config))
    assert plan.units["mtp.layers.0"].recomputes_anything and plan.units["mtp.layers.0"].output == "keep"
    assert_exact_and_leaner(model, batch, plan)


def test_any_output_may_be_dropped() -> None:
    """core_attn with its output, which Megatron keeps; and layernorm without, which Megatron drops."""
    model, batch, profile = built(replace(NAMED_CONFIGS["gpt-tiny"], core_attention="unfused"))
    modules = ("core_attn", "layernorm")
    kept = {}
    for dropped in (None, ("core_attn",), ("core_attn", "layernorm"), ()):
        plan = megatron_plan(profile, selective(*modules, recompute_discard_outputs=dropped))
        assert_exact_and_leaner(model, batch, plan)
        kept[dropped] = sum(account.kept_bytes for account in recollect.layer_usage(profile, plan))
    assert kept["core_attn", "layernorm"] < kept[None] < kept[()]
    assert kept["core_attn", "layernorm"] < kept["core_attn",] < kept[()]


def test_frozen_base() -> None:
    """Nothing that enters the first layers requires a gradient: a checkpoint of PyTorch's older kind would give none."""
    model, batch, profile = built(NAMED_CONFIGS["llama-tiny"])
    model.requires_grad_(False)
    trained = [layer.mlp.linear_fc2.weight for layer in model.decoder.layers]
    for weight in trained:
        weight.requires_grad_(True)
    expected = gradients(model, batch, loss_of)
    with recollect.apply(model, megatron_plan(profile, RecomputeConfig(**FULL))):
        got = gradients(model, batch, loss_of)
    assert sum(name.startswith("gradient") for name in got) == len(trained)
    assert_same_gradients(expected, got)


def assert_exact_and_smaller(
    model: GPTModel, batch: dict[str, Tensor], plan: recollect.Plan, than: recollect.Plan
) -> None:
    expected = gradients(model, batch, loss_of)
    with recollect.apply(model, plan):
        assert_same_gradients(expected, gradients(model, batch, loss_of))
    assert plan.predicted_host_bytes
    assert plan.predicted_peak_bytes < than.predicted_peak_bytes


def test_offload_and_recompute() -> None:
    model, batch, profile = built(NAMED_CONFIGS["llama-tiny"], sequences=342)
    for fields in (
        FULL | {"recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    ):
        config = RecomputeConfig(**fields, cpu_offloading=True, cpu_offloading_num_layers=3)
        plan = megatron_plan(profile, config, TrainingSetting(num_layers=4))
        assert any(unit.recomputes_anything for unit in plan.units.values())
        assert_exact_and_smaller(model, batch, plan, megatron_plan(profile, RecomputeConfig(**fields)))


FINE: dict[str, Any] = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ["core_attn", "mlp_norm"],
    "min_offloaded_tensor_size": 600,
}


def test_offload_transformer_engine() -> None:
    model, batch, profile = built(NAMED_CONFIGS["llama-tiny"], sequences=16)
    plan = megatron_plan(profile, RecomputeConfig(**FINE), TrainingSetting(transformer_impl="local"))
    assert_exact_and_smaller(model, batch, plan, megatron_plan(profile, RecomputeConfig()))


def test_offload_v1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVTE_CPU_OFFLOAD_V1", raising=False)
    model, batch, profile = built(NAMED_CONFIGS["llama-tiny"], sequences=16)
    plan = megatron_plan(profile, RecomputeConfig(**FINE), TrainingSetting(transformer_engine_version="2.10"))
    assert_exact_and_smaller(model, batch, plan, megatron_plan(profile, RecomputeConfig()))


def test_autograd_grad() -> None:
    """Megatron's checkpoint raises: it is not compatible with .grad()."""
    model, batch, profile = built(NAMED_CONFIGS["llama-tiny"])

    def grads() -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss_of(model(**batch)), list(model.parameters()))

    expected = grads()
    for config in (RecomputeConfig(**FULL), selective("core_attn", "mlp")):
        with recollect.apply(model, megatron_plan(profile, config)):
            assert all(torch.equal(one, other) for one, other in zip(expected, grads(), strict=True))


def test_layer_outputs_inside_of_regions() -> None:
    """Megatron's uniform regions can hand out hidden states at their ends only."""
    model, batch, profile = built(NAMED_CONFIGS["llama-tiny"])

    def outputs() -> list[Tensor]:
        found: list[Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda _module, _args, out: found.append(out[0].detach().clone()))
            for layer in model.decoder.layers
        ]
        loss_of(model(**batch)).backward()
        for hook in hooks:
            hook.remove()
        return found

    expected = outputs()
    with recollect.apply(model, megatron_plan(profile, RecomputeConfig(**FULL))):
        got = outputs()
    assert len(got) == 4
    assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))


def test_routers_choose_once() -> None:
    """What topk and sort return is kept, so no route can be another one in recompute, and nothing is to be replayed."""
    model, batch, profile = built(NAMED_CONFIGS["mixtral-tiny"])
    plan = megatron_plan(profile, RecomputeConfig(**FULL))
    plain = {name: num_ops(model, batch, name) for name in ("topk", "sort")}
    with recollect.apply(model, plan):
        assert {name: num_ops(model, batch, name) for name in ("topk", "sort")} == plain


def in_8_bits(name: str, **fields: Any) -> tuple[GPTModel, dict[str, Tensor], recollect.Profile]:
    """Scales and histories are those of a third step; `gradients` compares them as they are after the fourth."""
    model, batch, profile = built(NAMED_CONFIGS[name].changed(fp8="hybrid", **fields), sequences=4)
    for _ in range(3):
        loss_of(model(**batch)).backward()
    return model, batch, profile


def assert_exact_in_8_bits(
    model: GPTModel, batch: dict[str, Tensor], profile: recollect.Profile, config: RecomputeConfig, **others: Any
) -> None:
    setting = TrainingSetting.of(model.config, **others)
    assert (setting.fp8, setting.fp8_recipe) == ("hybrid", model.config.fp8_recipe)
    config.check(setting)
    assert_exact_and_leaner(model, batch, megatron_plan(profile, config, setting))


def test_fp8_delayed() -> None:
    model, batch, profile = in_8_bits("mixtral-tiny", fp8_recipe="delayed", fp8_amax_history_len=2)
    assert (
        sum("amax_history" in name for name, _ in model.named_buffers()) == 4 * 4 * 3
    )  # of four layers' four products
    for config in (selective("layernorm"), selective("moe_act"), RecomputeConfig(**FULL)):
        assert_exact_in_8_bits(model, batch, profile, config)


def test_fp8_version() -> None:
    model, batch, profile = in_8_bits("mixtral-tiny", fp8_recipe="tensorwise")
    config = selective("layernorm", "moe_act")
    assert_exact_in_8_bits(model, batch, profile, config, transformer_engine_version="2.5.1")


def test_fp8_any_module() -> None:
    modules = ("core_attn", "moe_act", "shared_experts", "mla_up_proj", "layernorm")
    model, batch, profile = in_8_bits("deepseek-v3-tiny", num_layers=2, fp8_recipe="delayed")
    assert_exact_in_8_bits(model, batch, profile, selective(*modules, recompute_discard_outputs=modules))


def test_every_row_of_the_table_has_a_test() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Freedoms")[2].partition("\n## ")[0]
    rows = set(re.findall(r"`test_(\w+)`", section))
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert rows == tests - {"every_row_of_the_table_has_a_test"}
    assert {rule.name.replace("-", "_") for rule in RULES if rule.ours == "free"} <= rows
