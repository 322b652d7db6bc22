"""`recollect plan`."""

from __future__ import annotations

from rich.console import Console

import recollect
from recollect.cli.commands import MakePlan
from recollect.cli.step import record_step
from recollect.errors import RecollectError
from recollect.quantities import format_bytes
from recollect.train.files import write_text


def run_plan(command: MakePlan, console: Console) -> None:
    """Record, plan, print the plan and write it.

    Args:
        command: the flags.
        console: where the plan goes.

    Raises:
        RecollectError: the file cannot be written; what recording and planning raise.
    """
    profile = record_step(command.step)
    plan = recollect.plan(profile, command.memory_budget)
    console.print(str(plan), markup=False, highlight=False, soft_wrap=True)
    plain_bytes = recollect.classic_plan(profile, "keep_all").predicted_peak_bytes or 0
    console.print(f"without recompute {format_bytes(plain_bytes)}", highlight=False)
    try:
        write_text(command.out, plan.to_json() + "\n")
    except OSError as problem:
        raise RecollectError(
            f"--out {command.out}: cannot be written ({problem.strerror}), expected a file in a writable folder."
        ) from None
    console.print(f"Written to {command.out}.", markup=False, soft_wrap=True)
