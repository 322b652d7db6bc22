"""Format a comparison as Markdown tables and as rows of numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from comparison import BudgetMatch, Comparison, Match
from contest import TIMES_FURTHER, Contestant, percentile
from models import DESCRIPTIONS
from recollect.byte_format import format_bytes
from results_csv import Number


def markdown(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Format a table with the first column aligned left."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|--:" * (len(header) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def peers_table(found: Comparison) -> str:
    """Compare each peer with recollect at equal peak and at equal time; peaks are in % of the plain step's activations."""
    header = (
        "peer",
        "its peak",
        "its slowdown",
        "recollect at that peak",
        "step time",
        "spread",
        "rounds",
        "at its time",
    )
    runs = [match for match in found.matches if match.contestant is not None]
    runs.sort(key=lambda match: -match.contestant.peak_bytes if match.contestant else 0)
    rows = [_peer_row(found, match) for match in runs]
    rows += [(m.peer.name, m.failure, "", "", "", "", "", "") for m in found.matches if m.contestant is None]
    return markdown(rows, header)


def _peer_row(found: Comparison, match: Match) -> tuple[str, ...]:
    peer, ours = match.contestant, match.ours
    assert peer is not None
    # Two plain steps may differ, too: on CUDA the backward of fused attention adds with atomics.
    is_off = peer.differs_at is not None and not peer.difference <= TIMES_FURTHER * found.plain.difference
    name = match.peer.name + (f" (gradients differ by {peer.difference:.0e})" if is_off else "")
    row = [name, _percent(found, peer.peak_bytes), _slowdown(peer)]
    if ours is None:
        row += [f"needs {_percent(found, match.least_bytes)}", "", "", ""]
    else:
        ratios = ours.time_ratios_to(peer)
        row += [_slowdown(ours), _ratio(ratios), _spread(ratios), str(len(ratios))]
    smallest = found.smallest_at_time(peer) if peer.ratios else None
    return (*row, "" if smallest is None else f"{_percent(found, smallest.peak_bytes)}")


def budgets_table(found: Comparison) -> str:
    """Compare recollect's plan for each budget with the fastest peer that fits."""
    header = (
        "budget",
        "recollect",
        "measured peak",
        "fastest peer within",
        "its slowdown",
        "step time",
        "spread",
        "rounds",
    )
    return markdown([_budget_row(found, budget) for budget in found.budgets], header)


def _budget_row(found: Comparison, budget: BudgetMatch) -> tuple[str, ...]:
    row = [f"{budget.fraction:.0%}: {format_bytes(budget.budget_bytes)}"]
    ours, rival = budget.ours, budget.rival
    if ours is None:
        row += [f"below the least possible peak, {_percent(found, budget.least_bytes)}", ""]
    else:
        row += [_slowdown(ours), _percent(found, ours.peak_bytes)]
    if rival is None:
        return (*row, "none fits", "", "", "", "")
    ratios = ours.time_ratios_to(rival) if ours is not None else []
    return (*row, rival.name, _slowdown(rival), _ratio(ratios), _spread(ratios), str(len(ratios)))


def losses(found: Comparison) -> list[str]:
    """Name the peers that were faster at equal peak, and those too close to tell."""
    lines = []
    for match in found.matches:
        if match.contestant is None or match.ours is None:
            continue
        ratios = match.ours.time_ratios_to(match.contestant)
        if not ratios or percentile(ratios, 50) < 1:
            continue
        verdict = "is faster" if percentile(ratios, 20) > 1 else "is within the spread"
        lines.append(f"{match.peer.name} {verdict}: recollect's step takes {_ratio(ratios)} ({_spread(ratios)})")
    return lines


def report(found: Comparison) -> str:
    """Format the comparison of one model."""
    plain_s = statistics.median(found.race.plain_s) if found.race.plain_s else float("nan")
    resident = format_bytes(found.step.resident_bytes)
    text = f"### {DESCRIPTIONS[found.step.model_name]}\n\n{found.step.flags}. The step without recompute takes {plain_s:.3f} s "
    text += (
        f"and peaks at {format_bytes(found.plain.peak_bytes)}: {resident} of parameters, gradients, buffers and batch, "
    )
    text += f"and {format_bytes(found.activation_bytes)} of activations, of which peaks and budgets are percents.\n\n"
    text += f"{budgets_table(found)}\n\n{peers_table(found)}\n"
    if found.num_over_budget:
        text += f"\nOVER BUDGET: {found.num_over_budget} plans.\n"
    return text + "".join(f"\n- {line}" for line in losses(found)) + "\n"


def _percent(found: Comparison, peak_bytes: int) -> str:
    return f"{(peak_bytes - found.step.resident_bytes) / found.activation_bytes:.1%}".replace("%", " %")


def _slowdown(one: Contestant) -> str:
    return f"{one.slowdown:.1%}".replace("%", " %") if one.ratios else "not timed"


def _ratio(ratios: Sequence[float]) -> str:
    return f"{percentile(ratios, 50) - 1:+.1%}".replace("%", " %") if ratios else ""


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    low, high = (f"{percentile(ratios, percent) - 1:+.1%}".replace("%", "") for percent in (20, 80))
    return f"{low} .. {high} %"


def peak_numbers(found: Comparison) -> list[Number]:
    """Return the rows known before the race: peaks, gradients, and failures."""
    rows = [
        Number("peak", "bytes", found.plain.name, found.plain.peak_bytes),
        Number("resident", "bytes", found.plain.name, found.step.resident_bytes),
        Number("repeats_itself", "bool", found.plain.name, int(found.plain.differs_at is None)),
        Number("gradients_largest_difference", "1", found.plain.name, found.plain.difference),
    ]
    for one in [*found.peers, *found.recollect]:
        rows += [Number("peak", "bytes", one.name, one.peak_bytes)]
        rows += [Number("gradients_equal", "bool", one.name, int(one.differs_at is None))]
        rows += [Number("gradients_largest_difference", "1", one.name, one.difference)]
        if one.plan is not None:
            rows += [Number("predicted_peak", "bytes", one.name, one.plan.predicted_peak_bytes or 0)]
            rows += [Number("predicted_slowdown", "1", one.name, one.plan.predicted_slowdown or 0.0)]
    for budget in found.budgets:
        name = f"budget {budget.fraction:.0%}"
        rows += [Number("budget", "bytes", name, budget.budget_bytes)]
        rows += [Number("least_peak", "bytes", name, budget.least_bytes)] if budget.ours is None else []
    for match in found.matches:
        rows += [Number("failed", "text", match.peer.name, match.failure)] if match.failure else []
        rows += [Number("least_peak", "bytes", match.peer.name, match.least_bytes)] if match.least_bytes else []
    return rows


def time_numbers(found: Comparison) -> list[Number]:
    """Return the rows of the races."""
    rows = (
        [Number("step_time", "s", found.plain.name, statistics.median(found.race.plain_s))]
        if found.race.plain_s
        else []
    )
    for one in [*found.peers, *found.recollect]:
        rows += one.numbers()
    for match in found.matches:
        if match.contestant is not None and match.contestant.ratios:
            rows += _against(match.peer.name, match.ours, match.contestant)
            smallest = found.smallest_at_time(match.contestant)
            rows += (
                [Number("recollect_peak_at_equal_time", "bytes", match.peer.name, smallest.peak_bytes)]
                if smallest
                else []
            )
    for budget in found.budgets:
        if budget.rival is not None:
            name = f"budget {budget.fraction:.0%}"
            rows += [
                Number("fastest_peer", "text", name, budget.rival.name),
                *_against(name, budget.ours, budget.rival),
            ]
    return rows


def _against(name: str, ours: Contestant | None, peer: Contestant) -> list[Number]:
    ratios = ours.time_ratios_to(peer) if ours is not None else []
    if ours is None or not ratios:
        return []
    rows = [Number("recollect_peak_at_equal_peak", "bytes", name, ours.peak_bytes)]
    rows += [Number("recollect_time_ratio_at_equal_peak", "1", name, percentile(ratios, 50))]
    rows += [Number(f"recollect_time_ratio_at_equal_peak_p{p}", "1", name, percentile(ratios, p)) for p in (20, 80)]
    return [*rows, Number("rounds_at_equal_peak", "1", name, len(ratios))]
