"""`recollect frontier`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import recollect
from recollect.cli.commands import DrawFrontier
from recollect.cli.step import step_recorder
from recollect.errors import RecollectError
from recollect.planning.frontier import Frontier
from recollect.quantities import format_bytes

_MIB = 1 << 20


def run_frontier(command: DrawFrontier, console: Console) -> None:
    """Record, compute the frontier, print it as a table and draw it.

    Args:
        command: the flags.
        console: where the table goes.

    Raises:
        RecollectError: matplotlib is not installed or the picture cannot be written; what recording raises.
    """
    pyplot = _pyplot()  # before the work, which can take minutes
    profile = step_recorder(command.step)(command.loss_chunks)
    frontier = recollect.frontier(profile)
    console.print(frontier_table(frontier))
    _draw(pyplot, frontier, command.out, title=f"{profile.model_class}, batch {profile.batch}")
    console.print(f"Drawn to {command.out}.", markup=False, soft_wrap=True)


def frontier_table(frontier: Frontier) -> Table:
    """Return the frontier and the classic plans as a table, the leanest first."""
    table = Table(title="Predicted peak against slowdown", title_justify="left")
    table.add_column("peak", justify="right")
    table.add_column("slowdown", justify="right")
    table.add_column("plan")
    rows = [(point, "") for point in frontier.points] + [(point, "bold") for point in frontier.classics]
    for point, style in sorted(rows, key=lambda row: (row[0].peak_bytes, row[0].slowdown)):
        table.add_row(
            format_bytes(point.peak_bytes), f"{100 * point.slowdown:.1f} %", point.name or point.plan.note, style=style
        )
    return table


def _pyplot() -> Any:
    try:
        import matplotlib  # optional: only for the picture
    except ImportError:
        raise RecollectError(
            "recollect frontier: needs the package `matplotlib`. Run: pip install matplotlib"
        ) from None
    matplotlib.use("agg")  # a file needs no display
    from matplotlib import pyplot

    return pyplot


def _draw(pyplot: Any, frontier: Frontier, out: Path, *, title: str) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    peaks_mib = [point.peak_bytes / _MIB for point in frontier.points]
    axes.plot(peaks_mib, [100 * point.slowdown for point in frontier.points], marker=".", label="recollect")
    for number, point in enumerate(frontier.classics):
        axes.plot(point.peak_bytes / _MIB, 100 * point.slowdown, marker="x", linestyle="none", color="tab:red")
        axes.annotate(
            point.name,
            (point.peak_bytes / _MIB, 100 * point.slowdown),
            xytext=(5, 5 if number % 2 else -12),  # above and below in turn: neighbours are close to each other
            textcoords="offset points",
        )
    axes.set(xlabel="predicted peak of the step (MiB)", ylabel="predicted slowdown (%)", title=title)
    axes.margins(x=0.12)  # room for the names at the right end
    axes.set_ylim(bottom=-1)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(out, dpi=150)
    except (OSError, ValueError) as problem:  # ValueError: a file ending that matplotlib does not know
        raise RecollectError(
            f"--out {out}: cannot be written ({problem}), expected a .png file in a writable folder."
        ) from None
    finally:
        pyplot.close(figure)
