"""Read JSON that people edit: every error names the place, the data found there, and the data expected.

`read_document` parses a text and checks its format and version. The `Field` it returns is one place in the document;
its methods return the data there as a Python type, or raise the document's error class.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, NoReturn, get_args, get_type_hints

from recollect.errors import MissingFileError, RecollectError


class _JsonError(ValueError):
    """A problem found while parsing; `read_document` turns it into the document's error."""


def read_file(path: str | Path, *, expected: str, advice: str, error: type[Exception]) -> bytes:
    """Return the content of a file.

    Args:
        path: the file.
        expected: what it should be, such as "a plan that Plan.save wrote".
        advice: advice about the error, as a sentence.
        error: class of the exception to raise if the path exists but is no such file.

    Raises:
        MissingFileError: nothing is there.
        error: a folder, a file that may not be read, or an empty one.
    """
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        where = Path(path).absolute().parent
        found = "no such file" if where.is_dir() else f"no such file, nor its folder {where}"
        raise MissingFileError(f"{path}: {found}, expected {expected}. {advice}") from None
    except OSError as problem:
        found = "is a folder" if Path(path).is_dir() else f"cannot be read ({problem.strerror})"
        raise error(f"{path}: {found}, expected {expected}. {advice}") from None
    if not data.strip():
        raise error(f"{path}: is empty, expected {expected}. {advice}")
    return data


@contextmanager
def writing(path: object, error: type[Exception] = RecollectError, flag: str = "") -> Iterator[None]:
    """Say why a file cannot be written, where the block writes it.

    Raises:
        error: it cannot be written.
    """
    try:
        yield
    except OSError as problem:
        folder = Path(str(path)).absolute().parent
        found = problem.strerror if folder.is_dir() else f"no folder {folder}"
        text = f"{flag} {path}: cannot be written ({found}), expected a file in a writable folder."
        raise error(text.lstrip()) from None


def read_document(text: str, *, format: str, version: int, error: type[Exception]) -> Field:
    """Parse a versioned JSON document.

    Args:
        text: the JSON text of an object with the keys "format" and "version".
        format: the expected "format", such as "recollect.plan".
        version: the newest version that can be read; older ones are the caller's business.
        error: class of the exception to raise.

    Raises:
        error: not JSON, a duplicate key, NaN or infinity, another format, or a later version.
    """
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as problem:
        raise error(f"line {problem.lineno}, column {problem.colno}: not JSON: {problem.msg}") from None
    except (_JsonError, RecursionError) as problem:
        raise error(f"not a {format} document: {problem}") from None
    root = Field(data, "document", error)
    if not isinstance(data, dict):
        root.fail("an object")
    found_format, found_version = root.get("format"), root.get("version")
    if found_format.data != format:
        found_format.fail(repr(format))
    if found_version.integer(least=1) > version:
        raise error(
            f"version: got {found_version.data}, but this recollect reads up to {version}. "
            "Update recollect, or write the document again with this version."
        )
    return root


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _JsonError(f"the key {key!r} is there twice in one object; remove one of them")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise _JsonError(f"got {name}, expected a finite number")


@dataclass(frozen=True, slots=True)
class Field:
    """One place in a JSON document."""

    data: Any
    where: str
    error: type[Exception]

    def fail(self, expected: str) -> NoReturn:
        """Raise the document's error, with the data here and what was expected."""
        shown = json.dumps(self.data)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise self.error(f"{self.where}: got {shown}, expected {expected}")

    def _child(self, key: str | int) -> str:
        if isinstance(key, int):
            return f"{self.where}[{key}]" if self.where != "document" else f"[{key}]"
        return f"{self.where}.{key}" if self.where != "document" else key

    def keys(self, *, allowed: Sequence[str] | None = None) -> list[str]:
        """Return the keys of the object here; raise for keys not in `allowed`, if given."""
        if not isinstance(self.data, dict):
            self.fail("an object")
        for key in self.data:
            if allowed is not None and key not in allowed:
                raise self.error(f"{self._child(key)}: unknown key, expected one of {', '.join(allowed)}")
        return list(self.data)

    def get(self, key: str) -> Field:
        """Return the place under `key`; raise if it is missing."""
        if key not in self.keys():
            raise self.error(f"{self.where}: the key {key!r} is missing")
        return Field(self.data[key], self._child(key), self.error)

    def find(self, key: str) -> Field | None:
        """Return the place under `key`; None if it is missing or null."""
        return self.get(key) if self.keys() and self.data.get(key) is not None else None

    def array(self) -> list[Field]:
        if not isinstance(self.data, list):
            self.fail("an array")
        return [Field(item, self._child(index), self.error) for index, item in enumerate(self.data)]

    def items(self, key: str) -> list[Field]:
        """Return the places of the array under `key`; none if it is missing or null."""
        found = self.find(key)
        return [] if found is None else found.array()

    def text(self) -> str:
        if not isinstance(self.data, str):
            self.fail("a string")
        return self.data

    def integer(self, *, least: int | None = None) -> int:
        if type(self.data) is not int or (least is not None and self.data < least):
            self.fail("an integer" if least is None else f"an integer, {least} or more")
        return self.data

    def integers(self) -> tuple[int, ...]:
        # Checked as a whole, since an event log has hundreds of thousands of them.
        if not isinstance(self.data, list) or not all(type(item) is int for item in self.data):
            self.fail("an array of integers")
        return tuple(self.data)

    def pairs(self) -> tuple[tuple[str, str], ...]:
        return tuple((key, self.get(key).text()) for key in self.keys())

    def number(self) -> float:
        if type(self.data) not in (int, float) or not math.isfinite(self.data):
            self.fail("a finite number")
        return float(self.data)

    def flag(self) -> bool:
        if not isinstance(self.data, bool):
            self.fail("true or false")
        return self.data

    def arguments(
        self, kind: type, *, least: Mapping[str, int | None] = MappingProxyType({}), is_whole: bool = False
    ) -> dict[str, Any]:
        """Return the object's values for the fields of a dataclass; missing or null ones have their defaults.

        Args:
            kind: the dataclass. Its fields that are no text, number, bool, tuple of ints or pairs of texts, nor one of these or
                None, are left out. Fields that may be None default to None.
            least: the smallest ints of some fields, or None for any; default: 0.
            is_whole: whether only fields that may be None can be missing; raise for other missing ones despite their defaults.
        """
        found = {}
        for name, plain, default in _plain_fields(kind):
            is_needed = default is MISSING or (is_whole and default is not None)
            place = self.get(name) if is_needed else self.find(name)
            if place is None:
                found[name] = default
            elif plain is int:
                found[name] = place.integer(least=least.get(name, 0))
            else:
                found[name] = _READERS[plain](place)
        return found


_READERS: dict[Any, Callable[[Field], Any]] = {
    str: Field.text,
    int: Field.integer,
    float: Field.number,
    bool: Field.flag,
    tuple[int, ...]: Field.integers,
    tuple[tuple[str, str], ...]: Field.pairs,
}


@cache
def _plain_fields(kind: type) -> list[tuple[str, Any, Any]]:
    """Return the name, type without None, and default of the fields that a document has as they are."""
    found: list[tuple[str, Any, Any]] = []
    hints = get_type_hints(kind)
    for field in fields(kind):
        plain, default = hints[field.name], field.default
        if NoneType in get_args(plain):
            (plain,) = {*get_args(plain)} - {NoneType}
            default = None if default is MISSING else default
        if plain in _READERS:
            found.append((field.name, plain, default))
    return found
