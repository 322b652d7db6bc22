"""Megatron's recompute flags, as a command line gives them; and each line in the guides that users follow."""

import shlex
import warnings
from typing import Any

import pytest
import tyro

from command_lines import DOCUMENTED
from recollect.cli.entry import parse_train
from recollect.cli.parsing import REGISTRY
from recollect.cli.recompute_flags import RecomputeFlags
from recollect.cli.train import training_config
from recollect.errors import ConfigError, RecollectError
from recollect.lab.train.config import StepFlags, TrainConfig


def parse(line: str) -> RecomputeFlags:
    return tyro.cli(RecomputeFlags, args=line.split(), registry=REGISTRY)


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("", {}),
        ("--recompute-activations", {"recompute_granularity": "selective"}),
        ("--recompute-granularity None", {}),
        ("--recompute-granularity selective", {"recompute_granularity": "selective"}),
        (
            "--recompute-granularity selective --recompute-modules core_attn mlp",
            {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")},
        ),
        # The spelling of Megatron-Bridge's harness, and ROLL's list in one word.
        (
            "--recompute_granularity selective --recompute_modules core_attn,layernorm",
            {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm")},
        ),
        # No module at all is not the same as the default.
        (
            "--recompute-granularity selective --recompute-modules",
            {"recompute_granularity": "selective", "recompute_modules": ()},
        ),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 4},
        ),
        ("--recompute-method block --recompute-num-layers 0", {"recompute_method": "block", "recompute_num_layers": 0}),
        (
            "--num-microbatches-with-partial-activation-checkpoints 0",
            {"num_microbatches_with_partial_activation_checkpoints": 0},
        ),
        ("--moe-layer-recompute", {"moe_layer_recompute": True}),
        ("--distribute-saved-activations", {"distribute_saved_activations": True}),
        ("--cpu-offloading-num-layers 2", {"cpu_offloading_num_layers": 2, "cpu_offloading": True}),
        ("--cpu-offloading-num-layers 0", {"cpu_offloading_num_layers": 0}),
        (
            "--fine-grained-activation-offloading --offload-modules core_attn attn_proj --activation-offload-fraction 0.5",
            {
                "fine_grained_activation_offloading": True,
                "offload_modules": ("core_attn", "attn_proj"),
                "activation_offload_fraction": 0.5,
            },
        ),
    ],
)
def test_flags_become_megatrons_fields(line: str, fields: dict[str, Any]) -> None:
    assert parse(line).fields() == fields


def test_with_a_budget_the_plan_says_which_values_are_held_as_parts() -> None:
    line = "--size tiny --memory-budget 60% --tensor-model-parallel-size 2 --distribute-saved-activations"
    step = training_config(parse_train(line.split())).step
    assert step.distribute_saved_activations
    assert step.recompute is None


def test_parts_of_values_need_a_budget_or_full_recompute() -> None:
    line = "--size tiny --tensor-model-parallel-size 2 --distribute-saved-activations"
    with pytest.raises(
        ConfigError, match=r"recompute_granularity=None, distribute_saved_activations=True: only the kept"
    ):
        training_config(parse_train(line.split()))
    with pytest.raises(ValueError, match=r"distribute_saved_activations: given without memory_budget, expected both"):
        StepFlags(distribute_saved_activations=True)


def test_micro_batches_differ_in_a_pipeline_only() -> None:
    line = "--size tiny --recompute-granularity full --recompute-method block --recompute-num-layers 1 "
    line += "--num-microbatches-with-partial-activation-checkpoints 1"
    with pytest.raises(ConfigError, match=r"=1, pipeline_model_parallel_size=1: only a pipeline has several micro-"):
        training_config(parse_train(line.split()))
    recompute = training_config(parse_train([*line.split(), "--pipeline-model-parallel-size", "2"])).step.recompute
    assert recompute is not None and recompute.num_microbatches_with_partial_activation_checkpoints == 1


def test_the_short_flag_clashes_with_full() -> None:
    with pytest.raises(ValueError, match=r"recompute_activations: given with recompute_granularity full, expected one"):
        RecomputeFlags(recompute_activations=True, recompute_granularity="full")


def test_help_names_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    for word in ("--recompute-granularity {full,selective}", "--recompute-method {uniform,block}", "mla_up_proj"):
        assert word in " ".join(text.split())


def test_ranks_that_share_experts_follow_megatrons_settings() -> None:
    line = "--size mixtral-tiny --expert-model-parallel-size 2 --recompute-granularity full --recompute-method uniform"
    recompute = training_config(parse_train([*line.split(), "--recompute-num-layers", "1"])).step.recompute
    assert recompute is not None and recompute.recompute_num_layers == 1


# Refused, as a part of the line: what is not there yet, and what Megatron refuses too.
REFUSED = {
    "selective --recompute-method": r"recompute_granularity='selective', recompute_method='uniform'",
    "mla_up_proj": r"the model has no up-projection from latents|a model without experts has no moe_act",
}
# Lines that say nothing of the model, which Megatron refuses without the rest of a command line.
NEEDS = {
    "selective --recompute-modules moe_act": "--num-experts 8",
    "selective --recompute-modules core_attn moe_act": "--num-experts 8",
    "--recompute-granularity full": "--recompute-method block --recompute-num-layers 1",
}


def parse_documented(command: str) -> TrainConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about lines without a granularity; test_recompute_flags has them
        return training_config(parse_train(shlex.split(command)))


def test_documented_command_lines() -> None:
    for command in DOCUMENTED:
        refusal = next((reason for part, reason in REFUSED.items() if part in command), None)
        if refusal is not None:
            with pytest.raises(RecollectError, match=refusal):
                parse_documented(command)
            continue
        for part, rest in NEEDS.items():
            if part in command and rest.split()[0] not in command:
                with pytest.raises(RecollectError):
                    parse_documented(command)
                command += f" {rest}"
        config = parse_documented(command)
        says_recompute = "--recompute" in command and "None" not in command
        assert (config.step.recompute is not None) == says_recompute, command


def test_the_values_of_a_whole_line_arrive() -> None:
    line = next(command for command in DOCUMENTED if "--hidden-size 12288" in command)
    config = parse_documented(line)
    model = config.model.dimensions(seq_length=config.data.seq_length)
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.num_attention_heads) == (
        96,
        12288,
        49152,
        96,
    )
    assert (config.optim.batch_size, config.data.seq_length, model.max_position_embeddings) == (1, 2048, 2048)
    assert config.step.recompute.modules == ("core_attn", "mlp")
