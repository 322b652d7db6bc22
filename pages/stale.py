"""List what is stale in the documentation, with the command that renews it: `scripts/stale`. Exits with 1 if something is.

scripts/stale             # checks all; about a minute
scripts/stale --quick     # leaves out what takes more than a few seconds, as the tests do
scripts/stale --refresh   # runs the commands that take less than a minute
scripts/stale --accept docs/peers.md   # the page has been brought up to date by hand
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from pages.figures import ROOT, Dated, Figure
from pages.registry import FIGURES

__all__ = ["main", "stale"]

_QUICK_S = 3


def stale(figures: tuple[Figure, ...] = FIGURES, *, quick: bool = False) -> list[Figure]:
    """Return the figures that are not what would be made now."""
    return [one for one in figures if (one.seconds <= _QUICK_S or not quick) and one.is_stale()]


def main() -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only what is checked in a few seconds")
    parser.add_argument("--refresh", action="store_true", help="renew what takes less than a minute")
    parser.add_argument("--accept", nargs="+", metavar="FILE", help="note that these are up to date")
    flags = parser.parse_args()
    if flags.accept:
        return _accept(flags.accept)
    found = stale(quick=flags.quick)
    if flags.refresh:
        for one in found:
            if one.renews:
                _renew(one)
        found = [one for one in found if one.is_stale()]
    for one in found:
        print(f"stale: {one.name}\n    {one.command}")
        if isinstance(one, Dated) and not one.renews:
            print(f"    then: scripts/stale --accept {one.path}")
        elif not one.renews:
            print("    and paste what it prints")
    print(f"{len(found)} stale")
    return 1 if found else 0


def _renew(figure: Figure) -> None:
    print(f"renewing {figure.name}")
    environment = {
        **os.environ,
        "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
    }
    subprocess.run(figure.command, cwd=ROOT, env=environment, shell=True, check=True, stdout=subprocess.DEVNULL)
    if isinstance(figure, Dated):
        figure.accept()


def _accept(paths: list[str]) -> int:
    dated = {one.path: one for one in FIGURES if isinstance(one, Dated)}
    unknown = [path for path in paths if path not in dated]
    if unknown:
        print(f"not checked by a digest: {', '.join(unknown)}. Those are: {', '.join(dated)}", file=sys.stderr)
        return 2
    for path in paths:
        dated[path].accept()
    return 0


if __name__ == "__main__":
    sys.exit(main())
