"""`recollect timeline`: show the contents of a step's peak, and write its memory over time for other viewers."""

from rich.console import Console

import recollect
from recollect.cli.commands import ShowTimeline
from recollect.cli.common import check_folder, describe_step, step_recorder
from recollect.errors import UnknownNameError
from recollect.pictures.viewers import write_snapshot, write_trace
from recollect.plans.plan import Plan
from recollect.printing import print_line
from recollect.simulation.predicted import predicted_plan

_WRITERS = {
    "trace": (write_trace, "Trace written to {}: open it on ui.perfetto.dev."),
    "snapshot": (write_snapshot, "Snapshot written to {}: open it on pytorch.org/memory_viz."),
}


def run_timeline(command: ShowTimeline, console: Console) -> None:
    files = {name: path for name in _WRITERS if (path := getattr(command, name)) is not None}
    for name, path in files.items():
        check_folder(path, f"--{name}")
    given = None if command.plan is None else Plan.load(command.plan)
    profile = step_recorder(command.step, engine=command.step.engine)(1 if given is None else given.loss_chunks)
    known = [call.path for call in profile.calls]
    for path in () if given is None else given.units:
        if path not in known:
            raise UnknownNameError(
                kind="unit", name=path, known=known, where=f"--plan {command.plan}: {profile.model_class}"
            )
    if command.memory_budget is not None:
        plan = recollect.plan(profile, command.memory_budget)
    else:
        plan = predicted_plan(profile, given or Plan({}))
    over_time = recollect.timeline(profile, plan)
    print_line(console, describe_step(profile))
    print_line(console, str(over_time.report))
    for name, path in files.items():
        write, said = _WRITERS[name]
        write(over_time, path)
        print_line(console, said.format(path))
