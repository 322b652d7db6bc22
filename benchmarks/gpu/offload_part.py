"""Host memory: the link, what it takes to register memory, and plans that recompute against plans that offload, too.

Predicted against measured peak and slowdown, as in the part "prediction"; gradients against those of the plain step, bit for
bit; how much was in host memory, and how many values were asked for at another moment than planned.
"""

from __future__ import annotations

import time
from dataclasses import astuple

import torch

import recollect
from gpu.part import Context, deterministic_kernels
from gpu.prediction_part import KEEP_ALL, Case, Loop, Row, cases, measured, table
from recollect.costs.host_copies import measure_host_link
from recollect.engine.offload.carriers import carrier_for
from recollect.errors import BudgetTooSmallError
from recollect.planning.planners import OffloadPlanner, planner_for
from recollect.plans.plan import Plan
from results_csv import Number

# Parts of what is not alive throughout.
_BUDGETS = (0.75, 0.5, 0.35, 0.25)
_REGISTERED_GIB = (1, 4, 16)


def run(context: Context) -> str:
    """Measure the link, then the models, those that say most first."""
    if context.begins("link"):
        context.attempt("link", lambda: _link(context))
    rows: list[Row] = []
    different: list[str] = []
    for case in cases(context)[: 2 if context.is_dry_run else None]:
        if context.begins(case.name):
            context.attempt(case.name, lambda case=case: _model(context, case, rows, different))  # type: ignore[misc]
    if not rows:
        return "no case ran"
    over = sum(row.is_over_budget for row in rows)
    bits = f"gradients DIFFER in {', '.join(different)}" if different else "gradients are equal bit for bit"
    return f"{len(rows)} plans, {over} over budget; {bits}"


def _link(context: Context) -> None:
    """Measure copies in both directions, and how long it takes to have host memory."""
    out, back, latency_s = astuple(measure_host_link(context.device))
    context.say(f"link: {out / 1e9:.1f} GB/s out, {back / 1e9:.1f} GB/s in, {1e6 * latency_s:.1f} us")
    numbers = [
        Number("to_host", "B/s", "link", out),
        Number("from_host", "B/s", "link", back),
        Number("latency", "s", "link", latency_s),
    ]
    for gib in _REGISTERED_GIB[:1] if context.is_dry_run else _REGISTERED_GIB:
        begin = time.perf_counter()
        memory = carrier_for(context.device).host_memory(gib * 2 ** (20 if context.is_dry_run else 30))
        numbers.append(Number("register", "s", f"{gib} GiB", time.perf_counter() - begin))
        context.say(f"registered {gib} GiB in {numbers[-1].value:.2f} s")
        del memory
    context.write(numbers, case="link")


def _model(context: Context, case: Case, rows: list[Row], different: list[str]) -> None:
    loop = Loop(case, None)
    with deterministic_kernels():
        expected = _gradients(loop)
    profile = recollect.record(loop.model, loop.batch, holds_output=False, gradients="freed", host_link=True)
    recompute, both = planner_for(profile), OffloadPlanner(profile, 2**36 if context.is_dry_run else 2**40)
    plans: dict[str, Plan] = {KEEP_ALL: recollect.classic_plan(profile, "keep_all")}
    working_bytes = recompute.plain_peak_bytes - profile.persistent_bytes
    for share in _BUDGETS[::2] if context.is_dry_run else _BUDGETS:
        budget_bytes = int(profile.persistent_bytes + share * working_bytes)
        for name, planner in (("recompute", recompute), ("both", both)):
            try:
                plans[f"{name} {share:.0%}"] = planner.plan(budget_bytes)
            except BudgetTooSmallError:
                context.say(f"{case.name}, {name} {share:.0%}: no plan")
    found = measured(loop, profile, plans, num_rounds=1 if context.is_dry_run else 5)
    numbers = [number for row in found for number in row.numbers(case.name)]
    for name, plan in plans.items():
        with recollect.apply(loop.model, plan) as applied, deterministic_kernels():
            got = _gradients(loop)
            use = applied.host_use
        if not all(map(torch.equal, expected, got)):
            different.append(f"{case.name}, {name}")
        numbers.append(Number("equal", "bool", f"{case.name}, {name}", int(f"{case.name}, {name}" not in different)))
        if use is not None:
            numbers.append(Number("host_bytes", "bytes", f"{case.name}, {name}", use.most_bytes))
            numbers.append(Number("missed", "1", f"{case.name}, {name}", use.num_missed))
    context.write(numbers, case=case.name, sizes=str(case.sizes))
    context.console.print(table(found, case.name))
    rows.extend(found)


def _gradients(loop: Loop) -> list[torch.Tensor]:
    loop.clear()
    loop.step.run()
    found = [p.grad.clone() for p in loop.model.parameters() if p.grad is not None]
    loop.clear()
    return found
