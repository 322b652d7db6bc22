"""Documents, tokens and batches: what is read, how it is split, and what is said when it cannot be."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recollect.errors import DataError
from recollect.lab.train.config import DataFlags
from recollect.lab.train.corpus import Corpus, load_corpus
from recollect.lab.train.documents import read_documents
from recollect.lab.train.windows import TokenWindows, Windows, batch_at


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_tokenizer(path: Path, *, words: int = 50) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "</s>": 1, **{f"w{number}": number + 2 for number in range(words)}}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def load(flags: DataFlags, *, vocab_size: int | None = None) -> Corpus:
    return load_corpus(flags, seed=0, vocab_size=vocab_size)


def tokens(windows: Windows | None) -> np.ndarray:
    assert isinstance(windows, TokenWindows)
    return np.asarray(windows.tokens)


def flags(*paths: Path, **changes: Any) -> DataFlags:
    return dataclasses.replace(DataFlags(data=paths, seq_length=8), **changes)


def test_folder_is_read_in_sorted_order_without_hidden_files(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "second")
    write(tmp_path / "a" / "z.md", "first")
    write(tmp_path / ".git" / "x.txt", "hidden")
    write(tmp_path / "empty.txt", "")
    assert read_documents((tmp_path,)) == ["first", "second"]


def test_binary_files_in_a_folder_are_left_out_with_a_warning(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "text")
    write(tmp_path / "b.png", b"\x89PNG\x00")
    with pytest.warns(UserWarning, match=r"skipped 1 files that are not UTF-8 text, first .*b\.png"):
        assert len(read_documents((tmp_path,))) == 1


def test_jsonl_lines_are_documents_and_may_hold_line_separators(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "one\u2028still one"}, ensure_ascii=False), "", json.dumps({"text": "two"})]
    path = write(tmp_path / "d.jsonl", "\n".join(lines))
    assert read_documents((path,)) == ["one\u2028still one", "two"]
    # With the mark that programs of Windows put before the first line.
    other = write(tmp_path / "e.jsonl", '\ufeff{"body": "three"}\n')
    assert read_documents((other,), text_field="body")[0] == "three"


def test_a_pipe_is_a_document() -> None:
    """As a shell's `--data <(zcat notes.gz)`."""
    reader, writer = os.pipe()
    os.write(writer, b"from a program")
    os.close(writer)
    assert read_documents((Path(f"/dev/fd/{reader}"),)) == ["from a program"]
    os.close(reader)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", '{"text": "a"}\n{"text": \n', r"d\.jsonl, line 2: got broken JSON .* expected one JSON object"),
        ("d.jsonl", '{"text": "a"}\n[1]\n', r"d\.jsonl, line 2: got a JSON list, expected an object"),
        ("d.jsonl", '{"body": "a"}\n', r"d\.jsonl, line 1: got no field 'text' among \['body'\]"),
        ("d.jsonl", '{"text": 3}\n', r"d\.jsonl, line 1: got a non-text field 'text'"),
        ("d.jsonl", '{"text": "cut \\ud83d"}\n', r"d\.jsonl, line 1: got half of a character .* after 4 characters"),
        ("d.txt", b"\xff\xfe\x00", r"d\.txt: got a binary file, expected UTF-8 text"),
        ("d.txt", "", r"d\.txt: got no text, expected at least one document. Check --data"),
        ("d.jsonl", "\n\n", r"d\.jsonl: got no text, expected at least one document"),
    ],
)
def test_unusable_files_are_named_with_the_line(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(DataError, match=message):
        read_documents((path,))


def test_missing_data_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: no such file or folder, expected a text file"):
        read_documents((tmp_path / "nowhere",))
    with pytest.raises(DataError, match="got no text, expected at least one document"):
        read_documents((tmp_path,))


def test_split_is_by_document_and_the_same_each_time(tmp_path: Path) -> None:
    texts = [f"document number {number} " * 3 for number in range(200)]
    path = write(tmp_path / "d.jsonl", "\n".join(json.dumps({"text": text}) for text in [*texts, *texts]))
    corpus = load(flags(path, validation_fraction=0.2))
    held_out = set(tokens(corpus.validation).astype(np.uint8).tobytes().decode().split("\0")) - {""}
    trained = set(tokens(corpus.training).astype(np.uint8).tobytes().decode().split("\0")) - {""}
    assert held_out | trained == set(texts)
    assert not held_out & trained  # though each text is there twice
    assert 20 <= len(held_out) <= 60  # 40 expected of 200; these bounds are 3.5 standard deviations
    assert corpus.fingerprint == load(flags(path, validation_fraction=0.2)).fingerprint
    assert corpus.fingerprint != load(flags(path, validation_fraction=0.3)).fingerprint


def test_single_document_holds_out_its_end(tmp_path: Path) -> None:
    path = write(tmp_path / "d.txt", "0123456789" * 100)
    corpus = load(flags(path, validation_fraction=0.1))
    assert (tokens(corpus.training).size, tokens(corpus.validation).size) == (901, 100)  # with the separator
    assert load(flags(path, validation_fraction=0.0)).validation is None


def test_tokenizer_file_is_used_with_its_separator(tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", '{"text": "w0 w1 w2"}\n{"text": "w3 nonsense"}\n')
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    corpus = load(flags(data, tokenizer=tokenizer, validation_fraction=0.0, seq_length=2))
    assert tokens(corpus.training).tolist() == [2, 3, 4, 1, 5, 0, 1]
    assert corpus.vocab_size == 52


def test_unusable_tokenizers(tmp_path: Path) -> None:
    data = write(tmp_path / "d.txt", "text " * 100)
    with pytest.raises(DataError, match=r"tokenizer .*none\.json: no such file, expected a tokenizer\.json"):
        load(flags(data, tokenizer=tmp_path / "none.json"))
    broken = write(tmp_path / "broken.json", "{}")
    with pytest.raises(DataError, match=r"tokenizer .*broken\.json: not readable .* expected a tokenizer\.json"):
        load(flags(data, tokenizer=broken))
    with pytest.raises(DataError, match=r"got 52 ids, but the model's vocab_size is 32, expected no more"):
        load(flags(data, tokenizer=write_tokenizer(tmp_path / "t.json")), vocab_size=32)
    with pytest.raises(DataError, match=r"tokenizer bytes: got 256 ids, but the model's vocab_size is 100"):
        load(flags(data), vocab_size=100)


def test_data_shorter_than_a_sequence(tmp_path: Path) -> None:
    path = write(tmp_path / "d.txt", "0123456789")
    with pytest.raises(DataError, match=r"training data: got 10 tokens, expected at least 65 .*--seq-length 64"):
        load(flags(path, seq_length=64))
    longer = write(tmp_path / "e.txt", "0123456789" * 20)
    with pytest.raises(
        DataError, match=r"validation data: got 10 tokens, expected at least 65 .*0 turns validation off"
    ):
        load(flags(longer, seq_length=64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_length": 0}, "seq_length: got 0, expected at least 1"),
        ({"validation_fraction": 0.9}, "validation_fraction: got 0.9, expected 0 to 0.5"),
    ],
)
def test_flags_out_of_range(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataFlags(**change)


def windows_of(seed: int | None = 0) -> TokenWindows:
    return TokenWindows(np.arange(101, dtype=np.uint16), seq_length=10, seed=seed)


def test_each_window_comes_once_an_epoch_in_an_order_of_its_own() -> None:
    windows = windows_of()
    epochs = [[int(batch_at(10 * epoch + index, windows, 1)[0][0, 0]) for index in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(0, 100, 10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_batch_is_a_function_of_seed_and_position_alone() -> None:
    forward, backward = windows_of(), windows_of()
    there = [batch_at(position, forward, 3) for position in range(12)]
    back = [batch_at(position, backward, 3) for position in reversed(range(12))]
    for (tokens, labels), (other_tokens, other_labels) in zip(there, reversed(back), strict=True):
        assert torch.equal(tokens, other_tokens)
        assert torch.equal(labels, other_labels)
    assert not torch.equal(batch_at(0, windows_of(seed=1), 3)[0], there[0][0])


def test_labels_are_the_next_tokens() -> None:
    tokens, labels = batch_at(0, windows_of(), 3)
    assert tokens.dtype == labels.dtype == torch.int64
    assert tokens.shape == labels.shape == (3, 10)
    assert torch.equal(labels, tokens + 1)
