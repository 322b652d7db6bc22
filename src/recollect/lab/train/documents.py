"""Read documents to train on, always in the same order: text, JSONL, folders, or the standard library's source."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recollect.errors import DataError
from recollect.warning import warn_user

# Installed packages differ between machines; tests and their fixtures are poor training data.
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
)


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and its name for error messages."""

    name: str
    text: str


def read_documents(paths: tuple[Path, ...] = (), *, text_field: str = "text") -> list[Document]:
    """Read all documents, folders in sorted order.

    Args:
        paths: text files, `.jsonl` files (one document per line) or folders; none: the standard library's source.
        text_field: JSONL field with the text.

    Returns:
        At least one document, all with text. In folders, hidden files are skipped, and files that are not UTF-8 text are
        skipped with a warning.

    Raises:
        DataError: a path does not exist, a named file is not text, a JSONL line is broken, or there is no text at all.

    Example:
        >>> read_documents()[0].name
        '__future__.py'
    """
    if not paths:
        return list(_standard_library())
    documents = [document for path in paths for document in _read_path(path, text_field)]
    if not documents:
        names = ", ".join(str(path) for path in paths)
        raise DataError(f"training data {names}: got no text, expected at least one document. Check --data.")
    return documents


def _standard_library() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        text = path.read_text(encoding="utf-8", errors="replace")
        if text and not _NOT_LIBRARY.intersection(relative.parts):
            yield Document(relative.as_posix(), text)


def _read_path(path: Path, text_field: str) -> Iterator[Document]:
    if path.is_dir():
        yield from _read_folder(path, text_field)
    elif path.is_file():
        yield from _read_file(path, text_field)
    else:
        raise DataError(
            f"training data {path}: no such file or folder, expected a text file, a .jsonl file or a folder. "
            f"Check --data."
        )


def _read_folder(folder: Path, text_field: str) -> Iterator[Document]:
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


def _read_file(path: Path, text_field: str) -> Iterator[Document]:
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise DataError(f"training data {path}: cannot be read ({problem.strerror}). Check --data.") from None
    if not _is_text(data):
        raise DataError(
            f"training data {path}: got a binary file, expected UTF-8 text. Convert it or remove it from --data."
        )
    if path.suffix == ".jsonl":
        yield from _read_jsonl(path, data.decode(), text_field)
    elif data:
        yield Document(str(path), data.decode())


def _read_jsonl(path: Path, content: str, text_field: str) -> Iterator[Document]:
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
        if text:
            yield Document(where, text)
