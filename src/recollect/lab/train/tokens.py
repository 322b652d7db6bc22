"""Tokenizers: one token per byte, or a `tokenizer.json`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from recollect.errors import DataError
from recollect.extras import needed

Tokens = NDArray[np.uint16] | NDArray[np.int32]

_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_ENCODE_AT_ONCE = 256  # documents per call of `tokenizers`: many for its threads, few for memory


class Tokenizer(Protocol):
    """Maps text to token ids, and ends each document with a separator if the vocabulary has one."""

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
        DataError: the file is missing or not a tokenizer.
        MissingPackageError: the library is not installed.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise DataError(f"tokenizer {path}: no such file, expected a tokenizer.json. Check --tokenizer.")
        with needed("tokenizers", by=f"tokenizer {path}"):
            from tokenizers import Tokenizer as Loaded
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
        rest = iter(texts)
        while some := list(itertools.islice(rest, _ENCODE_AT_ONCE)):
            for encoded in self._tokenizer.encode_batch(some, add_special_tokens=False):
                yield encoded.ids + self._separator


def open_tokenizer(path: Path | None, *, vocab_size: int | None = None) -> Tokenizer:
    """Return the tokenizer of a file, or the byte tokenizer.

    Args:
        path: a `tokenizer.json`; None: bytes.
        vocab_size: rows of the model's embedding, if already known.

    Raises:
        DataError: the tokenizer cannot be read, or has more ids than `vocab_size`.
    """
    tokenizer: Tokenizer = ByteTokenizer() if path is None else FileTokenizer(path)
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"tokenizer {tokenizer.name}: got {tokenizer.vocab_size} ids, but the model's vocab_size is {vocab_size}, "
            f"expected no more ids than that. Raise --vocab-size or remove it."
        )
    return tokenizer
