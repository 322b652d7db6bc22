"""What docs/gpu.md says of each part: rows of its file as Markdown tables, measured beside predicted."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable

from gpu.measured import Measured
from recollect.byte_format import format_bytes
from recollect.quantities import format_seconds

__all__ = ["TABLES"]


def _markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" + "|--:" * (len(header) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.1f} %"


def _bytes(number: float | None) -> str:
    return "" if number is None else format_bytes(round(number))


def _seconds(number: float | None) -> str:
    return "" if number is None else format_seconds(number)


def _bits(found: Measured, name: str) -> str:
    equal = found.number("equal", name)
    return "" if equal is None else "yes" if equal else "NO"


def _skipped(found: Measured) -> str:
    lines = [f"- {name}: {why}" for name, why in found.of("skipped").items()]
    return "\n".join(["", "", *lines]) if lines else ""


def _left_out(found: Measured) -> str:
    """Name what did not run, and why."""
    kinds = ("left_out", "out_of_memory", "failed")
    lines = [f"- {name}: {kind.replace('_', ' ')}: {why}" for kind in kinds for name, why in found.of(kind).items()]
    return "\n".join(["", "", "Not measured:", "", *lines]) if lines else ""


def tests(found: Measured) -> str:
    """Count outcomes; list what failed, and why tests were skipped."""
    outcomes = found.of("outcome")
    counts = Counter(outcome.partition(":")[0] for outcome in outcomes.values())
    text = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())) + "."
    failed = [f"- {name}: {why}" for name, why in outcomes.items() if why.startswith("failed")]
    skipped = Counter(why for why in outcomes.values() if why.startswith("skipped"))
    lines = [*failed, *(f"- {number} x {why}" for why, number in skipped.items())]
    return "\n".join([text, "", *lines]) if lines else text


def calibrate(found: Measured) -> str:
    """Modelled over measured time by kind of op, and what plans lose."""
    rows = []
    for kind in found.of("fit_ratio"):
        cells = [found.number(metric, kind) for metric in ("fit_ratio", "fit_factor", "table_ratio", "table_factor")]
        rows.append((kind, *("" if cell is None else f"{cell:.2f}" for cell in cells)))
    text = "Modelled over measured time of ops, medians, and by what factor it is off in the median:\n\n"
    text += _markdown(("kind of op", "fit", "off by", "table", "off by"), rows)
    losses = []
    for model, ratio in found.of("step_ratio").items():
        cells = [f"{float(ratio):.2f}", _percent(found.number("op_error_median", model))]
        for suffix in ("", ", times of the table"):
            lost = [found.number(f"regret_{percent}", model + suffix) for percent in (75, 50, 25)]
            cells.append(" / ".join("" if one is None else f"{100 * one:.2f}" for one in lost) + " %")
        losses.append((model, *cells))
    header = ("model", "step, modelled / measured", "op error, median", "regret at 75 / 50 / 25 %", "with the table")
    return f"{text}\n\nWhat plans lose that are chosen with modelled times:\n\n{_markdown(header, losses)}{_left_out(found)}"


def prediction(found: Measured) -> str:
    """A line for each model and optimizer: how far peaks and slowdowns were off."""
    cases: dict[str, list[str]] = {}
    for name in found.of("allocated_peak"):
        cases.setdefault(name.rpartition(", ")[0], []).append(name)
    rows = []
    for case, names in cases.items():
        peaks = [(found.number("allocated_peak", n) or 0, found.number("predicted_peak", n) or 0) for n in names]
        off = [measured - predicted for measured, predicted in peaks]
        reserved = [
            (found.number("reserved_peak", n) or 0) / peak
            for n, (peak, _) in zip(names, peaks, strict=True)
            if n in found.of("reserved_peak")
        ]
        slow = [
            abs(measured - (found.number("predicted_slowdown", n) or 0))
            for n in names
            if (measured := found.number("measured_slowdown", n)) is not None
        ]
        rows.append(
            (
                case,
                str(len(names)),
                str(sum(found.of("over_budget")[n] == "1" for n in names)),
                f"{_bytes(max(predicted for _, predicted in peaks))} to {_bytes(min(predicted for _, predicted in peaks))}",
                f"{_bytes(min(off))} .. {_bytes(max(off))}",
                f"{statistics.median(reserved):.3f}" if reserved else "",
                f"{100 * statistics.median(slow):.1f} points" if slow else "",
            )
        )
    header = ("model, optimizer", "plans", "over budget", "predicted peaks", "measured less predicted")
    return _markdown((*header, "reserved / allocated", "slowdown off by"), rows) + _left_out(found)


def offload(found: Measured) -> str:
    """The link, then plans that recompute beside plans that use host memory, too."""
    rates = [f"{(found.number(metric, 'link') or 0) / 1e9:.1f} GB/s" for metric in ("to_host", "from_host")]
    rows = []
    for name in found.of("allocated_peak"):
        cells = [_bytes(found.number(metric, name)) for metric in ("predicted_peak", "allocated_peak", "host_bytes")]
        cells += [_percent(found.number(metric, name)) for metric in ("predicted_slowdown", "measured_slowdown")]
        rows.append((name, *cells, _bits(found, name)))
    header = (
        "model, plan",
        "predicted peak",
        "measured",
        "in host memory",
        "slowdown predicted",
        "measured",
        "bits equal",
    )
    return f"Copies: {rates[0]} to the host, {rates[1]} back.\n\n{_markdown(header, rows)}{_left_out(found)}"


def fp8(found: Measured) -> str:
    """Recipes: bits and peaks under plans, and how far the kernels are from the emulation."""
    rows = []
    for name in found.of("equal"):
        case = name.rpartition(", ")[0]
        cells = [_bytes(found.number(metric, name)) for metric in ("predicted_peak", "measured_peak")]
        distance = found.of("distance").get(case)
        cells += [_seconds(found.number("step", case)), "" if distance is None else f"{float(distance):.1e}"]
        rows.append((name, _bits(found, name), *cells))
    header = ("model, recipe, plan", "bits equal", "predicted peak", "measured", "plain step", "loss off the emulation")
    return _markdown(header, rows) + _skipped(found) + _left_out(found)


def overhead(found: Measured) -> str:
    """Microseconds an op, then the sizes."""
    per_op = [(name, f"{float(value):.1f} us") for name, value in found.of("tiny_added_time_per_op").items()]
    text = f"Added time per op on tiny tensors:\n\n{_markdown(('', 'per op'), per_op)}\n\nBy size, bf16, 4 layers:\n\n"
    rows = []
    for size, step_s in found.of("step_time").items():
        slow = [
            found.number("slowdown", f"{size}, {who}")
            for who in ("tape, keeps all", "tape, keeps nothing", "checkpoint")
        ]
        launched = found.number("launched_after", f"{size}, plain")
        rows.append((size, _seconds(float(step_s)), _seconds(launched), *(_percent(one) for one in slow)))
    header = ("size", "step", "launched after", "idle tape", "tape, keeps nothing", "checkpoint")
    return text + _markdown(header, rows) + _left_out(found)


def engines(found: Measured) -> str:
    """Peers, then plans on the tape and from traces at each peer's peak; then what a traced unit saves beside the plan."""
    rows = []
    for name, peak in found.of("peak").items():
        ratio = found.number("to_plain", name)
        cells = [_bytes(float(peak)), _bytes(found.number("first_peak", name)), _bytes(found.number("two_peak", name))]
        cells += [_seconds(found.number(metric, name)) for metric in ("host_time", "step_time")]
        cells += ["" if ratio is None else f"{ratio:.3f}", _bits(found, name)]
        rows.append((name, *cells))
    header = ("way", "peak", "of the first steps", "of two micro-batches", "host", "step", "to plain", "bits equal")
    traced = []
    for name, asked in found.of("units_asked").items():
        number = found.of("units_traced").get(name, "0")
        cells = [f"{number} of {asked}", _seconds(found.number("tracing", name))]
        cells += [_bytes(found.number(metric, name)) for metric in ("saved_bytes", "kept_bytes")]
        cells += [found.of(metric).get(name, "") for metric in ("saved_only", "kept_only", "why_not")]
        traced.append((name, *cells))
    header_traced = (
        "way",
        "units traced",
        "in",
        "a unit saves",
        "the plan keeps",
        "only saved",
        "only kept",
        "why not",
    )
    return f"{_markdown(header, rows)}\n\n{_markdown(header_traced, traced)}{_left_out(found)}"


def engines_random(found: Measured) -> str:
    """How many tensors of all steps are equal to the plain model's."""
    rows = []
    for name, number in found.of("num_different").items():
        cells = [f"{number} of {found.of('num_compared').get(name, '')}"]
        cells += [found.of(metric).get(name, "") for metric in ("first_difference", "units_traced", "why_not")]
        rows.append((name, *cells))
    header = ("model, engine", "different", "the first", "units traced", "why not")
    return _markdown(header, rows) + _skipped(found) + _left_out(found)


def claims(found: Measured) -> str:
    """Measured beside modelled."""
    rows = []
    for name in found.of("saved"):
        part, _, rest = name.partition(" / ")
        if part != "measured":
            continue
        modelled = f"modelled / {rest}"
        spread = [found.number(f"slowdown_p{percent}", name) for percent in (20, 80)]
        rows.append(
            (
                rest.replace(" / ", ", "),
                _percent(found.number("saved", name)),
                _percent(found.number("saved", modelled)),
                _percent(found.number("slowdown", name)),
                " .. ".join(_percent(one) for one in spread),
                _percent(found.number("slowdown", modelled)),
            )
        )
    header = ("model, setting", "saved", "modelled", "slowdown", "20 .. 80", "modelled")
    return _markdown(header, rows) + _left_out(found)


def frontier(found: Measured) -> str:
    """Budgets, then peers at their own peaks."""
    budgets = []
    for budget, peer in found.of("fastest_peer").items():
        ratio = found.number("recollect_time_ratio_at_equal_peak", budget)
        slowdown = found.number("slowdown", peer)
        budgets.append((budget, peer, _percent(slowdown), "" if ratio is None else f"{100 * (ratio - 1):+.1f} %"))
    text = "The fastest peer within each budget, and the step time of recollect's plan against it:\n\n"
    text += _markdown(("budget", "fastest peer", "its slowdown", "recollect's step time"), budgets)
    rows = []
    for peer, ratio in found.of("recollect_time_ratio_at_equal_peak").items():
        if peer.startswith("budget"):
            continue
        spread = [found.number(f"recollect_time_ratio_at_equal_peak_p{percent}", peer) for percent in (20, 80)]
        cells = [_bytes(found.number("peak", peer)), _percent(found.number("slowdown", peer))]
        cells += [f"{100 * (float(ratio) - 1):+.1f} %"]
        cells += [" .. ".join("" if one is None else f"{100 * (one - 1):+.1f}" for one in spread)]
        rows.append((peer, *cells))
    header = ("peer", "its peak", "its slowdown", "recollect's step time at that peak", "20 .. 80")
    return f"{text}\n\n{_markdown(header, rows)}{_left_out(found)}"


def capture(found: Measured) -> str:
    """Captured steps: what each pool takes, how long a replay does, and its bits."""
    rows = []
    for name in found.of("step_time"):
        cells = [_bytes(found.number(metric, name)) for metric in ("pool", "predicted_pool")]
        cells += [_seconds(found.number("step_time", name)), f"{found.number('to_plain', name):.3f}"]
        rows.append((name, *cells, str(found.of("equal_gradients").get(name, ""))))
    header = ("captured step", "pool", "predicted", "step", "to plain, captured", "equal gradients")
    return _markdown(header, rows) + _left_out(found)


def compiled(found: Measured) -> str:
    """Variants, and eager plans at their peaks."""
    rows = []
    for name in found.of("compile_time"):
        eager = f"recollect, eager / {name}"
        ratio = found.number("time_ratio_at_equal_peak", eager)
        cells = [_bytes(found.number("peak", name)), _seconds(found.number("compile_time", name))]
        cells += [_percent(found.number("slowdown", name)), "" if ratio is None else f"{100 * (ratio - 1):+.1f} %"]
        rows.append((name, *cells))
    header = ("variant", "its peak", "compiled in", "slowdown against eager", "eager plan's step time at that peak")
    return _markdown(header, rows) + _left_out(found)


TABLES: dict[str, Callable[[Measured], str]] = {
    "tests": tests,
    "calibrate": calibrate,
    "prediction": prediction,
    "offload": offload,
    "fp8": fp8,
    "overhead": overhead,
    "engines-2048": engines,
    "engines-4096": engines,
    "engines-random": engines_random,
    "capture": capture,
    "claims": claims,
    "frontier-dense": frontier,
    "frontier-moe": frontier,
    "frontier-mla": frontier,
    "frontier-7b": frontier,
    "compiled": compiled,
}
