"""`recollect frontier`: show predicted peak and slowdown for every budget."""

import shlex
import sys
from collections.abc import Sequence

from rich.console import Console

import recollect
from recollect.cli.commands import DrawFrontier
from recollect.cli.common import check_pictures, describe_step, step_recorder
from recollect.pictures.page import write_frontier_page
from recollect.pictures.png import draw_frontier
from recollect.printing import print_line
from recollect.quantities import parse_bytes
from recollect.recording.engines import check_host_engine


def run_frontier(command: DrawFrontier, console: Console) -> None:
    check_pictures(command.png, command.html)
    engine = command.step.engine
    check_host_engine(engine, command.host_budget)
    has_host = bool(parse_bytes(command.host_budget))
    profile = step_recorder(command.step, host_link=has_host, engine=engine)(command.loss_chunks)
    frontier = recollect.frontier(profile, command.host_budget)
    print_line(console, describe_step(profile))
    print_line(console, str(frontier))
    print_line(console, "To take one of them: recollect plan with the same flags, and its peak as --memory-budget.")
    if command.png is not None:
        draw_frontier(profile, frontier, command.png)
        print_line(console, f"Drawn to {command.png}.")
    if command.html is not None:
        write_frontier_page(profile, frontier, command.html, step_flags=_step_flags(sys.argv[1:]))
        print_line(console, f"Page written to {command.html}.")


def _step_flags(words: Sequence[str]) -> list[str]:
    """Return the flags that describe the step, quoted for a shell, from words like `frontier --size 8b --png a.png`.

    Example:
        >>> _step_flags(["frontier", "--size", "8b", "--png", "a.png", "--html=b.html", "--fake"])
        ['--size', '8b', '--fake']
        >>> _step_flags(["other", "program"])
        []
    """
    if words[:1] != ["frontier"]:
        return []
    found: list[str] = []
    skips = False
    for word in words[1:]:
        flag = word.partition("=")[0]
        if not skips and flag not in ("--png", "--html", "--debug"):
            found.append(shlex.quote(word))
        skips = word in ("--png", "--html")
    return found
