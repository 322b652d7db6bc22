"""`recollect train`."""

from __future__ import annotations

from rich.console import Console

from recollect.cli.commands import Train
from recollect.train.loop import train
from recollect.train.report import report_lines, report_table


def run_train(command: Train, console: Console) -> None:
    """Train, then print the report."""
    outcome = train(command.config, console=console)
    console.print(report_table(outcome))
    for line in report_lines(outcome):
        console.print(line, markup=False, soft_wrap=True)
