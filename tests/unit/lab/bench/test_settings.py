"""Settings of the performance harness, in a few words and as YAML."""

from pathlib import Path
from typing import Any

import pytest

from recollect.errors import BenchError, ConfigError
from recollect.lab.bench.settings import KEEP_ALL, Setting, named_settings, parse_setting, read_settings


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("none", {"recompute_granularity": None}),
        ("selective", {"recompute_granularity": "selective"}),
        (
            "selective core_attn,layernorm",
            {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm")},
        ),
        ("selective mlp moe_act", {"recompute_granularity": "selective", "recompute_modules": ("mlp", "moe_act")}),
        ("full uniform 4", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 4}),
        ("full block 2", {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}),
        # What is missing is for Megatron's rules to say.
        ("full", {"recompute_granularity": "full"}),
        ("memory_budget 60%", {"memory_budget": "60%"}),
        ("memory_budget 16 GiB", {"memory_budget": "16 GiB"}),
    ],
)
def test_words_become_fields(text: str, fields: dict[str, Any]) -> None:
    setting = parse_setting(text)
    assert setting.fields == fields
    assert setting.name.split()[0] == text.split(maxsplit=1)[0]


@pytest.mark.parametrize("text", ["", "none at all", "budget 60%", "memory_budget", "full uniform block", "full 1 2"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(BenchError, match="cannot be read, expected 'none', 'selective core_attn,layernorm', 'full uni"):
        parse_setting(text)


def test_yaml_has_words_or_megatrons_names(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(
        "settings:\n"
        "  - none\n"
        "  - full uniform 1\n"
        "  - recompute_granularity: selective\n"
        "    recompute_modules: [core_attn, mlp]\n"
        "  - name: as in a recipe of Bridge\n"
        "    model: {recompute_granularity: selective, recompute_modules: 'moe,layernorm'}\n"
        "  - memory_budget: 60%\n"
        "  - recompute_granularity: null\n"
        "    name: nothing\n"
    )
    settings = read_settings(path)
    assert [setting.name for setting in settings] == [
        *(
            "none",
            "full uniform 1",
            "selective core_attn,mlp",
            "as in a recipe of Bridge",
            "memory_budget 60%",
            "nothing",
        )
    ]
    assert settings[3].fields["recompute_modules"] == ("moe", "layernorm")
    assert settings[4].budget == "60%"
    assert settings[5].is_plain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not YAML"),
        ("a: 1", "expected a list of settings"),
        ("[]", "expected a list of settings"),
        ("- 7", "entry 1: got 7, expected 'none'"),
        ("- model: core_attn", "entry 1: got {'model': 'core_attn'}, expected 'none'"),
        ("- none\n- sometimes", "entry 2: setting 'sometimes': cannot be read"),
        (
            "- {memory_budget: 60%, recompute_granularity: full}",
            "got memory_budget with recompute_granularity, expected a single way",
        ),
    ],
)
def test_yaml_that_is_no_list_of_settings(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(BenchError, match=message) as caught:
        read_settings(path)
    assert str(path) in str(caught.value)


def test_missing_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"none\.yaml: cannot be read \(No such file or directory\)"):
        read_settings(tmp_path / "none.yaml")


def test_no_recompute_comes_first_and_names_are_there_once() -> None:
    words = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    full = Setting(words, name="full")
    assert [setting.name for setting in named_settings([full])] == ["none", "full"]
    assert [setting.name for setting in named_settings([full, Setting(KEEP_ALL, "plain")])] == ["plain", "full"]
    with pytest.raises(BenchError, match="setting 'full': given twice"):
        named_settings([full, full])


def test_names_that_megatron_does_not_have() -> None:
    with pytest.raises(BenchError, match="got 'recompute_granularty', expected names .* mean 'recompute_granularity'?"):
        named_settings([Setting({"recompute_granularty": "full"}, name="typo")])


def test_settings_that_clash_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match="recompute_modules=7"):
        named_settings([Setting({"recompute_granularity": "selective", "recompute_modules": 7})])
    with pytest.raises(ConfigError, match="full recompute needs"):
        named_settings([parse_setting("full")])
