"""Facts about objects, for as long as something else holds them."""

import weakref
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")

# Entries of dead objects are removed when there are this many more than after the last time.
_SWEEP_LENGTH = 64


class WeakMap(Generic[Value]):
    """Maps objects, by identity, to values.

    `weakref.WeakKeyDictionary` runs code in Python when a key dies. An interrupt of the program that came meanwhile, as in a
    garbage collection, would be raised there, printed and forgotten.

    Example:
        >>> class Key: ...
        >>> key, names = Key(), WeakMap[str]()
        >>> names[key] = "a"
        >>> key in names, names.get(key), len(names)
        (True, 'a', 1)
        >>> del key
        >>> len(names)
        0
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], Value]] = {}
        self._most = _SWEEP_LENGTH

    def __setitem__(self, key: Any, value: Value) -> None:
        if len(self._entries) >= self._most:
            self._entries = {at: entry for at, entry in self._entries.items() if entry[0]() is not None}
            self._most = len(self._entries) + _SWEEP_LENGTH
        self._entries[id(key)] = weakref.ref(key), value

    def get(self, key: Any) -> Value | None:
        return self._entries[id(key)][1] if key in self else None

    def setdefault(self, key: Any, value: Value) -> Value:
        if key not in self:
            self[key] = value
        return self._entries[id(key)][1]

    def __contains__(self, key: Any) -> bool:
        entry = self._entries.get(id(key))
        return entry is not None and entry[0]() is key

    def discard(self, key: Any) -> None:
        self._entries.pop(id(key), None)

    def items(self) -> list[tuple[Any, Value]]:
        alive = [(reference(), value) for reference, value in self._entries.values()]
        return [(key, value) for key, value in alive if key is not None]

    def __len__(self) -> int:
        return len(self.items())
