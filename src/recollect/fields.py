"""Read JSON that people edit: every error names the place, the data found there, and the data expected.

`read_document` parses a text and checks its format and version. The `Field` it returns is one place in the document;
its methods return the data there as a Python type, or raise the document's error class.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from recollect.errors import MissingFileError, RecollectError

_Built = TypeVar("_Built")

_HEAD = ("format", "version")


class _JsonError(ValueError):
    """A problem found while parsing; `read_document` turns it into the document's error."""


def read_file(path: str | Path, *, expected: str, advice: str, error: type[Exception]) -> bytes:
    """Return the content of a file; raise `error` for a folder, a file that may not be read, or an empty one."""
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
    """Raise `error`, which says why a file cannot be written, if the block fails to write it."""
    try:
        yield
    except OSError as problem:
        folder = Path(str(path)).absolute().parent
        found = problem.strerror if folder.is_dir() else f"no folder {folder}"
        text = f"{flag} {path}: cannot be written ({found}), expected a file in a writable folder."
        raise error(text.lstrip()) from None


def parse_yaml(text: str) -> Any:
    """Parse YAML, in C if PyYAML has that: the rules of this package in 3 ms, not 26."""
    import yaml

    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_document(
    text: str,
    *,
    format: str,
    version: int,
    error: type[Exception],
    needs_all_keys: bool = False,
) -> Field:
    """Parse a versioned JSON document, an object with the keys "format" and "version".

    `format`: the expected one, such as "recollect.plan". `version`: the newest that can be read; older ones are up to the
    caller. `needs_all_keys`: only what may be None can be missing, despite other fields' defaults.
    """
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as problem:
        raise error(f"line {problem.lineno}, column {problem.colno}: not JSON: {problem.msg}") from None
    except (_JsonError, RecursionError) as problem:
        raise error(f"not a {format} document: {problem}") from None
    root = Field(data, "document", _Rules(error, needs_all_keys))
    found_format, found_version = (root.get(key) for key in _HEAD)
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
                raise _JsonError(f"the key {key!r} appears twice in one object; remove one of them")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise _JsonError(f"got {name}, expected a finite number")


@dataclass(frozen=True, slots=True)
class _Rules:
    """The facts shared by the places of one document."""

    error: type[Exception]
    needs_all_keys: bool


@dataclass(frozen=True, slots=True)
class Field:
    """One place in a JSON document."""

    data: Any
    where: str
    rules: _Rules

    def fail(self, expected: str) -> NoReturn:
        shown = json.dumps(self.data)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise self.rules.error(f"{self.where}: got {shown}, expected {expected}")

    def _child(self, key: str | int) -> Field:
        where = f"[{key}]" if isinstance(key, int) else f".{key}"
        where = where.removeprefix(".") if self.where == "document" else self.where + where
        return Field(self.data[key], where, self.rules)

    def _keys(self) -> list[str]:
        if not isinstance(self.data, dict):
            self.fail("an object")
        return list(self.data)

    def get(self, key: str) -> Field:
        if key not in self._keys():
            raise self.rules.error(f"{self.where}: the key {key!r} is missing")
        return self._child(key)

    def members(self) -> dict[str, Field]:
        return {key: self._child(key) for key in self._keys()}

    def array(self) -> list[Field]:
        if not isinstance(self.data, list):
            self.fail("an array")
        return [self._child(index) for index in range(len(self.data))]

    def text(self) -> str:
        if not isinstance(self.data, str):
            self.fail("a string")
        return self.data

    def integer(self, *, least: int | None = 0) -> int:
        if type(self.data) is not int or (least is not None and self.data < least):
            self.fail("an integer" if least is None else f"an integer, {least} or more")
        return self.data

    def integers(self) -> tuple[int, ...]:
        # Checked as a whole, since an event log has hundreds of thousands of them.
        if not isinstance(self.data, list) or not all(type(item) is int for item in self.data):
            self.fail("an array of integers")
        return tuple(self.data)

    def number(self) -> float:
        if type(self.data) not in (int, float) or not math.isfinite(self.data):
            self.fail("a finite number")
        return float(self.data)

    def flag(self) -> bool:
        if not isinstance(self.data, bool):
            self.fail("true or false")
        return self.data

    def word(self, allowed: Sequence[str]) -> str:
        if self.data not in allowed:
            self.fail(" or ".join(json.dumps(word) for word in allowed))
        return allowed[allowed.index(self.data)]

    def record(self, kind: Callable[..., _Built], **given: Any) -> _Built:
        """Return a dataclass or named tuple from the object here; missing or null fields have their defaults.

        Fields that may be None default to None. A ValueError of the class's checks is reported with this place. `given`:
        fields that need no reading.
        """
        known = _fields_of(kind)
        head = _HEAD if self.where == "document" else ()
        for key, place in self.members().items():
            if key not in known and key not in head:
                raise self.rules.error(f"{place.where}: unknown key, expected one of {', '.join((*head, *known))}")
        for name, (reader, may_be_none, has_default) in known.items():
            if name in given:
                continue
            can_be_missing = may_be_none or (has_default and not self.rules.needs_all_keys)
            if self.data.get(name) is not None or not can_be_missing:
                given[name] = reader(self.get(name))
            elif not has_default:
                given[name] = None
        return self.checked(kind, **given)

    def checked(self, function: Callable[..., _Built], **arguments: Any) -> _Built:
        """Return a function's result; its ValueError is reported with this place."""
        try:
            return function(**arguments)
        except ValueError as problem:
            where = "" if self.where == "document" else f"{self.where}: "
            raise self.rules.error(f"{where}{problem}") from None


@cache
def _fields_of(kind: Any) -> dict[str, tuple[Callable[[Field], Any], bool, bool]]:
    """Return the reader of each field that is compared, whether it may be None, and whether it has a default."""
    hints = get_type_hints(kind, include_extras=True)
    if not is_dataclass(kind):  # a named tuple
        return {name: (_reader(hint), False, name in kind._field_defaults) for name, hint in hints.items()}
    return {
        one.name: (
            _reader(hints[one.name]),
            NoneType in get_args(hints[one.name]),
            one.default is not MISSING or one.default_factory is not MISSING,
        )
        for one in fields(kind)
        if one.compare
    }


@cache
def _reader(kind: Any) -> Callable[[Field], Any]:
    """Return the reader of a type: text, int, float, bool, word, tuple, mapping, dataclass, or one of these or None."""
    parts: tuple[Any, ...] = get_args(kind)
    if kind in _READERS:
        return _READERS[kind]
    if NoneType in parts:
        (kind,) = {*parts} - {NoneType}
        return _reader(kind)
    if get_origin(kind) is Annotated:
        return lambda place: _few_integers(place, *parts[1:])
    if get_origin(kind) is Literal:
        return lambda place: place.word(parts)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda place: place.word(tuple(kind))
    if get_origin(kind) is Mapping:
        item = _reader(parts[1])
        return lambda place: {key: item(member) for key, member in place.members().items()}
    if get_origin(kind) is tuple and get_args(parts[0])[:1] == (str,):
        item = _reader(get_args(parts[0])[1])
        return lambda place: tuple((key, item(member)) for key, member in place.members().items())
    if get_origin(kind) is tuple:
        item = _reader(parts[0])
        return lambda place: tuple(item(entry) for entry in place.array())
    return lambda place: place.record(kind)


def _few_integers(place: Field, *expected: str) -> tuple[int, ...]:
    numbers = place.integers()
    if len(numbers) != len(expected):
        raise place.rules.error(f"{place.where}: got {list(numbers)}, expected [{', '.join(expected)}]")
    return numbers


_READERS: dict[Any, Callable[[Field], Any]] = {
    str: Field.text,
    int: Field.integer,
    float: Field.number,
    bool: Field.flag,
    tuple[int, ...]: Field.integers,
    Annotated[int, "may be negative"]: lambda place: place.integer(least=None),
    Any: lambda place: place.data,
}
