"""ROLL's settings: what they become in Megatron's words, and as plans."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from recollect.errors import ConfigError, ConfigWarning
from recollect.integrations.megatron import RollCheckpointing, roll_plan, roll_recompute_config
from recollect.integrations.megatron.roll import is_moe_config
from recollect.planning.classic import classic_plan
from toy_profile import stack


@pytest.mark.parametrize(
    ("settings", "choice"),
    [
        ({}, "no recompute"),
        ({"tensor_model_parallel_size": 4, "use_distributed_optimizer": True}, "no recompute"),
        ({"recompute_granularity": "full"}, "full, uniform, 1"),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}, "full, block, 3"),
        ({"recompute_granularity": "selective"}, "selective, core_attn"),
        ({"recompute_granularity": "selective", "recompute_modules": "moe, layernorm"}, "selective, moe layernorm"),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, "selective, moe"),
        ({"additional_configs": {"recompute_granularity": "full"}}, "full, uniform, 1"),
    ],
)
def test_settings_of_megatron_strategies(settings: dict[str, Any], choice: str) -> None:
    assert str(roll_recompute_config(settings).choice) == choice


def test_the_deprecated_setting_adds_to_the_default() -> None:
    with pytest.warns(ConfigWarning, match="it is deprecated, and means selective recompute of core_attn moe"):
        config = roll_recompute_config({"moe_layer_recompute": True})
    assert str(config.choice) == "selective, core_attn moe"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"recompute_granularity": "full", "recompute_num_layers": 2},
            "recompute_granularity='full', recompute_method=None: full recompute needs a method",
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "recompute", "recompute_num_layers": 2},
            "recompute_method='recompute': ROLL offers it by mistake, and Megatron rejects it. Set it to 'block'",
        ),
        (
            {"recompute_granularity": "full", "moe_layer_recompute": True},
            "moe_layer_recompute=True: one asks for whole layers, the other for modules",
        ),
        (
            {"recompute_granularty": "full"},
            "recompute_granularty='full': there is no such setting. Did you mean 'recompute_granularity'? Remove it",
        ),
    ],
)
def test_messages(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        roll_recompute_config(settings)


@pytest.mark.parametrize(
    ("model_config", "expected"),
    [
        (None, False),
        ({}, False),
        ({"num_experts": 0, "moe_layer_freq": None, "output_router_logits": False}, False),
        ({"num_local_experts": 8}, True),
        (SimpleNamespace(num_experts_per_tok=2), True),
        (SimpleNamespace(text_config=SimpleNamespace(n_experts=4)), True),
        # As in ROLL: the text model's configuration is the one that counts,
        (SimpleNamespace(num_experts=8, text_config=SimpleNamespace(hidden_size=64)), False),
        # and a coefficient alone makes a model one with experts.
        ({"router_aux_loss_coef": 0.001}, True),
    ],
)
def test_the_automatic_rule(model_config: object, expected: bool) -> None:
    assert is_moe_config(model_config) is expected
    assert RollCheckpointing().use_reentrant(model_config) is expected
    assert (
        RollCheckpointing(gradient_checkpointing_use_reentrant=not expected).use_reentrant(model_config) is not expected
    )


def test_switches_are_true_false_or_none() -> None:
    with pytest.raises(ConfigError, match="gradient_checkpointing_use_reentrant='auto': str is the wrong type. Set it"):
        RollCheckpointing(gradient_checkpointing_use_reentrant="auto")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="disable_gradient_checkpointing=1: int is the wrong type"):
        RollCheckpointing(disable_gradient_checkpointing=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_both_implementations_are_the_same_plan(use_reentrant: bool | None) -> None:
    plan = roll_plan(stack(3), RollCheckpointing(gradient_checkpointing_use_reentrant=use_reentrant))
    assert plan.units == classic_plan(stack(3), "full").units
    assert plan.note == "ROLL: gradient checkpointing of each layer"


@pytest.mark.parametrize("disable", [True, False, None])
def test_the_switch(disable: bool | None) -> None:
    plan = roll_plan(stack(3), RollCheckpointing(disable_gradient_checkpointing=disable))
    assert any(unit.recomputes_anything for unit in plan.units.values()) is not bool(disable)
