"""Flags of Megatron that recollect has no setting for: taken off where they change nothing, refused where they would."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import tyro

from flag_table import foreign_table
from recollect.cli import main
from recollect.cli.commands import Train
from recollect.cli.entry import parse_train
from recollect.errors import ConfigError, NotYetError
from recollect.integrations.megatron.arguments import FOREIGN_FLAGS, describes_model, read_arguments
from recollect.lab.train.config import TrainConfig


def test_flags_without_effect_are_taken_off_with_their_values() -> None:
    line = (
        "--num-layers 2 --overlap-grad-reduce --distributed_backend nccl --profile-ranks 0 1 --swiglu --num-workers=2"
    )
    arguments = read_arguments(line.split())
    assert arguments.rest == ["--num-layers", "2", "--swiglu"]
    assert list(arguments.without_effect) == [
        "--overlap-grad-reduce",
        "--distributed-backend",
        "--profile-ranks",
        "--num-workers",
    ]


def test_words_that_are_no_value_of_theirs_stay() -> None:
    assert read_arguments(["-h"]).rest == ["-h"]
    # tyro then says that it does not know them
    assert read_arguments(["--overlap-grad-reduce", "stray"]).rest == ["stray"]


def test_what_is_none_decides_nothing() -> None:
    line = "--memory-budget 1GiB --recompute-granularity None --global-batch-size=None --accumulation 2".split()
    assert read_arguments(line).rest == line


def test_foreign_flags_are_allowed_or_refused_with_advice() -> None:
    for name, flag in FOREIGN_FLAGS.items():
        allowed = flag.allowed[0] if flag.allowed else "some"
        values = [] if flag.arity == 0 else [allowed]
        if not flag.needs or flag.allowed:
            assert flag.why, name
            assert read_arguments([name, *values, "--lr", "1"]).rest == ["--lr", "1"]
        if flag.needs:
            refused = [] if flag.arity == 0 else ["unheard-of"]
            with pytest.raises(NotYetError, match=re.escape(flag.advice)) as found:
                read_arguments([name, *refused])
            said = "(no value)" if flag.arity == 0 else "unheard-of"
            assert str(found.value) == f"got {name}={said}: not yet: {flag.needs}. {flag.advice}"


@pytest.fixture
def own(capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Names of recollect's own flags, as help prints them."""
    with pytest.raises(SystemExit):
        tyro.cli(Train, args=["--help"])
    return set(re.findall(r"--[a-z][\w-]+", capsys.readouterr().out))


def test_no_foreign_flag_hides_a_setting(own: set[str]) -> None:
    assert not own & set(FOREIGN_FLAGS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--global-batch-size 8 --accumulation 2",
            r"got --global-batch-size=8, --accumulation=2: both decide the same thing",
        ),
        (
            "--min-lr=0 --min-lr-fraction 0",
            r"got --min-lr=0, --min-lr-fraction=0: both decide the same thing, expected one",
        ),
        ("--bf16 --precision fp32", r"got --bf16=\(no value\), --precision=fp32: both decide"),
        (
            "--memory-budget 1GiB --recompute-activations",
            r"got --memory-budget=1GiB, --recompute-activations=\(no value\): both",
        ),
        ("--memory-budget 60% --recompute_granularity full", r"--recompute-granularity=full: both .* Leave one out"),
        ("--eval-iters 3 --validation-batches 3", r"got --eval-iters=3, --validation-batches=3: both decide"),
        (
            "--recompute-activations full",
            r"got --recompute-activations=full: this flag has no value.*granularity full instead",
        ),
        ("--dataloader-type", r"got --dataloader-type=\(no value\): this flag needs a value"),
    ],
)
def test_flags_that_exclude_each_other_or_lack_a_value(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_arguments(line.split())


def test_refusals_are_one_line_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--optimizer", "sgd"]) == 2
    error = capsys.readouterr().err
    assert error == "Error: --optimizer sgd: not yet: other optimizers than AdamW. Leave it out.\n"


def test_megatrons_defaults_apply_where_a_line_describes_the_model() -> None:
    assert not describes_model(shlex.split("--size 7b --num-layers 2 --hidden-size 64"))
    assert not describes_model(["--hidden-size", "64"])
    described = parse_train(shlex.split("--num-layers 2 --hidden-size 64")).config
    assert (described.optim.beta2, described.optim.weight_decay, described.optim.lr_decay_style) == (
        0.999,
        0.01,
        "linear",
    )
    assert (described.optim.warmup_steps, described.optim.min_lr_fraction, described.step.seed) == (0, 0.0, 1234)
    assert parse_train(["--num-layers", "2"]).config.optim == TrainConfig().optim


def test_names_of_one_setting() -> None:
    megatron = """--train-iters 7 --micro-batch-size 2 --global-batch-size 6 --lr 2e-3 --min-lr 2e-4 --lr-warmup-iters 3
        --adam-beta1 0.8 --adam-beta2 0.99 --clip-grad 0.5 --bf16 --save here --save-interval 4 --eval-interval 5
        --ffn-hidden-size 96 --num-attention-heads 8 --num-query-groups 4"""
    ours = """--steps 7 --batch-size 2 --accumulation 3 --learning-rate 2e-3 --min-lr-fraction 0.1 --warmup-steps 3
        --beta1 0.8 --beta2 0.99 --clip-norm 0.5 --precision bf16 --run-dir here --checkpoint-every 4 --validate-every 5
        --intermediate-size 96 --num-heads 8 --num-kv-heads 4"""
    first, second = parse_train(megatron.split()).config, parse_train(ours.split()).config
    assert dataclasses.asdict(first) == dataclasses.asdict(second)
    assert first.identity() == second.identity()
    assert first.optim.accumulation == 3
    assert first.run.run_dir == Path("here")


def test_the_flags_of_megatrons_own_examples_are_known(own: set[str]) -> None:
    """Those of its examples for GPT-3, Mixtral and Llama 3, which are more than the guides have."""
    names = """attention-backend rampup-batch-size weight-decay adam-beta1 init-method-std fp16 lr-decay-style
        lr-warmup-fraction lr-decay-iters tensor-model-parallel-size vocab-file merge-file split log-interval eval-iters
        tensorboard-dir use-mcore-models disable-bias-linear normalization position-embedding-type
        untie-embeddings-and-output-weights no-masked-softmax-fusion no-position-embedding rotary-base
        moe-router-load-balancing-type moe-aux-loss-coeff moe-grouped-gemm moe-token-dispatcher-type overlap-param-gather
        tokenizer-type tokenizer-model mock-data expert-model-parallel-size no-load-optim no-load-rng wandb-project
        kv-channels rotary-percent apply-layernorm-1p train-samples lr-decay-samples lr-warmup-samples decoupled-lr
        grad-reduce-in-bf16 cross-entropy-loss-fusion calculate-per-token-loss manual-gc empty-unused-memory-level
        exit-duration-in-mins fp8-param-gather data-cache-path tiktoken-pattern no-create-attention-mask-in-dataloader
        no-mmap-bin-files num-workers log-throughput ckpt-format distributed-timeout-minutes"""
    assert [name for name in names.split() if f"--{name}" not in own | set(FOREIGN_FLAGS)] == []


def test_the_docs_have_each_flag(own: set[str]) -> None:
    page = (Path(__file__).parents[4] / "docs" / "megatron_flags.md").read_text()
    assert page.endswith(f"\n\n{foreign_table()}\n"), (
        "PYTHONPATH=src:tests/support python -m flag_table prints the table"
    )
    named = set(re.findall(r"--[a-z][\w-]+[a-z0-9]", page))
    assert named - set(FOREIGN_FLAGS) - own == {"--recompute"}  # the page's --recompute-*
