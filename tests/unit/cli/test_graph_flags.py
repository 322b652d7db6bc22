"""Megatron's settings of CUDA graphs: on the command line its own rules come first, then that nothing captures them yet."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import recollect
from megatron_cases import WITHIN, Broken
from recollect.cli.entry import main, parse_train
from recollect.cli.graph_rules import check_graphs
from recollect.errors import ConfigError, NotYetError
from recollect.integrations.megatron import RecomputeConfig, TrainingSetting
from recollect.integrations.megatron.rules import RULES, refuse_not_yet

MEGATRON = "--num-layers 4 --hidden-size 64 --num-attention-heads 2 "
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0 "
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
OFFLOADED = "--fine-grained-activation-offloading --offload-modules"
BRIDGE = "full recompute is only supported with full iteration CUDA graph"
MEGATRONS = "--recompute-granularity must not be full when CUDA Graphs are enabled"
DRAWS = "recomputed code in a graph must not draw random numbers"


def line_of(broken: Broken) -> str:
    """The flags of settings that break a rule."""
    words = [MEGATRON]
    for name, value in (broken.config | broken.setting).items():
        values = value if isinstance(value, tuple) else [value]
        if name != "cpu_offloading":  # which the number of layers says
            words += [f"--{name.replace('_', '-')}", *(str(one) for one in values if one is not True)]
    return " ".join(words)


def reason_of(broken: Broken) -> str:
    (rule,) = (rule for rule in RULES if rule.name == broken.rule)
    clash = rule.clash(RecomputeConfig(**broken.config), TrainingSetting(**broken.setting))
    assert clash is not None
    return clash.reason


# What the guides refuse, in all spellings, and what breaks each rule: the rule, and words of it.
REFUSED = [
    (f"{FULL}--cuda-graph-impl transformer_engine --cuda-graph-scope mlp", "graph-full", BRIDGE),
    (f"{FULL}--cuda-graph-impl transformer_engine --cuda-graph-scope attn", "graph-full", MEGATRONS),
    (f"{FULL}--cuda-graph-impl=transformer_engine --cuda-graph-modules moe_router", "graph-full", BRIDGE),
    (f"{FULL}--cuda-graph-impl local", "graph-full", MEGATRONS),
    (f"{FULL}--cuda_graph_impl local --cuda_graph_scope attn,mlp", "graph-full", BRIDGE),
    (f"{FULL}--enable-cuda-graph", "graph-full", MEGATRONS),
    (f"{FULL}--external-cuda-graph", "graph-full", MEGATRONS),
    ("-rl 2 --cuda_graph_impl transformer_engine --cuda_graph_scope mlp", "graph-full", BRIDGE),
    (
        "--recompute-activations --attention-dropout 0.1 --cuda-graph-impl transformer_engine --cuda-graph-scope attn",
        "graph-attention-dropout",
        DRAWS,
    ),
    (
        "--cpu-offloading-num-layers 1 --external-cuda-graph",
        "graph-layer-offload",
        "a layer's graph cannot hold copies",
    ),
    (
        f"{OFFLOADED} moe_act --external-cuda-graph --cuda-graph-scope moe",
        "graph-fine-grained",
        "a graph of the experts",
    ),
    *(
        (line_of(broken), broken.rule, reason_of(broken))
        for broken in WITHIN
        # No flag gives the version of Transformer Engine.
        if broken.rule.startswith("graph-") and broken.rule not in ("graph-full", "graph-offload-version")
    ),
]

# What the guides call working, and what Megatron's settings are then.
WORKING: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *(
        (
            f"{NO_DROPOUT}--recompute-granularity selective --recompute-modules {modules} "
            f"--cuda-graph-impl transformer_engine --cuda-graph-scope {scope}",
            {"recompute_granularity": "selective", "recompute_modules": modules.split()},
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": scope.split()},
        )
        for modules, scope in (
            ("core_attn", "mlp"),
            ("core_attn", "attn"),
            ("core_attn layernorm", "attn mlp"),
            ("mlp", "mlp"),
            ("mlp core_attn", "attn"),
            ("moe_act", "moe_router"),
            ("moe", "attn"),
        )
    ),
    (
        f"{FULL}--cuda-graph-impl local --cuda-graph-scope full_iteration",
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"},
    ),
    (
        f"{FULL}--cuda-graph-impl full_iteration",
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"cuda_graph_impl": "full_iteration"},
    ),
    (
        f"{NO_DROPOUT}--recompute-activations --enable-cuda-graph",
        {"recompute_granularity": "selective"},
        {"cuda_graph_impl": "local"},
    ),
    (
        f"{NO_DROPOUT}--recompute-activations --external-cuda-graph --cuda-graph-warmup-steps 2",
        {"recompute_granularity": "selective"},
        {"cuda_graph_impl": "transformer_engine"},
    ),
    (
        "--cpu-offloading-num-layers 1 --cuda-graph-impl full_iteration",
        {"cpu_offloading": True, "cpu_offloading_num_layers": 1},
        {"cuda_graph_impl": "full_iteration"},
    ),
]


@pytest.mark.parametrize(("line", "rule", "words"), REFUSED, ids=lambda part: str(part)[-60:])
def test_a_rule_of_the_guides_comes_first(line: str, rule: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        parse_train(shlex.split(line))
    assert caught.value.rule == rule
    assert all(name.startswith("--") for name in caught.value.settings)


def test_every_rule_of_graphs_that_a_line_can_break_is_here() -> None:
    of_graphs = {rule.name for rule in RULES if rule.name.startswith("graph-")}
    assert {rule for _, rule, _ in REFUSED} == of_graphs - {"graph-offload-version"}
    assert of_graphs <= {broken.rule for broken in WITHIN}


@pytest.mark.parametrize(("line", "config", "setting"), WORKING, ids=lambda part: str(part)[-60:])
def test_what_the_guides_call_working_breaks_no_rule(
    line: str, config: dict[str, Any], setting: dict[str, Any]
) -> None:
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    settings = TrainingSetting(num_layers=4, num_moe_experts=8, moe_grouped_gemm=True, **setting, **dropout)
    RecomputeConfig(**config).check(settings)
    with pytest.raises(NotYetError, match="not yet: steps that are captured as CUDA graphs with a plan on them"):
        refuse_not_yet(RecomputeConfig(**config), settings)
    if "--cuda-graph-impl full_iteration" in line:
        assert parse_train(shlex.split(line)).config.step.captures
        return
    with pytest.raises(NotYetError, match="not yet: steps that are captured as CUDA graphs with a plan on them"):
        parse_train(shlex.split(line))


@pytest.mark.parametrize(
    "line",
    [
        f"{FULL}--cuda-graph-impl none",
        f"{FULL}--cuda-graph-scope mlp --cuda-graph-warmup-steps 3",
        "--delay-offload-until-cuda-graph --recompute-activations",
    ],
)
@pytest.mark.filterwarnings("ignore:without effect here")
def test_without_graphs_nothing_is_refused(line: str) -> None:
    parse_train(shlex.split(line))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--cuda-graph-impl local --cuda-graph-scope atn", "nothing is called 'atn'. Choose from attn, mlp"),
        ("--cuda-graph-scope attn --cuda-graph-modules mlp", "these are two names of one setting"),
    ],
)
def test_settings_that_cannot_be(line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_graphs(shlex.split(line))


def test_the_first_error_of_a_run_is_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{MEGATRON}{FULL}--cuda-graph-impl transformer_engine --cuda-graph-scope mlp --optimizer sgd"
    assert main(["train", *shlex.split(line)]) == 2
    expected = (
        "Error: --recompute-granularity full, --cuda-graph-impl transformer_engine, --cuda-graph-modules mlp: "
        f"{BRIDGE} (in older versions, {MEGATRONS}). Set --recompute-granularity to 'selective'. Or: Set --cuda-graph-impl to "
        "'none' or 'full_iteration'. [graph-full]\n"
    )
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("command", ["plan --memory-budget 60% --size tiny", "explain --size tiny"])
def test_commands_that_plan(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for line, words in (
        (f"{FULL}--cuda-graph-impl local", BRIDGE),
        (f"{FULL}--cuda-graph-impl full_iteration", "not yet: steps that are captured"),
    ):
        assert main(shlex.split(f"{command} {line}")) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(("line", "rule", "words"), REFUSED, ids=lambda part: str(part)[-60:])
def test_the_doctor_says_the_same_of_a_script(line: str, rule: str, words: str, tmp_path: Path) -> None:
    if line.startswith("-rl"):
        return  # It reads no short flags.
    script = tmp_path / "run.sh"
    dropout = "" if "dropout" in line or line.startswith(MEGATRON) else NO_DROPOUT
    script.write_text(f"torchrun pretrain_gpt.py --tensor-model-parallel-size 1 {dropout}{line}\n", encoding="utf-8")
    found = [finding for finding in recollect.diagnose(script) if finding.rule == f"megatron-{rule}"]
    assert found and words.replace(MEGATRONS, MEGATRONS[2:].replace("-", "_", 1)) in found[0].problem


@pytest.mark.parametrize("line", [line for line, _, _ in WORKING])
def test_the_doctor_finds_no_clash_in_what_works(line: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"torchrun pretrain_gpt.py --tensor-model-parallel-size 1 {line}\n", encoding="utf-8")
    assert not [one.rule for one in recollect.diagnose(script) if "graph" in one.rule]
