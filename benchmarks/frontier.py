"""Measure peak and step time of recollect, at the peaks of its peers and at budgets of 75 to 15 % of the activations.

    python benchmarks/frontier.py
    python benchmarks/frontier.py --redraw  # draw the pictures again from the last results

For each peer a plan is made whose budget is the peer's measured peak, and the two are timed side by side. Rules of the race:
`contest.py`; the peers: `peers.py`, `megatron_peers.py`, `milp.py`; what comes out: README.md.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.console import Console

from comparison import Comparison
from flags import RunFlags, parse
from models import DESCRIPTIONS, HUGGING_FACE, ModelName
from picture import draw
from recollect.lab.bench.race import few_objects, keep_freed_memory
from results_csv import Number, RowsFile, Source, machine_name, read_last
from subject import StepFlags
from tables import peak_numbers, report, time_numbers

_QUICK: dict[str, Any] = {"hidden_size": 32, "num_layers": 4, "vocab_size": 64, "seq_length": 64, "threads": 1}


@dataclass(frozen=True, kw_only=True)
class Flags(RunFlags):
    """Compare recollect's plans with recompute set up by hand, at equal peak and at equal time."""

    step: StepFlags = field(default_factory=partial(StepFlags, num_layers=16))
    """The training step."""
    models: tuple[ModelName, ...] = HUGGING_FACE
    """Models to run."""
    minutes: float = 6.5
    """Seconds of timed rounds per model; recording and measuring peaks take about a minute more."""
    num_budgets: int = 6
    """Number of further budgets to measure for the line in the picture."""
    peers: tuple[str, ...] = ()
    """Peers to run, by name; all if empty."""
    redraw: bool = False
    """Measure nothing, and draw the pictures again from the last results for these models and sizes in `frontier.csv`."""
    quick: bool = False
    """Tiny sizes and one round, as a smoke test; times are meaningless."""


@few_objects()
def run_model(flags: Flags, model: ModelName, console: Console, rows: RowsFile | None = None) -> Comparison:
    """Run one model; write rows as soon as they are known, by default to `frontier.csv` in the folder of the flags."""
    console.print(f"{DESCRIPTIONS[model]}: {flags.step}", style="bold")
    found = Comparison(flags.step, model, lambda text: console.print(text, style="dim", highlight=False))
    rows = rows or RowsFile(flags.out / "frontier.csv", _config(flags, model))
    found.prepare(flags.peers, num_budgets=flags.num_budgets)
    rows.append(peak_numbers(found))
    found.run(seconds=60 * flags.minutes, least_rounds=flags.least_rounds)
    rows.append(time_numbers(found))
    here = Source(machine=machine_name(flags.step.device), torch=torch.__version__)
    _draw(flags, model, [*peak_numbers(found), *time_numbers(found)], here)
    console.print(report(found), highlight=False, soft_wrap=True, markup=False)
    return found


def redraw(flags: Flags, model: ModelName, console: Console) -> None:
    """Draw one model's picture from its last rows for the sizes of the flags."""
    path = flags.out / "frontier.csv"
    peaks, _ = read_last(path, _config(flags, model), "resident")
    times, source = read_last(path, _config(flags, model), "slowdown")
    if source is None:
        console.print(f"{path}: no step times of {model} at these sizes: {flags.step}", soft_wrap=True)
        return
    _draw(flags, model, [*peaks, *times], source)


def _config(flags: Flags, model: ModelName) -> dict[str, Any]:
    return {**dataclasses.asdict(flags.step), "model": model}


def _draw(flags: Flags, model: ModelName, numbers: list[Number], source: Source) -> None:
    sizes = flags.step
    device = sizes.device.partition(":")[0]
    name = f"frontier-{model}-{device}-{sizes.dtype}-d{sizes.hidden_size}-l{sizes.num_layers}.png"
    note = f"{sizes}; eager, PyTorch {source.torch}, {source.machine}"
    draw(numbers, flags.out / name, title=DESCRIPTIONS[model], note=note)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark with the flags of the command line."""
    flags = parse(Flags, __doc__, arguments)
    keep_freed_memory()
    if flags.quick:
        step = dataclasses.replace(flags.step, **_QUICK)
        flags = dataclasses.replace(flags, step=step, minutes=0.0, least_rounds=1, num_budgets=2)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl+C, end a race and keep its results
    console = Console(width=None if sys.stdout.isatty() else 140)
    for model in flags.models:
        if flags.redraw:
            redraw(flags, model, console)
        elif run_model(flags, model, console).race.is_interrupted:
            break
    if not flags.redraw:
        console.print(f"appended to {flags.out / 'frontier.csv'}", soft_wrap=True)


if __name__ == "__main__":
    main()
