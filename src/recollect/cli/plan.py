"""`recollect plan`: choose what to keep and recompute within a budget, and write the plan."""

from __future__ import annotations

from typing import Literal

from rich.console import Console

from recollect.byte_format import format_bytes
from recollect.cli.cluster import run_cluster
from recollect.cli.commands import MakePlan
from recollect.cli.largest import run_largest
from recollect.cli.output import check_folder, check_pictures, write_file
from recollect.cli.recorded_step import check_step_budget, step_recorder
from recollect.errors import NotYetError
from recollect.integrations.megatron.nearest import bridge_lines, megatron_flags, nearest_settings
from recollect.integrations.torchtitan_settings import nearest_policy, torchtitan_flags
from recollect.measuring.host_memory import check_host_budget
from recollect.pictures.page import write_plan_page
from recollect.pictures.png import draw_memory
from recollect.planning.loss_chunks import plan_with_chunks
from recollect.planning.planners import prices
from recollect.plans.plan import Plan
from recollect.printing import columns_of, print_line
from recollect.profile.profile import Profile
from recollect.quantities import parse_bytes


def run_plan(command: MakePlan, console: Console) -> None:
    """Record a step, plan it, print the plan and write it; with `--largest` that of the largest step that fits.

    Args:
        command: the flags.
        console: where the plan goes.

    Raises:
        RecollectError: a file cannot be written, a package for a picture is missing, or recording or planning fails.
    """
    if command.plan_file is not None:
        check_folder(command.plan_file, "--out")
    if command.cluster.is_given:
        if parse_bytes(command.host_budget):
            raise NotYetError(
                settings={"host_budget": command.host_budget},
                needs="plans that offload, for the devices of a cluster",
                advice="Plan without --host-budget; or plan one device of it, without the flags of a cluster.",
            )
        run_cluster(command, console)
        return
    if command.largest is not None:
        run_largest(command, console)
        return
    check_pictures(command.png, command.html)
    check_step_budget(command.memory_budget, command.step)
    recorder = step_recorder(command.step, host_link=bool(parse_bytes(command.host_budget)))
    if not command.step.fake:
        check_host_budget(command.host_budget)
    planned = plan_with_chunks(recorder, command.memory_budget, command.loss_chunks, command.host_budget)
    plan = planned.plan
    print_line(console, plan.to_text(columns_of(console)))
    print_line(console, f"without recompute {format_bytes(planned.plain_peak_bytes)}")
    if plan.offloads:
        print_line(console, str(prices(planned.profile, plan)))
    if command.write is not None:
        print_line(console, _nearest(command.write, planned.profile, plan))
    if command.plan_file is not None:
        write_file(command.plan_file, plan.to_json() + "\n", console, flag="--out")
    if command.png is not None:
        draw_memory(planned.profile, plan, command.png)
        print_line(console, f"Memory drawn to {command.png}.")
    if command.html is not None:
        write_plan_page(planned.profile, plan, command.html)
        print_line(console, f"Page written to {command.html}.")


def _nearest(tool: Literal["megatron", "bridge", "torchtitan"], profile: Profile, plan: Plan) -> str:
    """Return the nearest settings of another tool, and what they lose, as lines."""
    if tool == "torchtitan":
        policy = nearest_policy(profile, plan)
        return f"{policy}\n{torchtitan_flags(policy.settings)}"
    found = nearest_settings(profile, plan)
    if tool == "bridge":
        return f"{found}\n{bridge_lines(found.settings)}"
    return f"{found}\n{megatron_flags(found.settings) or 'no flags'}"
