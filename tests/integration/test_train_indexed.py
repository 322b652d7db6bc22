"""Training on Megatron's indexed datasets: from text to a resumed run, by the command line."""

from pathlib import Path

import numpy as np
import pytest

from indexed_files import write_dataset
from recollect.cli import main
from recollect.errors import DataError
from recollect.lab.train.config import DataFlags
from recollect.lab.train.corpus import load_corpus, parse_blend, parse_split
from recollect.lab.train.indexed_dataset import IndexedDataset
from training_runs import losses, run, write_text


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
    with pytest.raises(DataError, match=r"corpus: validation has \d+ tokens, expected at least 17 .* with --split"):
        load_corpus(flags(prefix, split="98,2"), seed=0, vocab_size=256)
    with pytest.raises(DataError, match=r"training has \d+ tokens, expected at least 5001 .* Lower --seq-length"):
        load_corpus(flags(prefix, seq_length=5000), seed=0, vocab_size=256)
    with pytest.raises(
        DataError, match=r"--split 0,1: leaves no document to train on, expected a first number above 0"
    ):
        load_corpus(flags(prefix, split="0,1"), seed=0, vocab_size=256)
    with pytest.raises(DataError, match=r"valid.* expected at least 17 .* give more data with --valid-data-path"):
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
    assert main(["tokenize", "--output-prefix", str(prefix)]) == 2
    assert "the files already exist, expected new ones. Remove them" in capsys.readouterr().err
