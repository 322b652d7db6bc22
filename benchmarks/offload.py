"""Plan with host memory: on a modelled H100 over links of several speeds, and on this CPU over threads as slow as asked for.

    python benchmarks/offload.py modelled
    python benchmarks/offload.py threads

Modelled: slowdown of plans that recompute only, that offload only, and that do both, with the bound, and what the last cost
where the link is half to twice as fast as planned for. Threads: steps of the three, timed in turn with the plain step and with
a second, identical copy of each, over a link of so many bytes a second; gradients are compared bit for bit.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

import recollect
from flags import parse
from recollect.engine.offload import carriers
from recollect.errors import BudgetTooSmallError
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.planning.choose import Planner
from recollect.planning.planners import OffloadPlanner
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.simulation.copy_clock import Link, waits_of
from recollect.simulation.decisions import decide

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
from slow_copies import SlowCarrier

MANY_BYTES = 2**60
LINKS = {"25 GB/s": (25e9, 25e9), "55 GB/s": (55e9, 55e9), "170 out, 410 in": (170e9, 410e9)}
OTHER_SPEEDS = (0.5, 0.75, 0.9, 2.0)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What to plan, and on what."""

    part: tyro.conf.Positional[Literal["modelled", "threads"]]
    """Which table."""
    size: str = "8b"
    """Name of the modelled model."""
    seq_length: int = 8192
    """Its tokens, in one sequence."""
    shares: tuple[float, ...] = (0.75, 0.5, 0.35, 0.25)
    """Budgets, as parts of what is not alive throughout."""
    link_share: float = 1.0
    """The part of a modelled link to plan for."""
    bytes_per_s: float = 0.5e9
    """Of the threads, in each direction."""
    rounds: int = 15
    """Steps of each contestant."""


def main(flags: Flags) -> None:
    """Print one of the tables."""
    console = Console(width=140)
    if flags.part == "modelled":
        _print_modelled(flags, console)
    else:
        _print_timed(flags, console)


def _print_modelled(flags: Flags, console: Console) -> None:
    with torch.device("meta"):
        model = GPTModel(NAMED_CONFIGS[flags.size]).to(torch.bfloat16)
        tokens = torch.zeros(1, flags.seq_length, dtype=torch.int64)
    batch = {"tokens": tokens, "labels": tokens}
    profile = recollect.record(model, batch, fake=True, hardware="H100", gradients="accumulated")
    plain = Planner(profile)
    working_bytes = plain.plain_peak_bytes - profile.persistent_bytes
    console.print(
        f"{flags.size}, {flags.seq_length} tokens, bf16, modelled H100: step {profile.step_s:.3f} s, alive throughout "
        f"{profile.persistent_bytes / 2**30:.1f} GiB, beside that {working_bytes / 2**30:.1f} GiB"
    )
    table = Table(title="slowdown in %, in brackets the bound; and of the joint plan on other links")
    headings = ["link", "budget", "recompute", "offload", "joint", "host GiB", "seconds to plan"]
    for heading in (*headings, *(f"x {speed:g}" for speed in OTHER_SPEEDS)):
        table.add_column(heading, justify="right")
    for name, (out, back) in LINKS.items():
        linked = replace(profile, to_host_bytes_per_s=out, from_host_bytes_per_s=back, host_latency_s=1e-5)
        planner = OffloadPlanner(linked, MANY_BYTES, link_share=flags.link_share)
        for share in flags.shares:
            budget_bytes = int(profile.persistent_bytes + share * working_bytes)
            table.add_row(name, f"{share:.0%}", *_row(planner, plain, linked, budget_bytes))
    console.print(table)


def _row(planner: OffloadPlanner, plain: Planner, profile: Profile, budget_bytes: int) -> list[str]:
    begin = time.process_time()
    try:
        joint = planner.plan(budget_bytes)
    except BudgetTooSmallError:
        return ["-", "-", "no plan"]
    seconds = time.process_time() - begin
    try:
        only_recompute = _percent(plain.plan(budget_bytes))
    except BudgetTooSmallError:
        only_recompute = "no plan"
    only_offload = planner.offloading(Plan({}), budget_bytes)
    others = []
    for speed in OTHER_SPEEDS:
        link = Link(speed * profile.to_host_bytes_per_s, speed * profile.from_host_bytes_per_s, profile.host_latency_s)
        waited = waits_of(profile, decide(profile, joint), link) / profile.step_s if joint.offloads else 0.0
        others.append(f"{100 * ((joint.predicted_slowdown or 0.0) - (joint.host_wait_slowdown or 0.0) + waited):.2f}")
    return [
        only_recompute,
        "no plan" if only_offload is None else f"{100 * (only_offload.predicted_slowdown or 0.0):.2f}",
        _percent(joint),
        f"{(joint.predicted_host_bytes or 0) / 2**30:.1f}",
        f"{seconds:.1f}",
        *others,
    ]


def _percent(plan: Plan) -> str:
    bound = "" if plan.bound_slowdown is None else f" ({100 * plan.bound_slowdown:.2f})"
    return f"{100 * (plan.predicted_slowdown or 0.0):.2f}{bound}"


def _print_timed(flags: Flags, console: Console) -> None:
    rate = flags.bytes_per_s
    carriers.CARRIERS["cpu"] = lambda: SlowCarrier(rate, rate)
    # One thread computes, and leaves a core to the two that copy.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = NAMED_CONFIGS["llama-tiny"].changed(
        num_layers=8, hidden_size=512, num_attention_heads=8, num_query_groups=8, ffn_hidden_size=1376, vocab_size=2048
    )
    model = GPTModel(config)
    tokens = torch.randint(0, 2048, (2, 512))
    batch = {"tokens": tokens, "labels": tokens}
    profile = recollect.record(model, batch, holds_output=False, gradients="freed")
    profile = replace(profile, to_host_bytes_per_s=rate, from_host_bytes_per_s=rate, host_latency_s=1e-5)
    plain, planner = Planner(profile), OffloadPlanner(profile, MANY_BYTES)
    table = Table(
        title=f"{rate / 1e9:g} GB/s, step {profile.step_s:.2f} s; slowdown in %, predicted, and measured as median (p20 to p80)"
    )
    for heading in ("budget", "plan", "predicted", "measured", "identical pair", "waited ms", "bits"):
        table.add_column(heading, justify="right")
    for share in flags.shares:
        working_bytes = plain.plain_peak_bytes - profile.persistent_bytes
        budget_bytes = int(profile.persistent_bytes + share * working_bytes)
        plans = {
            "recompute": _plan_within(plain, budget_bytes),
            "offload": planner.offloading(Plan({}), budget_bytes),
            "joint": _plan_within(planner, budget_bytes),
        }
        for row in _timed(model, batch, {name: plan for name, plan in plans.items() if plan is not None}, flags.rounds):
            table.add_row(f"{share:.0%}", *row)
    console.print(table)


def _plan_within(planner: Planner | OffloadPlanner, budget_bytes: int) -> Plan | None:
    try:
        return planner.plan(budget_bytes)
    except BudgetTooSmallError:
        return None


def _timed(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], plans: dict[str, Plan], rounds: int
) -> Sequence[tuple[str, ...]]:
    expected = _gradients(model, batch)
    seconds: dict[tuple[str, int], list[float]] = {(name, copy): [] for name in plans for copy in range(2)}
    plain_s: list[float] = []
    waited_s: dict[str, list[float]] = {name: [] for name in plans}
    equal = dict.fromkeys(plans, True)
    for _ in range(rounds):
        plain_s.append(_step_s(model, batch))
        for (name, _), own_s in seconds.items():
            with recollect.apply(model, plans[name]) as applied:
                _step_s(model, batch)  # Its host memory is touched for the first time.
                before = applied.host_use.stalled_s if applied.host_use else 0.0
                own_s.append(_step_s(model, batch))
                waited_s[name].append((applied.host_use.stalled_s if applied.host_use else 0.0) - before)
                equal[name] &= all(
                    map(torch.equal, expected, [p.grad for p in model.parameters() if p.grad is not None])
                )
    rows = []
    for name, plan in plans.items():
        ratios = [[s / p - 1 for s, p in zip(seconds[name, copy], plain_s, strict=True)] for copy in range(2)]
        low, _, _, high = statistics.quantiles(ratios[0], n=5)
        rows.append(
            (
                name,
                f"{100 * (plan.predicted_slowdown or 0.0):.1f}",
                f"{100 * statistics.median(ratios[0]):.1f} ({100 * low:.1f} to {100 * high:.1f})",
                f"{100 * statistics.median(ratios[1]):.1f}",
                f"{1000 * statistics.median(waited_s[name]):.1f}",
                "equal" if equal[name] else "DIFFERENT",
            )
        )
    return rows


def _step_s(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    model.zero_grad()
    begin = time.perf_counter()
    model(**batch).loss.backward()
    return time.perf_counter() - begin


def _gradients(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    _step_s(model, batch)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


if __name__ == "__main__":
    main(parse(Flags, description=__doc__))
