"""Flags of Megatron that recollect has no setting for: taken off where they change nothing, refused where they would."""

import dataclasses
import fnmatch
import re
import shlex
from pathlib import Path

import pytest
import tyro

from flag_table import foreign_table
from recollect.cli import main
from recollect.cli.commands import MakePlan, Train
from recollect.cli.entry import parse_train
from recollect.cli.parsing import flags_of
from recollect.errors import ConfigError, NotYetError
from recollect.integrations.megatron.arguments import FOREIGN_FLAGS, describes_model, foreign_flag, read_arguments
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


def test_short_flags_of_bridge() -> None:
    """As `_set_recompute_overrides` of its scripts/performance/utils/overrides.py at 067f987d."""
    long = (
        "--recompute-granularity=full --recompute-method=block --recompute-num-layers 2 --cpu-offloading-num-layers 1"
    )
    assert read_arguments("-rl 2 --activation_offload_layers 1".split()).rest == long.split()


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


@pytest.mark.parametrize("kind", [Train, MakePlan])
def test_each_flag_of_pretrain_gpt_is_known(kind: type) -> None:
    """It has a setting in the command, no effect and a reason, or an error that says what it needs; each pattern is used."""
    own, flags = set(flags_of(kind).values()), _pretrain_gpt_flags()
    assert len(flags) == 874
    # recollect plan takes them for its --dtype
    beside = {"--bf16"} | (set(flags_of(Train).values()) - own)
    unknown = [flag for flag in flags if flag not in own | beside and foreign_flag(flag) is None]
    assert unknown == []
    idle = [name for name in FOREIGN_FLAGS if "*" in name and not fnmatch.filter(flags, name)]
    assert idle == ["--rdzv-*"]  # torchrun's


def _pretrain_gpt_flags() -> set[str]:
    """Flags of the parser that `add_megatron_arguments` builds in Megatron-LM at d98e8a64."""
    text = (Path(__file__).parents[3] / "support" / "pretrain_gpt_flags.txt").read_text()
    return set(re.findall(r"--\S+", text))


def test_what_a_run_needs_and_a_plan_does_not() -> None:
    line = "--lr-wsd-decay-iters 7 --lr 1e-4 --fp16 --num-layers 2 --apply-layernorm-1p".split()
    found = read_arguments(line, own={"--num-layers", "--dtype"}, beside={"--lr"}, plans=True)
    assert found.rest == ["--dtype", "bf16", "--num-layers", "2"]
    assert list(found.without_effect) == ["--lr-wsd-decay-iters", "--lr", "--apply-layernorm-1p"]
    with pytest.raises(NotYetError, match=r"got --window-size=128 0: not yet: this part of a model or of its training"):
        read_arguments(["--window-size", "128", "0"], plans=True)


def test_the_docs_have_each_flag(own: set[str]) -> None:
    page = (Path(__file__).parents[4] / "docs" / "megatron_flags.md").read_text()
    assert page.endswith(f"\n\n{foreign_table()}\n"), (
        "PYTHONPATH=src:tests/support python -m flag_table prints the table"
    )
    named = set(re.findall(r"--[a-z][\w-]+[a-z0-9](?![\w*-])", page))
    assert named - set(FOREIGN_FLAGS) - own - set(flags_of(MakePlan).values()) == set()
