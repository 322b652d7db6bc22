"""A fault to put into the sources: where, and which text becomes which."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

__all__ = ["Edit", "Mutation", "place", "problems"]

Edit = tuple[str, str]
"""The old text, which is there exactly once, and the new one."""


@dataclass(frozen=True)
class Mutation:
    """A fault that tests should notice.

    Attributes:
        name: short, and unlike all others.
        breaks: what does not work any more, in words.
        where: a folder of src/recollect, so that files in it can be moved and joined, or a file.
        edits: of its text.
    """

    name: str
    breaks: str
    where: str
    edits: tuple[Edit, ...]

    @property
    def area(self) -> str:
        """The package, or the file beside the packages, without its suffix."""
        return self.where.partition("/")[0].removesuffix(".py")


def place(mutation: Mutation, root: Path) -> dict[Path, str]:
    """Return the new texts of the files that a mutation changes; raise ValueError if a text of it is not there just once."""
    top = root / "src" / "recollect" / mutation.where
    if not top.exists():
        raise ValueError(f"{mutation.name}: there is no src/recollect/{mutation.where}")
    texts = {path: path.read_text(encoding="utf-8") for path in ([top] if top.is_file() else top.rglob("*.py"))}
    changed: dict[Path, str] = {}
    for old, new in mutation.edits:
        found = {path: text.count(old) for path, text in texts.items() if old in text}
        if sum(found.values()) != 1:
            times = ", ".join(f"{count} in {path.name}" for path, count in found.items()) or "nowhere"
            raise ValueError(
                f"{mutation.name}: expected once in src/recollect/{mutation.where}, found {times}: {old!r}"
            )
        (path,) = found
        changed[path] = texts[path] = texts[path].replace(old, new)
    return changed


def problems(mutations: tuple[Mutation, ...], root: Path) -> list[str]:
    """Return what is wrong with the mutations in this tree: texts that are not there just once, code that does not compile."""
    names = [mutation.name for mutation in mutations]
    found = [
        f"{name}: the name is used {names.count(name)} times" for name in sorted(set(names)) if names.count(name) > 1
    ]
    for mutation in mutations:
        try:
            for path, text in place(mutation, root).items():
                compile(text, str(path), "exec")
        except SyntaxError as problem:
            found.append(f"{mutation.name}: its code does not compile: {problem}")
        except ValueError as problem:
            found.append(str(problem))
    return found


def write(texts: dict[Path, str]) -> None:
    """Write files, and forget their compiled code: a file of the same second and size would pass for the old one."""
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
        Path(cache_from_source(str(path))).unlink(missing_ok=True)
