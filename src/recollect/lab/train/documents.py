"""Read documents to train on, always in the same order, and turn them into tokens.

Documents are text, JSONL, folders, or the standard library's source; a tokenizer turns each byte into a token, or comes from a
`tokenizer.json`.
"""

import itertools
import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recollect.errors import DataError
from recollect.extras import needed
from recollect.warning import warn_user

Tokens = NDArray[np.uint16] | NDArray[np.int32]

_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_ENCODE_AT_ONCE = 256  # documents per call of `tokenizers`: many for its threads, few for memory
# Installed packages differ between machines; tests and their fixtures are poor training data.
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
)


def read_documents(paths: tuple[Path, ...] = (), *, text_field: str = "text") -> list[str]:
    """Return the texts of all documents, at least one, none empty; folders in sorted order.

    They are text files, `.jsonl` files (one document per line) or folders; none: the standard library's source. In folders,
    hidden files are skipped, and files that are not UTF-8 text are skipped with a warning.
    """
    if not paths:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = (p for p in sorted(root.rglob("*.py")) if not _NOT_LIBRARY.intersection(p.relative_to(root).parts))
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in found)
        return [text for text in texts if text]
    documents: list[str] = []
    for path in paths:
        if not path.exists():
            raise DataError(
                f"training data {path}: no such file or folder, expected a text file, a .jsonl file or a folder. Check --data."
            )
        documents += _read_folder(path, text_field) if path.is_dir() else _read_file(path, text_field)
    if not documents:
        names = ", ".join(str(path) for path in paths)
        raise DataError(f"training data {names}: got no text, expected at least one document. Check --data.")
    return documents


def _read_folder(folder: Path, text_field: str) -> Iterator[str]:
    skipped: list[Path] = []
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if is_hidden or not path.is_file():
            continue
        if path.suffix != ".jsonl" and not _is_text(path.read_bytes()):
            skipped.append(path)
            continue
        yield from _read_file(path, text_field)
    if skipped:
        warn_user(
            f"training data {folder}: skipped {len(skipped)} files that are not UTF-8 text, first {skipped[0]}.",
        )


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def _read_file(path: Path, text_field: str) -> Iterator[str]:
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise DataError(f"training data {path}: cannot be read ({problem.strerror}). Check --data.") from None
    if not _is_text(data):
        raise DataError(
            f"training data {path}: got a binary file, expected UTF-8 text. Convert it or remove it from --data."
        )
    if path.suffix == ".jsonl":
        yield from _read_jsonl(path, data.decode("utf-8-sig"), text_field)
    elif data:
        yield data.decode()


def _read_jsonl(path: Path, content: str, text_field: str) -> Iterator[str]:
    # split("\n"), not splitlines(), which also breaks at U+2028 and others that JSON strings may contain.
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as problem:
            raise DataError(
                f"{where}: got broken JSON ({problem.msg} at column {problem.colno}), expected one JSON object. "
                f"Repair or remove the line."
            ) from None
        if not isinstance(record, dict):
            raise DataError(
                f"{where}: got a JSON {type(record).__name__}, expected an object. Repair or remove the line."
            )
        text = record.get(text_field)
        if not isinstance(text, str):
            raise DataError(
                f"{where}: got {'no' if text is None else 'a non-text'} field {text_field!r} among "
                f"{sorted(record)[:8]}, expected text in it. Name the field with --text-field."
            )
        try:
            text.encode()
        except UnicodeEncodeError as problem:  # an escape such as \ud83d alone, where a text was cut
            raise DataError(
                f"{where}: got half of a character (a lone surrogate) after {problem.start} characters of {text_field!r}, "
                "expected whole ones. Repair or remove the line."
            ) from None
        if text:
            yield text


class ByteTokenizer:
    """One token per UTF-8 byte. The separator is byte 0, which text does not contain, so 256 ids are enough."""

    name = "bytes"
    vocab_size = 256

    def encode(self, texts: Iterable[str]) -> Iterator[bytes]:
        for text in texts:
            yield text.encode() + b"\0"


class FileTokenizer:
    """A `tokenizer.json` of the `tokenizers` library."""

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
        rest = iter(texts)
        while some := list(itertools.islice(rest, _ENCODE_AT_ONCE)):
            for encoded in self._tokenizer.encode_batch(some, add_special_tokens=False):
                yield encoded.ids + self._separator


Tokenizer: TypeAlias = ByteTokenizer | FileTokenizer
"""Maps text to token ids, and ends each document with a separator if the vocabulary has one."""


def open_tokenizer(path: Path | None, *, vocab_size: int | None = None) -> Tokenizer:
    tokenizer: Tokenizer = ByteTokenizer() if path is None else FileTokenizer(path)
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"tokenizer {tokenizer.name}: got {tokenizer.vocab_size} ids, but the model's vocab_size is {vocab_size}, "
            f"expected no more ids than that. Raise --vocab-size or remove it."
        )
    return tokenizer
