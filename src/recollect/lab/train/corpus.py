"""Load training and validation data, from text or from Megatron's indexed datasets."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from recollect.errors import DataError
from recollect.lab.train.config import DataFlags
from recollect.lab.train.documents import Document, read_documents
from recollect.lab.train.indexed_corpus import load_indexed_windows
from recollect.lab.train.tokens import Tokenizer, Tokens, open_tokenizer
from recollect.lab.train.windows import TokenWindows, Windows

__all__ = ["Corpus", "load_corpus"]


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Windows for training and validation.

    Attributes:
        training: windows in random order.
        validation: held-out windows in their own order; None if validation is off.
        vocab_size: all ids are below this.
        fingerprint: hash of both; equal fingerprints mean equal data.
    """

    training: Windows
    validation: Windows | None
    vocab_size: int
    fingerprint: str


def load_corpus(flags: DataFlags, *, seed: int, vocab_size: int | None = None) -> Corpus:
    """Open the data: tokenize and split text, or memory-map Megatron's indexed datasets.

    Text documents are held out by their hash, so copies of a text never land on both sides and the split is the same on every
    machine. If that leaves one side empty, the end of the stream is held out instead.

    Args:
        flags: sources, tokenizer, sequence length, and what to hold out.
        seed: seed of the order of the training windows.
        vocab_size: rows of the model's embedding, if already known.

    Returns:
        Both sides, each with at least one window; no validation if it is off.

    Raises:
        DataError: data is missing, malformed, or shorter than one sequence; the tokenizer cannot be read or has more ids than
            `vocab_size`; or indexed data comes without tokenizer and `vocab_size`.
    """
    if flags.is_indexed:
        return _load_indexed(flags, seed, vocab_size)
    tokenizer = open_tokenizer(flags.tokenizer, vocab_size=vocab_size)
    training, validation = _split_text(tokenizer, flags)
    _check_length("training", training, flags.seq_length, "Add data or lower --seq-length.")
    if flags.validation_fraction:
        advice = "Add data, lower --seq-length, or set --validation-fraction (0 turns validation off)."
        _check_length("validation", validation, flags.seq_length, advice)
    return Corpus(
        training=TokenWindows(training, seq_length=flags.seq_length, seed=seed),
        validation=TokenWindows(validation, seq_length=flags.seq_length, seed=None) if validation.size else None,
        vocab_size=tokenizer.vocab_size,
        fingerprint=hashlib.sha256(training.tobytes() + b"|" + validation.tobytes()).hexdigest()[:16],
    )


def _load_indexed(flags: DataFlags, seed: int, vocab_size: int | None) -> Corpus:
    if flags.tokenizer is not None:
        tokenizer = open_tokenizer(flags.tokenizer, vocab_size=vocab_size)
        vocab_size = vocab_size or tokenizer.vocab_size
    if vocab_size is None:
        raise DataError(
            "indexed dataset: got neither --vocab-size nor --tokenizer, expected one of them, because the files do not store "
            "the size of the vocabulary. Give --vocab-size N or the tokenizer that made them."
        )
    windows = load_indexed_windows(flags, seed=seed, vocab_size=vocab_size)
    return Corpus(windows.training, windows.validation, vocab_size, windows.fingerprint)


def _split_text(tokenizer: Tokenizer, flags: DataFlags) -> tuple[Tokens, Tokens]:
    documents = read_documents(flags.data, text_field=flags.text_field)
    held_out = [_hash_fraction(document) < flags.validation_fraction for document in documents]
    training, validation = (
        _encode(tokenizer, [d.text for d, is_held in zip(documents, held_out, strict=True) if is_held is side])
        for side in (False, True)
    )
    if flags.validation_fraction and not (training.size and validation.size):
        whole: Any = np.concatenate([training, validation])
        cut = round(whole.size * (1 - flags.validation_fraction))
        training, validation = whole[:cut], whole[cut:]
    return training, validation


def _hash_fraction(document: Document) -> float:
    return int.from_bytes(hashlib.sha256(document.text.encode()).digest()[:8], "big") / 2.0**64


def _encode(tokenizer: Tokenizer, texts: list[str]) -> Tokens:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32)
    parts = [
        (np.frombuffer(ids, np.uint8) if isinstance(ids, bytes) else np.array(ids)).astype(dtype)
        for ids in tokenizer.encode(texts)
    ]
    return np.concatenate([np.zeros(0, dtype), *parts])


def _check_length(side: str, tokens: Tokens, seq_length: int, advice: str) -> None:
    if tokens.size < seq_length + 1:
        raise DataError(
            f"{side} data: got {tokens.size} tokens, expected at least {seq_length + 1} (one sequence of --seq-length "
            f"{seq_length} and the token after it). {advice}"
        )
