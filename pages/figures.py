"""Every figure, table and quoted output of the documentation that a command makes: which, from what, and how it is checked.

An *exact* one is made again and compared. One that takes long, or has measured times in it, is *dated*: docs/figures.json
holds a digest of what it was made from and of itself, and it is stale when either has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DIGESTS", "ROOT", "Dated", "Exact", "Figure", "output_of"]

ROOT = Path(__file__).parents[1]
DIGESTS = ROOT / "docs" / "figures.json"


@dataclass(frozen=True)
class Exact:
    """Text of a page that a command prints again, byte for byte.

    Attributes:
        path: the page.
        command: what a person runs to renew it, from the root of the repository.
        now: returns what should be in the page now.
        whole: whether that is the whole page; otherwise it is somewhere in it.
        renews: whether `command` writes the page; otherwise its output is pasted by hand.
        seconds: about how long the check takes.
    """

    path: str
    command: str
    now: Callable[[], str]
    whole: bool = True
    renews: bool = True
    seconds: int = 1

    @property
    def name(self) -> str:
        """Return the page, and for a part of one the command."""
        return self.path if self.whole else f"{self.path}: {self.command}"

    def is_stale(self) -> bool:
        """Return whether the page says something else."""
        page, now = (ROOT / self.path).read_text(encoding="utf-8"), self.now()
        return page != now if self.whole else now.strip() not in page


@dataclass(frozen=True)
class Dated:
    """A figure that is not made again to check it.

    Attributes:
        path: the figure, or the page with the numbers.
        command: what makes it.
        inputs: files that it is made from, as patterns, such as the rows of a benchmark.
        prints: a command that prints the numbers that are drawn, where they come from no file.
        renews: whether `command` writes the figure, in less than a minute; otherwise a person decides when to run it.
        seconds: about how long the check takes.
    """

    path: str
    command: str
    inputs: tuple[str, ...] = ()
    prints: str = ""
    renews: bool = False
    seconds: int = 1

    @property
    def name(self) -> str:
        """Return the file."""
        return self.path

    def digests(self) -> dict[str, str]:
        """Return a digest of the figure and one of its inputs, as they are now."""
        found = sorted({path for pattern in self.inputs for path in ROOT.glob(pattern) if path.is_file()})
        if not found and not self.prints:
            raise FileNotFoundError(f"{self.path}: nothing matches {', '.join(self.inputs)}")
        printed = output_of(self.prints) if self.prints else ""
        return {"figure": _digest([ROOT / self.path]), "inputs": _digest(found, printed)}

    def is_stale(self) -> bool:
        """Return whether the figure, or what it was made from, has changed since `accept`."""
        return read_digests().get(self.path) != self.digests()

    def accept(self) -> None:
        """Note that the figure is up to date."""
        digests = {**read_digests(), self.path: self.digests()}
        DIGESTS.write_text(json.dumps(dict(sorted(digests.items())), indent=1) + "\n", encoding="utf-8")


Figure = Exact | Dated


def read_digests() -> dict[str, dict[str, str]]:
    """Return the digests of all dated figures, as they were when they were made."""
    found: dict[str, dict[str, str]] = json.loads(DIGESTS.read_text(encoding="utf-8")) if DIGESTS.exists() else {}
    return found


def output_of(command: str) -> str:
    """Return what a command of recollect, or a module, prints when it is not on a terminal."""
    words = shlex.split(command)
    words = [sys.executable, "-m", *words] if words[0] == "recollect" else [sys.executable, *words[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"}
    printed = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    return "".join(line.rstrip() + "\n" for line in printed.splitlines())


def _digest(paths: Iterable[Path], printed: str = "") -> str:
    total = hashlib.sha256(printed.encode())
    for path in paths:
        total.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]
