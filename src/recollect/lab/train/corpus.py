"""Load training and validation data, from text or from Megatron's indexed datasets."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from recollect.errors import DataError
from recollect.lab.train.config import DataFlags
from recollect.lab.train.documents import Tokenizer, Tokens, open_tokenizer, read_documents
from recollect.lab.train.indexed_dataset import IndexedDataset, content_samples
from recollect.lab.train.windows import BlendedWindows, PackedDocuments, TokenWindows, Windows

_Side: TypeAlias = tuple[list[tuple[Path, float | None]], float, float]


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Windows for training and validation."""

    training: Windows
    validation: Windows | None
    """Held-out windows in their own order; None if validation is off."""
    vocab_size: int
    """All ids are below this."""
    fingerprint: str
    """Hash of both; for indexed datasets, of indices, proportions and samples of the token ids; equal fingerprints mean
    equal data."""


def load_corpus(flags: DataFlags, *, seed: int, vocab_size: int | None = None) -> Corpus:
    """Open the data: tokenize and split text, or memory-map Megatron's indexed datasets.

    Text documents are held out by their hash, so copies of a text never land on both sides and the split is the same on every
    machine. If that leaves one side empty, the end of the stream is held out instead. Each side has at least one window.
    """
    if flags.data_path or flags.train_data_path:
        return _load_indexed(flags, seed, vocab_size)
    tokenizer = open_tokenizer(flags.tokenizer, vocab_size=vocab_size)
    training, validation = _split_text(tokenizer, flags)
    _check_length("training data", training.size, flags.seq_length, "Add data or lower --seq-length.")
    if flags.validation_fraction:
        advice = "Add data, lower --seq-length, or set --validation-fraction (0 turns validation off)."
        _check_length("validation data", validation.size, flags.seq_length, advice)
    return Corpus(
        training=TokenWindows(training, seq_length=flags.seq_length, seed=seed),
        validation=TokenWindows(validation, seq_length=flags.seq_length, seed=None) if validation.size else None,
        vocab_size=tokenizer.vocab_size,
        fingerprint=hashlib.sha256(training.tobytes() + b"|" + validation.tobytes()).hexdigest()[:16],
    )


def _split_text(tokenizer: Tokenizer, flags: DataFlags) -> tuple[Tokens, Tokens]:
    texts = read_documents(flags.data, text_field=flags.text_field)
    held_out = [_hash_fraction(text) < flags.validation_fraction for text in texts]
    training, validation = (
        _encode(tokenizer, [text for text, is_held in zip(texts, held_out, strict=True) if is_held is side])
        for side in (False, True)
    )
    if flags.validation_fraction and not (training.size and validation.size):
        whole: Any = np.concatenate([training, validation])
        cut = round(whole.size * (1 - flags.validation_fraction))
        training, validation = whole[:cut], whole[cut:]
    return training, validation


def _hash_fraction(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2.0**64


def _encode(tokenizer: Tokenizer, texts: list[str]) -> Tokens:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32)
    parts = [
        (np.frombuffer(ids, np.uint8) if isinstance(ids, bytes) else np.array(ids)).astype(dtype)
        for ids in tokenizer.encode(texts)
    ]
    return np.concatenate([np.zeros(0, dtype), *parts])


def _check_length(data: str, num_tokens: int, seq_length: int, advice: str) -> None:
    if num_tokens < seq_length + 1:
        raise DataError(
            f"{data}: got {num_tokens} tokens, expected at least {seq_length + 1} (one sequence of --seq-length "
            f"{seq_length} and the token after it). {advice}"
        )


def _load_indexed(flags: DataFlags, seed: int, vocab_size: int | None) -> Corpus:
    if flags.tokenizer is not None:
        tokenizer = open_tokenizer(flags.tokenizer, vocab_size=vocab_size)
        vocab_size = vocab_size or tokenizer.vocab_size
    proportions = _sides(flags)
    digest = hashlib.sha256(repr([([weight for _, weight in blend], *share) for blend, *share in proportions]).encode())
    datasets: dict[Path, IndexedDataset] = {}
    for prefix in (prefix for blend, *_ in proportions for prefix, _ in blend):
        if prefix not in datasets:
            datasets[prefix] = IndexedDataset(prefix)
            for block in content_samples(datasets[prefix]):
                digest.update(block)
    if vocab_size is None:
        raise DataError(
            "indexed dataset: got neither --vocab-size nor --tokenizer, expected one of them, because the files do not store "
            "the size of the vocabulary. Give --vocab-size N or the tokenizer that made them."
        )
    sides: list[Windows | None] = []
    for side, (blend, begin, end) in enumerate(proportions):
        name, where = (("training", "--train-data-path"), ("validation", "--valid-data-path"))[side]
        if flags.data_path:
            where = "--split (a second number of 0 turns validation off)"
        sources: list[PackedDocuments] = []
        weights: list[float] = []
        for prefix, weight in blend:
            dataset = datasets[prefix]
            source = PackedDocuments(
                dataset,
                (round(begin * len(dataset)), round(end * len(dataset))),
                seq_length=flags.seq_length,
                seed=None if side else seed,
                vocab_size=vocab_size,
            )
            advice = f"Lower --seq-length, or give {name} more documents with {where}."
            _check_length(f"indexed dataset {prefix}, {name}", source.num_tokens, flags.seq_length, advice)
            sources.append(source)
            weights.append(source.num_windows if weight is None else weight)
        sides.append(BlendedWindows(sources, weights) if len(sources) > 1 else next(iter(sources), None))
    training, validation = sides
    if training is None:
        raise DataError(f"--split {flags.split}: leaves no document to train on, expected a first number above 0.")
    return Corpus(training, validation, vocab_size, digest.hexdigest()[:16])


def parse_blend(words: Sequence[str], flag: str) -> list[tuple[Path, float | None]]:
    """Parse prefixes, or alternating weights and prefixes; without weights, None for each: in proportion to its windows.

    Example:
        >>> parse_blend(["0.3", "a", "0.7", "b"], "--data-path")
        [(PosixPath('a'), 0.3), (PosixPath('b'), 0.7)]
        >>> parse_blend(["a", "b"], "--data-path")
        [(PosixPath('a'), None), (PosixPath('b'), None)]
    """
    numbers = [_number(word) for word in words]
    if all(number is None for number in numbers):
        return [(Path(word), None) for word in words]
    weights, prefixes = numbers[::2], words[1::2]
    is_pairs = len(weights) == len(prefixes) and all(number is None for number in numbers[1::2])
    if not is_pairs or any(weight is None or weight <= 0 for weight in weights):
        raise DataError(
            f"{flag}: got {' '.join(words)}, expected prefixes, or a weight above 0 before each prefix, as in 0.3 a 0.7 b."
        )
    return [(Path(prefix), weight) for prefix, weight in zip(prefixes, weights, strict=True)]


def parse_split(text: str) -> tuple[float, float, float]:
    """Parse "969,30,1" into fractions for training, validation and test."""
    numbers = [_number(part) for part in text.split(",")]
    if len(numbers) > 3 or any(number is None or number < 0 for number in numbers) or not any(numbers):
        raise DataError(
            f"--split {text}: expected one to three numbers of at least 0, for training, validation and test, such as 969,30,1."
        )
    given = [number or 0.0 for number in [*numbers, 0.0, 0.0][:3]]
    training, validation, test = (number / sum(given) for number in given)
    return training, validation, test


def _sides(flags: DataFlags) -> list[_Side]:
    """Return the data of training and validation: sources, and the range of each source's order."""
    if not flags.data_path:
        whole = ((flags.train_data_path, "--train-data-path"), (flags.valid_data_path, "--valid-data-path"))
        return [(parse_blend(words, flag), 0.0, 1.0) for words, flag in whole]
    blend, shares = parse_blend(flags.data_path, "--data-path"), parse_split(flags.split)
    return [(blend if shares[side] else [], sum(shares[:side]), sum(shares[: side + 1])) for side in (0, 1)]


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
