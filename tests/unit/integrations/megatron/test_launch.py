"""Command lines of Megatron's `pretrain_gpt` out of launch scripts, files of flags, and YAML of Megatron-Bridge."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from recollect.cli.cluster import cluster_step
from recollect.cli.commands import MakePlan
from recollect.cli.entry import _parse
from recollect.cli.parsing import flags_of
from recollect.errors import ConfigError, NotYetError, RecollectError
from recollect.integrations.megatron.launch import command_words, launch_words
from recollect.lab.parallel.cluster_step import ClusterStep

SCRIPT = r"""#!/bin/bash
set -euo pipefail
source /opt/venv/bin/activate
mkdir -p "$(dirname "$0")/logs"
GPUS=8 NODES=${NODES_OF_A_TEST:-2}
WORLD=$((GPUS * NODES))
MODEL=(
    --num-layers 8  # a comment (with what bash reads)
    "--hidden-size 64"
    --moe-layer-freq '([0]*3+[1]*5)'
)
if [ ! -f pretrain_gpt.py ]; then echo "no script"; exit 1; fi
[[ "${KIND:-dense}" == dense ]] && MODEL+=(--swiglu) || MODEL+=(--num-experts 8)
echo torchrun pretrain_gpt.py ${MODEL[@]}
torchrun --nproc_per_node $GPUS --nnodes=$NODES pretrain_gpt.py "${MODEL[@]}" \
    --pipeline-model-parallel-layout "Et*3|(tt|)*2tL" --seq-length $((4 * 32)) 2>&1 | tee log.txt > other.txt
"""
BRIDGE: dict[str, Any] = {
    "_target_": "megatron.bridge.training.config.ConfigContainer",
    "model": {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        "num_layers": 8,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_moe_experts": None,
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "attention_backend": {"_target_": "...enums.AttnBackend", "_call_": True, "_args_": [1], "_name_": "flash"},
        "add_bias_linear": False,
        "share_embeddings_and_output_weights": False,
        "hidden_dropout": 0.0,
        "moe_token_drop_policy": "probs",
        "window_size": None,
        "masked_softmax_fusion": True,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": [
            ["embedding", *3 * ["decoder"]],
            2 * ["decoder"],
            2 * ["decoder"],
            ["decoder", "loss"],
        ],
        "vocab_size": 500,
        "seq_length": 128,
    },
    "train": {"micro_batch_size": 2, "global_batch_size": 16, "train_iters": 10},
    "ddp": {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    "mixed_precision": "bf16_mixed",
}


def words_of(tmp_path: Path, text: str, name: str = "train.sh") -> list[str]:
    (tmp_path / name).write_text(text)
    return launch_words(tmp_path / name, flags_of(MakePlan))


def test_a_script_is_read_as_bash_reads_it_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = words_of(tmp_path, SCRIPT)
    assert " ".join(words) == (
        "--world-size=16 --num-layers 8 --hidden-size 64 --moe-layer-freq ([0]*3+[1]*5) --swiglu "
        "--pipeline-model-parallel-layout Et*3|(tt|)*2tL --seq-length 128"
    )
    monkeypatch.setenv("NODES_OF_A_TEST", "4")
    assert words_of(tmp_path, SCRIPT)[0] == "--world-size=32"
    assert [path.name for path in tmp_path.iterdir()] == ["train.sh"]


def test_flags_alone_are_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "# the model\n--num-layers 2 \\\n  --spec 'a b'\n--bf16\n"
    assert words_of(tmp_path, text) == ["--num-layers", "2", "--spec", "a b", "--bf16"]
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert command_words(["--bf16"]) == ["--world-size=64", "--bf16"]


def test_yaml_of_bridge_and_flags_describe_the_same_step(tmp_path: Path) -> None:
    (tmp_path / "bridge.yaml").write_text(yaml.safe_dump(BRIDGE))
    flags = """--num-layers 8 --hidden-size 64 --num-attention-heads 4 --qk-layernorm --swiglu --attention-backend flash
        --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --pipeline-model-parallel-size 2
        --pipeline-model-parallel-layout Et*3|(tt|)*2tL --vocab-size 500 --seq-length 128 --micro-batch-size 2
        --global-batch-size 16 --use-distributed-optimizer --overlap-grad-reduce --bf16 --train-iters 10""".split()
    steps = []
    for more in (["--megatron", str(tmp_path / "bridge.yaml")], ["--", "pretrain_gpt.py", *flags]):
        with pytest.warns(
            match="not read, as .*: train_iters, masked_softmax_fusion|effect here: --overlap-grad-reduce"
        ):
            command = _parse(["plan", "--memory-budget", "1GiB", "--world-size", "4", "--hardware", "H100", *more])
        assert isinstance(command, MakePlan)
        steps.append(cluster_step(command))
    assert steps[0] == steps[1]
    assert (steps[0].layout.pipeline_split, steps[0].layout.data_parallel_size) == ((3, 2, 2, 1), 2)
    assert (steps[0].num_micro_batches, steps[0].dtype, steps[0].config.vocab_size) == (4, "bf16", 512)
    assert steps[0].sharding == "optimizer" and steps[0].pipeline_engine == "megatron"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.sh",
            "echo nothing",
            r"a.sh: starts 0 different commands with --num-layers, expected one. Pass it after -- inst",
        ),
        ("a.sh", "torchrun a.py --hidden-size 4 --num-layers", "starts 0 different commands with --num-layers"),
        ("a.sh", "for n in 1 2; do python a.py --num-layers $n; done", "starts 2 different commands with --num-layers"),
        (
            "a.sh",
            "torchrun --nnodes 1:4 a.py --num-layers 2",
            r"--nnodes='1:4': these are not numbers. Write numbers, or",
        ),
        ("a.yaml", "a: 1\n b: [", r"a.yaml: cannot be read \(line 2, column 3: mapping values are not allowed"),
        ("a.yaml", "", "a.yaml: got nothing, expected a mapping of Megatron's names."),
        pytest.param(
            "roll.yaml",
            "{seed: 1, actor_train: {strategy_args: {strategy_config: {recompute_granularity: full}}}}",
            "got settings for recompute under actor_train.strategy_args.strategy_config, expected them at the top level",
            id="ROLL",
        ),
        ("a.yml", "[1]", "a.yml: got a list, expected a mapping of Megatron's names."),
        (
            "a.yaml",
            "{model: {}, mixed_precision: fp8_mixed}",
            "got mixed_precision='fp8_mixed': the name is none of bf16_m",
        ),
        ("a.yaml", "model: {activation_func: tanh}", "got activation_func='tanh', gated_linear_unit=False: no flag of"),
        (
            "a.yaml",
            "model: {pipeline_model_parallel_layout: {_target_: Layout}}",
            "got pipeline_model_parallel_layout='Layout': the stages are lost: it was written after ConfigContainer.val",
        ),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(RecollectError, match=message):
        words_of(tmp_path, text, name)


@pytest.mark.parametrize("shell", ["sh -c", "bash -lc"])
def test_a_launcher_may_get_the_command_as_one_word(tmp_path: Path, shell: str) -> None:
    script = (
        f'run="torchrun --nproc_per_node 4 pretrain_gpt.py --bf16 --num-layers 2"\nsrun -l --nodes=2 {shell} "$run"\n'
    )
    assert words_of(tmp_path, script) == ["--world-size=4", "--bf16", "--num-layers", "2"]


def test_a_given_number_of_processes_is_not_read_from_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(
        "torchrun --nproc_per_node 8 --nnodes=$NODES_OF_NOBODY pretrain_gpt.py --num-layers 4 --hidden-size 64\n"
    )
    words = ["plan", "--memory-budget", "1GiB", "--megatron", str(tmp_path / "train.sh"), "--vocab-size", "9"]
    with pytest.raises(ConfigError, match="these are not numbers. Write numbers, or pass --world-size"):
        _parse(words)
    assert _parse([*words, "--world-size", "16"]).cluster.world_size == 16


BOTH_ENDS = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"


def step_of(line: str, *words: str) -> ClusterStep:
    start = ["plan", "--memory-budget", "1GiB", "--", "--num-layers", "30", "--hidden-size", "64"]
    return cluster_step(_parse([*start, *line.split(), *words]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("--num-layers-in-first-pipeline-stage 6 --decoder-last-pipeline-num-layers 4", (6, 10, 10, 4)),
        ("--decoder-first-pipeline-num-layers 6 --num-virtual-stages-per-pipeline-rank 2", (3, 4, 4, 4, 3, 4, 4, 4)),
        (BOTH_ENDS, (7, 8, 8, 7)),
        (f"{BOTH_ENDS} --num-layers-per-virtual-pipeline-stage 4", (3, 4, 4, 4, 4, 4, 4, 3)),
        (f"{BOTH_ENDS} --num-layers-per-virtual-pipeline-stage 3", "the layers cannot be divided among the stages"),
        ("--pipeline-model-parallel-layout Et*9|(t*7|)*3L|(|)*2", "1 E, 30 t, 1 L on 8 stages. Write E on the first"),
        ("--pipeline-model-parallel-layout Et*9|(t*7|)*3,|||L", (9, 7, 7, 7, 0, 0, 0, 0)),
        ("--decoder-first-pipeline-num-layers 0", "the layers cannot be divided among the stages"),
        (
            "--pipeline-split auto --decoder-last-pipeline-num-layers 2",
            "each says how many layers stages have. Leave all",
        ),
        (
            "--decoder-first-pipeline-num-layers 9 --num-layers-per-virtual-pipeline-stage 1",
            "each says how many layers st",
        ),
    ],
)
def test_uneven_stages(flags: str, sizes: tuple[int, ...] | str) -> None:
    line = f"--vocab-size 9 --pipeline-model-parallel-size 4 {flags}"
    if isinstance(sizes, tuple):
        assert tuple(map(len, step_of(line).layout.layers_of_stages(30))) == sizes
        return
    with pytest.raises(ConfigError, match=sizes):
        step_of(line)


def test_vocabulary_and_sizes_have_to_be_known() -> None:
    with pytest.raises(
        ConfigError, match=r"got vocab_size=None: Megatron has it from its tokenizer, which is not read. Add"
    ):
        step_of("")
    step = step_of("--vocab-size=50257 --tensor-model-parallel-size=8 --world-size=8")
    assert step.config.vocab_size == 51200
    line = "--vocab-size 9 --pipeline-model-parallel-size 2 --position-embedding-type rope --mtp-num-layers 1"
    with pytest.raises(NotYetError, match="multi-token prediction on a different stage than the loss. Put m and L"):
        step_of(line, "--pipeline-model-parallel-layout", "Et*10|t*20|m|L")
