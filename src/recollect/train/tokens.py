"""Text to token ids, one stream for training and one held out for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from recollect.errors import DataError
from recollect.train.config import DataFlags
from recollect.train.documents import Document, read_documents

Tokens = NDArray[np.uint16] | NDArray[np.int32]

_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_ENCODE_AT_ONCE = 256  # documents handed to `tokenizers` together: its threads want many, memory wants few


class Tokenizer(Protocol):
    """Maps text to token ids; each document ends with a separator where the vocabulary has one."""

    name: str
    vocab_size: int

    def encode(self, texts: Iterable[str]) -> Iterator[list[int] | bytes]:
        """Yield the ids of each text."""


class ByteTokenizer:
    """One token per UTF-8 byte. The separator is byte 0, which text does not contain, so 256 ids are enough."""

    name = "bytes"
    vocab_size = 256

    def encode(self, texts: Iterable[str]) -> Iterator[bytes]:
        """Yield the bytes of each text, then 0."""
        for text in texts:
            yield text.encode() + b"\0"


class FileTokenizer:
    """A `tokenizer.json` of the `tokenizers` library.

    Args:
        path: the file.

    Raises:
        DataError: the file does not exist or is not a tokenizer, or the library is not installed.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise DataError(f"tokenizer {path}: no such file, expected a tokenizer.json. Check --tokenizer.")
        try:
            from tokenizers import Tokenizer as Loaded  # optional: only for those who bring a tokenizer
        except ImportError:
            raise DataError(f"tokenizer {path}: needs the package `tokenizers`. Run: pip install tokenizers") from None
        try:
            self._tokenizer: Any = Loaded.from_file(str(path))
        except Exception as problem:  # the library raises plain Exception
            raise DataError(
                f"tokenizer {path}: not readable ({problem}), expected a tokenizer.json of the tokenizers library. "
                f"Save it with `tokenizer.save(path)`."
            ) from None
        self.name = path.name
        self.vocab_size = int(self._tokenizer.get_vocab_size())
        found = (self._tokenizer.token_to_id(token) for token in _SEPARATORS)
        self._separator = next(([token] for token in found if token is not None), [])

    def encode(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Yield the ids of each text, then the separator if there is one."""
        waiting: list[str] = []
        for text in texts:
            waiting.append(text)
            if len(waiting) == _ENCODE_AT_ONCE:
                yield from self._encode_now(waiting)
                waiting = []
        yield from self._encode_now(waiting)

    def _encode_now(self, texts: list[str]) -> Iterator[list[int]]:
        for encoded in self._tokenizer.encode_batch(texts, add_special_tokens=False):
            yield encoded.ids + self._separator


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Token streams.

    Attributes:
        training: ids, one dimension, uint16 if they fit, else int32.
        validation: the same, held out; empty if validation is off.
        vocab_size: ids are below this.
        fingerprint: hash of both streams; equal fingerprints mean equal data.
    """

    training: Tokens
    validation: Tokens
    vocab_size: int
    fingerprint: str


def load_corpus(flags: DataFlags, *, vocab_size: int | None = None) -> Corpus:
    """Read, tokenize and split the data.

    A document is held out by a hash of its text, so copies of one text never land on both sides and the split is the
    same on every machine. If that leaves a side without documents, the end of the stream is held out instead.

    Args:
        flags: sources, tokenizer, sequence length, held-out fraction.
        vocab_size: rows of the model's embedding, if already decided.

    Returns:
        Both streams; each holds at least one sequence, except for validation if that is off.

    Raises:
        DataError: data missing, malformed, or shorter than one sequence; a tokenizer that cannot be read or has more
            ids than `vocab_size`.
    """
    tokenizer: Tokenizer = ByteTokenizer() if flags.tokenizer is None else FileTokenizer(flags.tokenizer)
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"tokenizer {tokenizer.name}: got {tokenizer.vocab_size} ids, but the model's vocab_size is {vocab_size}, "
            f"expected no more ids than that. Raise --vocab-size or leave it out."
        )
    documents = read_documents(flags.data, text_field=flags.text_field)
    held_out = [_hash_fraction(document) < flags.validation_fraction for document in documents]
    streams = [
        _encode(tokenizer, [d.text for d, is_held in zip(documents, held_out, strict=True) if is_held is side])
        for side in (False, True)
    ]
    training, validation = streams
    if flags.validation_fraction and not (training.size and validation.size):
        whole: Any = np.concatenate(streams)
        cut = round(whole.size * (1 - flags.validation_fraction))
        training, validation = whole[:cut], whole[cut:]
    _check_length("training", training, flags.seq_length, "Add data or lower --seq-length.")
    if flags.validation_fraction:
        advice = "Add data, lower --seq-length, or set --validation-fraction (0 turns validation off)."
        _check_length("validation", validation, flags.seq_length, advice)
    fingerprint = hashlib.sha256(training.tobytes() + b"|" + validation.tobytes()).hexdigest()[:16]
    return Corpus(training, validation, tokenizer.vocab_size, fingerprint)


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
