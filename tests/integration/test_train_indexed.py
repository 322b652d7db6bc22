"""Training on Megatron's indexed datasets and by its command lines, from text to a resumed run, with and without recompute."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from command_lines import DOCUMENTED
from indexed_files import write_dataset
from recollect.cli import main
from recollect.errors import DataError
from recollect.lab.train.config import DataFlags
from recollect.lab.train.corpus import load_corpus, parse_blend, parse_split
from recollect.lab.train.files import remove
from recollect.lab.train.indexed_dataset import IndexedDataset
from tiers import long_but
from training_runs import losses, run, start, write_text


def test_from_text_to_a_run(tmp_path: Path) -> None:
    text, prefix, run_dir = write_text(tmp_path), tmp_path / "corpus", tmp_path / "run"
    assert main(["tokenize", "--data", str(text), "--output-prefix", str(prefix)]) == 0
    dataset = IndexedDataset(prefix)
    assert bytes(dataset[0].astype(np.uint8)) == text.read_bytes() + b"\0"
    flags = ["--size", "tiny", "--seq-length", "32", "--batch-size", "2", "--device", "cpu", "--vocab-size", "256"]
    args = ["train", "--data-path", str(prefix), "--split", "1", *flags, "--run-dir", str(run_dir)]
    assert main([*args, "--steps", "30", "--learning-rate", "3e-3"]) == 0
    found = losses(run_dir)
    assert found[30] < found[1] - 1  # nats; it starts near log(256) = 5.5


def test_another_split_or_other_data_is_another_run(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path)
    changes = {"data": (), "steps": 2, "vocab_size": 256, "data_path": (str(prefix),), "split": "80,20"}
    run(tmp_path, **changes)
    with pytest.raises(Exception, match=r"was written with data\.split = '80,20', this run has '70,30'"):
        run(tmp_path, **{**changes, "split": "70,30"}, resume=True)
    other = write_dataset(tmp_path, "other", seed=5)
    with pytest.raises(Exception, match=r"was written with data\.fingerprint"):
        run(tmp_path, **{**changes, "data_path": (str(other),)}, resume=True)


def flags(*data_path: object, split: str = "80,20", **changes: object) -> DataFlags:
    values = {"data_path": tuple(map(str, data_path)), "split": split, "seq_length": 16, **changes}
    return DataFlags(**values)  # type: ignore[arg-type]


def test_the_split_is_of_documents_in_their_order(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path)
    dataset = IndexedDataset(prefix)
    corpus = load_corpus(flags(prefix, split="60,30,10"), seed=0, vocab_size=256)
    assert corpus.training.num_tokens == dataset.lengths[:120].sum()
    assert corpus.validation.num_tokens == dataset.lengths[120:180].sum()
    held_out = np.concatenate([dataset[number] for number in range(120, 180)])
    assert np.array_equal(corpus.validation.window(1), held_out[16:33])
    assert load_corpus(flags(prefix, split="1,0,0"), seed=0, vocab_size=256).validation is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["0.3", "a", "b"], r"--data-path: got 0\.3 a b, expected prefixes, or a weight above 0 before each prefix"),
        (["0.3", "a", "0", "b"], "expected prefixes, or a weight above 0"),
        (["nan", "a", "1", "b"], "expected prefixes, or a weight above 0"),
        (["1", "2"], "expected prefixes, or a weight above 0"),
    ],
)
def test_blends_that_cannot_be_read(words: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_blend(words, "--data-path")


@pytest.mark.parametrize("text", ["", "1,2,3,4", "-1,2", "0,0,0", "a,b", "inf,1"])
def test_splits_that_cannot_be_read(text: str) -> None:
    with pytest.raises(DataError, match=r"expected one to three numbers of at least 0, for training, validation and"):
        parse_split(text)


def test_data_that_do_not_suffice(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path, count=20)
    with pytest.raises(DataError, match=r"got neither --vocab-size nor --tokenizer, expected one of them"):
        load_corpus(flags(prefix), seed=0)
    with pytest.raises(DataError, match=r"indexed dataset .*nowhere: no file .*nowhere\.idx, expected a pair"):
        load_corpus(flags(tmp_path / "nowhere"), seed=0)
    with pytest.raises(DataError, match=r"corpus, validation: got \d+ tokens, expected at least 17 .* with --split"):
        load_corpus(flags(prefix, split="98,2"), seed=0, vocab_size=256)
    with pytest.raises(DataError, match=r"training: got \d+ tokens, expected at least 5001 .* Lower --seq-length"):
        load_corpus(flags(prefix, seq_length=5000), seed=0, vocab_size=256)
    with pytest.raises(
        DataError, match=r"--split 0,1: leaves no document to train on, expected a first number above 0"
    ):
        load_corpus(flags(prefix, split="0,1"), seed=0, vocab_size=256)
    with pytest.raises(DataError, match=r"valid.* expected at least 17 .* more documents with --valid-data-path"):
        tiny = write_dataset(tmp_path, "tiny", count=1)
        data = flags(train_data_path=(str(prefix),), valid_data_path=(str(tiny),))
        load_corpus(data, seed=0, vocab_size=256)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": (Path("x"),), "data_path": ("a",)}, "data_path: given with --data, expected one of them"),
        ({"train_data_path": ("a",), "data_path": ("a",)}, "train_data_path: given with --data-path, expected one"),
        ({"valid_data_path": ("a",)}, "valid_data_path: given without train_data_path, expected both"),
    ],
)
def test_sources_that_clash(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataFlags(**changes)  # type: ignore[arg-type]


def test_written_files_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_dataset(tmp_path)
    weights = tmp_path / "model.bin"
    weights.write_bytes(b"of a model")
    for path in (prefix, weights.with_suffix("")):
        assert main(["tokenize", "--output-prefix", str(path)]) == 2
        assert "the files already exist, expected new ones. Remove them" in capsys.readouterr().err
    assert weights.read_bytes() == b"of a model"


# Sizes that fit here, in place of a guide's.
SMALL = {
    "--num-layers": "2",
    "--hidden-size": "64",
    "--seq-length": "32",
    "--micro-batch-size": "2",
    "--num-experts": "4",
}
# Taken out of a guide's line, because it is not there yet (tests/unit/cli/test_recompute_flags.py has the refusal).
NOT_YET = ("--context-parallel-size",)
# What stands for the three dots.
REST = {"mla_up_proj": ["--multi-latent-attention", "--position-embedding-type", "rope"]}
GPT = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --device cpu"
MODELS = {
    "gpt": GPT,
    "llama": f"{GPT} --group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm"
    " --position-embedding-type rope --disable-bias-linear"
    " --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0",
    "experts": f"{GPT} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm",
    "latent": "--size deepseek-v3-tiny --seq-length 32 --micro-batch-size 2 --device cpu",
}
OFFLOAD = "--fine-grained-activation-offloading --min-offloaded-tensor-size 1000 --offload-modules"
RECOMPUTE = {
    "gpt": [
        "--recompute-activations",
        "--recompute-granularity selective --recompute-modules core_attn mlp layernorm",
        f"{OFFLOAD} core_attn attn_proj mlp_norm --recompute-granularity selective --recompute-modules layernorm",
    ],
    "llama": [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    ],
    "experts": [
        "--recompute-granularity selective --recompute-modules core_attn moe_act",
        "--moe-layer-recompute",
        f"{OFFLOAD} expert_fc1 moe_act --activation-offload-fraction 0.5",
    ],
    "latent": ["--recompute-granularity selective --recompute-modules core_attn mla_up_proj moe_act shared_experts"],
}


def small(command: str) -> list[str]:
    """The line with sizes that fit, and without what is not there yet."""
    words = shlex.split(command)
    found: list[str] = []
    for number, word in enumerate(words):
        before = words[number - 1] if number else ""
        if word not in NOT_YET and before not in NOT_YET:
            found.append(SMALL.get(before, word))
    return found + [word for part, rest in REST.items() if part in command for word in rest]


@pytest.mark.parametrize("command", [line for line in DOCUMENTED if "--num-layers" in line])
def test_each_whole_line_of_the_guides_trains(command: str, tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path)
    flags = f"--data-path {prefix} --vocab-size 256 --device cpu --eval-iters 0 --train-iters 2".split()
    assert main(["train", *small(command), *flags, "--save", str(tmp_path / "run")]) == 0
    assert len(losses(tmp_path / "run")) == 2
    assert (tmp_path / "run" / "plan.json").exists() == ("--recompute" in command)


@pytest.mark.filterwarnings("ignore:.*moe_layer_recompute")  # deprecated, and meant here
@pytest.mark.parametrize("model", long_but(["llama"], MODELS))
def test_recompute_changes_no_loss(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_dataset(tmp_path)
    flags = ["--data-path", str(prefix), "--vocab-size", "256", "--train-iters", "4", "--global-batch-size", "4"]
    flags += ["--lr", "3e-3", "--eval-iters", "1", "--eval-interval", "2", "--split", "90,10"]
    found = {}
    for number, recompute in enumerate(["", *RECOMPUTE[model]]):
        run_dir = tmp_path / str(number)
        line = ["train", *MODELS[model].split(), *flags, *recompute.split(), "--save", str(run_dir)]
        assert main(line) == 0, capsys.readouterr().err
        records = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
        found[recompute] = [(record["loss"], record["grad_norm"], record.get("validation_loss")) for record in records]
        assert ("predicted slowdown" in capsys.readouterr().out) == bool(recompute)
    plain = found.pop("")
    assert len({loss for loss, _, _ in plain}) == 4  # something is learned from dropout's random numbers and data
    assert all(other == plain for other in found.values())


def test_a_megatron_command_line_as_a_process_stopped_and_resumed(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path)
    line = (
        f"{GPT} --vocab-size 256 --data-path {prefix} --recompute-activations --train-iters 6 --global-batch-size 4 --lr 1e-3 "
        "--min-lr 1e-4 --lr-decay-style cosine --eval-iters 0 --log-interval 1 --tensor-model-parallel-size 1 "
        "--save-interval 3 --use-distributed-optimizer --overlap-grad-reduce --bf16"
    ).split()
    process = start("train", *line, "--save", tmp_path / "whole", "--load", tmp_path / "whole")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "Warning: without effect here: --overlap-grad-reduce (PyTorch decides" in errors
    assert "Warning: --use-distributed-optimizer: no effect" in errors
    assert [f"step {step}/6" in output for step in range(1, 7)] == [True] * 6
    assert "Megatron: selective, core_attn" in output

    other = tmp_path / "other"
    process = start("train", *line, "--save", other, "--load", other)
    process.communicate()
    remove(other / "checkpoints" / "step_00000006")
    process = start("train", *line, "--save", other, "--load", other)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "resuming after step 3" in output
    assert losses(other) == losses(tmp_path / "whole")


def test_load_and_save_are_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--save", str(tmp_path / "a"), "--load", str(tmp_path / "b")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"Error: --load: got {tmp_path / 'b'} with")
    assert "expected the same folder: a run resumes where its plan, metrics and checkpoints are." in error
