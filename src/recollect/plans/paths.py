"""Abbreviates module paths: "model.layers.0-22" stands for the 23 paths "model.layers.0" to "model.layers.22".

A range is a path component made of two whole numbers without leading zeros, the smaller one first. A path with a
component that is really called "0-22" cannot be abbreviated; `is_plain` is False for it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_RANGE = re.compile(r"(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})", re.ASCII)
# More paths than any model has units; a longer range in a file is a mistake that would fill memory.
_LONGEST_RANGE = 100_000


def is_plain(path: str) -> bool:
    return not any(_RANGE.fullmatch(part) for part in path.split("."))


def unit_words(path: str, kind: str = "unit") -> str:
    """Return words for a unit in a message; the path of the model itself is empty.

    Example:
        >>> unit_words("layers.0"), unit_words("")
        ("unit 'layers.0'", 'the model')
    """
    return f"{kind} {path!r}" if path else "the model"


def paths_above(path: str) -> list[str]:
    """Return the paths of the modules that contain a module, the outermost first, without the model itself.

    Example:
        >>> paths_above("decoder.layers.0")
        ['decoder', 'decoder.layers']
    """
    return [path[:end] for end, character in enumerate(path) if character == "."]


def compress_paths(paths: Sequence[str]) -> list[str]:
    """Return the paths in the same order, with neighbours that count up by one joined into ranges.

    Example:
        >>> compress_paths(["embed", "layers.0", "layers.1", "layers.2", "layers.4"])
        ['embed', 'layers.0-2', 'layers.4']
    """
    result: list[str] = []
    run: list[str] = []
    place = -1
    for path in paths:
        step = _step(run[-1], path) if run else -1
        if step >= 0 and place in (-1, step):
            run.append(path)
            place = step
            continue
        result += _written(run, place)
        run, place = [path], -1
    return result + _written(run, place)


def expand_paths(pattern: str) -> list[str]:
    """Return the paths that a pattern from `compress_paths` stands for."""
    parts = pattern.split(".")
    ranges = [(i, match) for i, part in enumerate(parts) if (match := _RANGE.fullmatch(part))]
    if not ranges:
        return [pattern]
    if len(ranges) > 1:
        raise ValueError("two ranges in one path, expected at most one")
    place, match = ranges[0]
    first, last = int(match[1]), int(match[2])
    if first >= last:
        raise ValueError(f"the range {match[0]} does not count up")
    if last - first >= _LONGEST_RANGE:
        raise ValueError(f"the range {match[0]} is longer than {_LONGEST_RANGE}")
    return [".".join([*parts[:place], str(number), *parts[place + 1 :]]) for number in range(first, last + 1)]


def compress_classes(classes: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return modules' classes by path as few (pattern, class) pairs: modules alike in consecutive layers share one.

    Example:
        >>> compress_classes({"layers.0.1": "ReLU", "layers.0.3": "ReLU", "layers.1.1": "ReLU", "layers.1.3": "ReLU"})
        (('layers.0-1.1', 'ReLU'), ('layers.0-1.3', 'ReLU'))
    """
    paths_of: dict[str, list[str]] = {}
    for path in sorted(filter(is_plain, classes), key=_from_its_end):
        paths_of.setdefault(classes[path], []).append(path)
    return tuple((pattern, name) for name, paths in sorted(paths_of.items()) for pattern in compress_paths(paths))


def expand_classes(class_names: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the classes by path that `compress_classes` made these pairs of."""
    found = {}
    for pattern, name in class_names:
        try:
            found.update(dict.fromkeys(expand_paths(pattern), name))
        except ValueError as problem:
            raise ValueError(f"{pattern!r}: {problem}") from None
    return found


def _from_its_end(path: str) -> list[tuple[int, str]]:
    return [(int(part) if _NUMBER.fullmatch(part) else -1, part) for part in reversed(path.split("."))]


def _step(path: str, following: str) -> int:
    """Return the index of the only component in which `following` differs, counting up by one; -1 if none does."""
    old, new = path.split("."), following.split(".")
    if len(old) != len(new) or not (is_plain(path) and is_plain(following)):
        return -1
    different = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    if len(different) != 1:
        return -1
    a, b = old[different[0]], new[different[0]]
    counts_up = _NUMBER.fullmatch(a) and _NUMBER.fullmatch(b) and int(b) == int(a) + 1
    return different[0] if counts_up else -1


def _written(run: list[str], place: int) -> list[str]:
    if len(run) < 2:
        return run
    first, last = run[0].split("."), run[-1].split(".")
    first[place] = f"{first[place]}-{last[place]}"
    return [".".join(first)]
