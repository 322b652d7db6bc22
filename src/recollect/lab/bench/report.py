"""Format results as a table: for a terminal, as Markdown, as CSV. Imports no torch."""

import csv
import io
from collections.abc import Callable

from rich.table import Table

from recollect.byte_format import format_bytes
from recollect.lab.bench.results import BenchResults, Row
from recollect.quantities import format_seconds

_NONE = "-"
_BORDER = 3  # of a column, with its padding
# By heading; where there is little room, the first is left out first. A spread is called like the other.
_LEFT_OUT_FIRST = (
    "reserved",
    "hardware TFLOP/s",
    "20..80 %",
    "predicted peak",
    "predicted",
    "tokens/s",
    "TFLOP/s/device",
    "vs golden",
)
_COLORS = {"ok": "", "faster": "green", "perf regression": "red", "memory regression": "red"}


def title(results: BenchResults) -> str:
    workload = {key: value for key, value in results.workload.items() if not isinstance(value, dict)}
    text = ", ".join(str(value) if key == "model" else f"{key} {value}" for key, value in workload.items())
    machine = ", ".join(f"{key} {value}" if key != "device" else str(value) for key, value in results.machine.items())
    return f"{text}; {machine}, torch {results.versions.get('torch', 'unknown')}"


def _heads_and_rows(results: BenchResults) -> tuple[list[str], list[list[str]]]:
    """Return the headings, and the rows; the first and the last column are text, all others numbers."""

    def of_others(text: Callable[[Row], str]) -> Callable[[Row], str]:
        return lambda row: _NONE if row.name == results.reference else text(row)

    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("setting", lambda row: row.name),
        ("TFLOP/s/device", lambda row: shown(_digits, row.tflops)),
        ("hardware TFLOP/s", lambda row: shown(_digits, row.hardware_tflops)),
        *([("vs golden", _versus)] if results.golden else []),
        ("step", lambda row: shown(format_seconds, row.step_s)),
        ("20..80 %", lambda row: shown(_times, row.step_p20_s, row.step_p80_s)),
        ("tokens/s", lambda row: shown("{:,.0f}".format, row.tokens_per_s)),
        (f"vs {results.reference}", of_others(lambda row: shown(signed_percent, row.slowdown))),
        ("20..80 %", of_others(lambda row: shown(_spread, row.slowdown_p20, row.slowdown_p80))),
        ("predicted", lambda row: shown(signed_percent, row.predicted_slowdown or None)),
        ("peak mem", lambda row: shown(format_bytes, row.peak_bytes)),
        ("predicted peak", lambda row: shown(format_bytes, row.predicted_peak_bytes)),
        ("reserved", lambda row: shown(format_bytes, row.reserved_bytes)),
        ("result", lambda row: row.result),
    ]
    return [head for head, _ in columns], [[text(row) for _, text in columns] for row in results.rows]


def result_table(results: BenchResults, width: int | None = None) -> Table:
    """Return the table for a terminal; columns beyond its width are left out, and named below the table."""
    heads, rows = _heads_and_rows(results)
    shown = list(range(len(heads)))
    left_out = []
    for head in _LEFT_OUT_FIRST:
        if width is None or _width([heads[i] for i in shown], [[row[i] for i in shown] for row in rows]) <= width:
            break
        if head in heads:
            shown = [i for i in shown if heads[i] != head]
            left_out.append(head)
    caption = f"Left out for lack of room: {', '.join(left_out)}. --out FILE.md has all." if left_out else None
    table = Table(title="Measured results", title_justify="left", caption=caption, caption_justify="left")
    for i in shown:
        is_text = heads[i] in ("setting", "result")
        table.add_column(heads[i], justify="left" if is_text else "right", overflow="fold")
    for row, texts in zip(results.rows, rows, strict=True):
        table.add_row(*(texts[i] for i in shown), style=_COLORS.get(row.result, "yellow"))
    return table


def _width(heads: list[str], rows: list[list[str]]) -> int:
    """Return the width of a table whose headings may be broken between words."""
    widths = [max(len(text) for text in (*head.split(), *texts)) for head, *texts in zip(heads, *rows, strict=True)]
    return sum(widths) + _BORDER * len(widths) + 1


def as_markdown(results: BenchResults) -> str:
    heads, rows = _heads_and_rows(results)
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|--:" * (len(heads) - 2) + "|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([f"{title(results)}.", "", *lines, "", *(f"- {note}" for note in notes(results))]) + "\n"


def as_csv(results: BenchResults) -> str:
    """Return the rows with all their numbers, unrounded, in bytes, seconds and FLOPs."""
    names = (
        "name result note tflops hardware_tflops versus_golden golden_name step_s step_p20_s step_p80_s tokens_per_s slowdown "
        "slowdown_p20 slowdown_p80 predicted_slowdown peak_bytes predicted_peak_bytes reserved_bytes model_flops "
        "hardware_flops num_tokens"
    ).split()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([getattr(row, name) for name in names] for row in results.rows)
    return text.getvalue()


def notes(results: BenchResults) -> list[str]:
    lines = [
        f"Medians of {results.rounds} rounds in turns; slowdowns are medians of ratios to the steps of {results.reference!r} "
        "right before and after. A step is forward, loss, backward and AdamW; predicted slowdowns are of forward and backward.",
        "TFLOP/s/device counts the FLOPs the model requires; hardware TFLOP/s all that ran, including recompute by plans and "
        "inside attention kernels.",
    ]
    if any(row.peak_bytes is not None and row.reserved_bytes is None for row in results.rows):
        lines.append("reserved: not applicable on a CPU, whose allocator reserves no memory.")
    if results.memory_limit_bytes is not None:
        lines.append(f"Peaks above {format_bytes(results.memory_limit_bytes)} (--memory-limit) count as OOM.")
    if results.golden:
        lines.append(f"Golden results: {results.golden}, threshold {results.threshold:.1%}.")
    lines += [f"{row.name}: {row.note}." for row in results.rows if row.note]
    return lines


def shown(text: Callable[..., str], *numbers: float | None) -> str:
    """Return numbers as text, "-" where one is missing."""
    return _NONE if None in numbers else text(*numbers)


def _versus(row: Row) -> str:
    of = "" if row.golden_name == row.name else f" (of {row.golden_name})"
    return shown(lambda versus: signed_percent(versus) + of, row.versus_golden)


def _digits(number: float) -> str:
    """Format a number with at least three significant digits: 704.0, 59.4, 0.0213."""
    return f"{number:.1f}" if number >= 100 else f"{number:.3g}"


def signed_percent(fraction: float) -> str:
    return f"{fraction:+.1%}".replace("%", " %")


def _spread(low: float, high: float) -> str:
    return f"{100 * low:+.1f}..{100 * high:+.1f}"


def _times(low_s: float, high_s: float) -> str:
    return f"{format_seconds(low_s)}..{format_seconds(high_s)}"
