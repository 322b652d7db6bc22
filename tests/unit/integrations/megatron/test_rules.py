"""Every rule about Megatron's settings: what breaks it, what is said then, and what just does not break it."""

import re
from dataclasses import fields
from typing import Any

import pytest

from megatron_cases import ALONE, BLOCK, FREE, LAYER_OFFLOAD, PARTIAL, WITHIN, Broken, graph, offload
from recollect.errors import ConfigError, ConfigWarning, NotYetError
from recollect.integrations.megatron import RecomputeConfig, TrainingSetting
from recollect.integrations.megatron.rules import NOT_YET, RULES, refuse_not_yet

ANSWER = {rule.name: rule.ours for rule in RULES}


def provoke(rule: str, message: str, run: Any) -> None:
    pattern = f"{re.escape(message)}.*\\[{rule}\\]$"
    if ANSWER[rule] == "warning":
        with pytest.warns(ConfigWarning, match=pattern):
            run()
    else:
        with pytest.raises(ConfigError, match=pattern) as caught:
            run()
        assert caught.value.rule == rule


@pytest.mark.parametrize("broken", ALONE, ids=lambda broken: broken.rule)
def test_a_configuration_that_breaks_a_rule(broken: Broken) -> None:
    provoke(broken.rule, broken.message, lambda: RecomputeConfig(**broken.config))
    if broken.mend:
        RecomputeConfig(**{**broken.config, **broken.mend})


@pytest.mark.parametrize("broken", WITHIN, ids=lambda broken: broken.rule)
def test_settings_that_break_a_rule_together(broken: Broken) -> None:
    config = RecomputeConfig(**broken.config)
    provoke(broken.rule, broken.message, lambda: config.check(TrainingSetting(**broken.setting)))
    config.check(TrainingSetting(**{**broken.setting, **broken.mend}))


@pytest.mark.parametrize("broken", FREE, ids=lambda broken: broken.rule)
def test_settings_that_break_a_rule_of_megatrons_alone(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVTE_CPU_OFFLOAD_V1", raising=False)
    (rule,) = (rule for rule in RULES if rule.name == broken.rule)
    config = RecomputeConfig(**broken.config)
    config.check(TrainingSetting(**broken.setting))
    clash = rule.clash(config, TrainingSetting(**broken.setting))
    shown = {"recompute_modules" if name == "modules" else name for name in rule.settings}
    assert clash is not None and clash.reason == broken.message and set(clash.settings) == shown
    fields = {name: value for name, value in broken.mend.items() if name in broken.setting}
    mended = RecomputeConfig(**{**broken.config, **{k: v for k, v in broken.mend.items() if k not in fields}})
    assert rule.clash(mended, TrainingSetting(**{**broken.setting, **fields})) is None
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
    assert (rule.clash(config, TrainingSetting(**broken.setting)) is None) == (rule.name == "offload-v1")


def test_every_rule_is_here() -> None:
    assert {broken.rule for broken in FREE} == {rule.name for rule in RULES if rule.is_checked and rule.ours == "free"}
    checked = [rule for rule in RULES if rule.is_checked and rule.ours != "free"]
    assert {broken.rule for broken in ALONE} == {rule.name for rule in checked if not rule.needs_training}
    assert {broken.rule for broken in WITHIN} == {rule.name for rule in checked if rule.needs_training}
    assert len(ANSWER) == len(RULES)
    for rule in RULES:
        is_checked = rule.is_checked and rule.ours != "free"
        assert (rule.ours in ("error", "warning")) == is_checked or rule.name == "modules-not-there"


ASKS_FOR_WHAT_IS_NOT_BUILT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        LAYER_OFFLOAD,
        {"pipeline_model_parallel_size": 2},
        "cpu_offloading=True, pipeline_model_parallel_size=2: not yet: plans of copies for several micro-batches in flight",
    ),
    (
        offload("core_attn"),
        {"pipeline_model_parallel_size": 2},
        "offload_modules=('core_attn',), pipeline_model_parallel_size=2: not yet: plans of copies for several",
    ),
    ({"moe_paged_stash": True}, {}, "moe_paged_stash=True: not yet: a store for experts' activations in pages. Leave"),
    ({**BLOCK, **PARTIAL}, {}, "checkpoints=1: not yet: a stage of a pipeline that"),
    ({"moe_enable_routing_replay": True}, {}, "not yet: routers that follow recorded choices. Leave it out; recompute"),
    (
        {},
        {"fp8": "hybrid", "fp8_recipe": "custom"},
        "fp8='hybrid', fp8_recipe='custom': not yet: recipes of one's own. Set fp8_recipe to 'delayed'",
    ),
    ({}, {"fp4": "e2m1"}, "fp4='e2m1': not yet: models that compute in 4 bits"),
    ({}, graph("local", "attn"), "cuda_graph_impl='local', cuda_graph_modules=('attn',): not yet: steps that are"),
    (
        {},
        {"overlap_moe_expert_parallel_comm": True},
        "not yet: exchanges between experts that run beside other work. Leave it",
    ),
]


@pytest.mark.parametrize(("config", "setting", "message"), ASKS_FOR_WHAT_IS_NOT_BUILT, ids=lambda part: str(part)[:40])
def test_what_is_not_built_is_named(config: dict[str, Any], setting: dict[str, Any], message: str) -> None:
    with pytest.raises(NotYetError, match=re.escape(message)) as caught:
        refuse_not_yet(RecomputeConfig(**config), TrainingSetting(**setting))
    assert set(caught.value.settings) in [set(missing.settings) for missing in NOT_YET]


def test_everything_that_is_not_built_is_here() -> None:
    assert len(ASKS_FOR_WHAT_IS_NOT_BUILT) == len(NOT_YET)
    names = {f.name for f in fields(RecomputeConfig)} | {f.name for f in fields(TrainingSetting)}
    assert all(set(missing.settings) <= names for missing in NOT_YET)


def test_defaults_break_no_rule_and_need_nothing() -> None:
    RecomputeConfig().check(TrainingSetting())
    refuse_not_yet(RecomputeConfig(), TrainingSetting())


@pytest.mark.parametrize(
    ("given", "impl", "modules"),
    [
        ({"cuda_graph_scope": "full_iteration"}, "full_iteration", ()),
        ({"cuda_graph_scope": ["attn", "mlp"]}, "none", ("attn", "mlp")),
        ({"cuda_graph_modules": "attn,mlp"}, "none", ("attn", "mlp")),
        ({"cuda_graph_modules": "full"}, "none", ()),
    ],
)
def test_spellings_of_graph_modules(given: dict[str, Any], impl: str, modules: tuple[str, ...]) -> None:
    setting = TrainingSetting(**given)
    assert (setting.cuda_graph_impl, setting.cuda_graph_modules) == (impl, modules)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"pipeline_model_parallel_size": 0},
            "pipeline_model_parallel_size=0: not a number of ranks. Set it to 1 or more.",
        ),
        ({"cuda_graph_modules": ["atn"]}, "nothing is called 'atn'. Choose from attn, mlp"),
        ({"cuda_graph_scope": "attn", "cuda_graph_modules": ["mlp"]}, "these are two names of one setting"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        TrainingSetting(**given)
