"""`recollect plan`."""

from __future__ import annotations

from rich.console import Console

from recollect.byte_format import format_bytes
from recollect.cli.commands import MakePlan
from recollect.cli.pictures import check_pictures
from recollect.cli.step import step_recorder
from recollect.errors import RecollectError
from recollect.lab.train.files import write_text
from recollect.pictures.page import write_plan_page
from recollect.pictures.png import draw_memory
from recollect.planning.loss_chunks import plan_with_chunks


def run_plan(command: MakePlan, console: Console) -> None:
    """Record, plan, print the plan and write it.

    Args:
        command: the flags.
        console: where the plan goes.

    Raises:
        RecollectError: a file cannot be written, a package for a picture is missing; what recording and planning raise.
    """
    check_pictures(command.png, command.html)
    planned = plan_with_chunks(step_recorder(command.step), command.memory_budget, command.loss_chunks)
    plan = planned.plan
    console.print(str(plan), markup=False, highlight=False, soft_wrap=True)
    console.print(f"without recompute {format_bytes(planned.plain_peak_bytes)}", highlight=False)
    try:
        write_text(command.out, plan.to_json() + "\n")
    except OSError as problem:
        raise RecollectError(
            f"--out {command.out}: cannot be written ({problem.strerror}), expected a file in a writable folder."
        ) from None
    console.print(f"Written to {command.out}.", markup=False, soft_wrap=True)
    if command.png is not None:
        draw_memory(planned.profile, plan, command.png)
        console.print(f"Memory drawn to {command.png}.", markup=False, soft_wrap=True)
    if command.html is not None:
        write_plan_page(planned.profile, plan, command.html)
        console.print(f"Page written to {command.html}.", markup=False, soft_wrap=True)
