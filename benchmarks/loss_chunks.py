"""Peak and step time against the number of chunks of the loss, for vocabularies of 32 and 128 thousand words.

    python benchmarks/loss_chunks.py

The reference Llama, nothing recomputed; what changes is in how many parts output matrix and cross entropy run. Bytes are
exact on the CPU and the same on every machine. Times are medians over rounds of the ratio to the step in one piece that ran
beside each (`contest.py`). The last column is how far the gradients are from those in one piece: the largest difference
of a gradient over its largest entry.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

import recollect
from contest import Contestant, Race
from flags import MachineFlags, RunFlags
from recollect.bench.machine import keep_freed_memory
from recollect.plan import Plan
from recollect.quantities import format_bytes
from recompute import Nothing, OnTape
from results_csv import Number, append, machine_name
from subject import Step, StepFlags, largest_difference


@dataclass(frozen=True, kw_only=True)
class Flags(MachineFlags, RunFlags):
    """What is measured."""

    vocab_sizes: tuple[int, ...] = (32_768, 131_072)
    """Words."""
    chunks: tuple[int, ...] = (2, 8, 32)
    """Parts of the loss, beside one."""
    hidden_size: int = 512
    """Width of the residual stream."""
    num_layers: int = 2
    """Decoder layers."""
    batch_size: int = 2
    """Sequences."""
    seq_length: int = 512
    """Tokens in a sequence."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of activations and matrix products; weights are fp32."""
    minutes: float = 0.4
    """Time for the rounds of each vocabulary."""
    least_rounds: int = 2
    """Rounds at least; 0 measures bytes only."""

    def step(self, vocab_size: int) -> Step:
        """Return the step with so many words."""
        same = {field.name for field in dataclasses.fields(StepFlags)} & {
            field.name for field in dataclasses.fields(self)
        }
        return Step(StepFlags(vocab_size=vocab_size, **{name: getattr(self, name) for name in same}))


def measure(flags: Flags, vocab_size: int, console: Console) -> tuple[Table, list[Number]]:
    """Measure one vocabulary; return the table to print and the rows to keep."""
    step = flags.step(vocab_size)
    plain = step.gradients()
    one = Contestant(name="1", recompute=Nothing(), peak_bytes=step.peak_bytes())
    contestants = [one]
    for count in flags.chunks:
        contestant = Contestant(
            name=str(count), recompute=OnTape(recollect.apply(step.model, Plan({}, loss_chunks=count)))
        )
        with contestant.recompute.on():
            contestant.peak_bytes = step.peak_bytes()
            contestant.difference = largest_difference(plain, step.gradients())
        contestants.append(contestant)
    del plain
    step.clear()
    race = Race(step, lambda text: console.print(f"  {text}", style="dim"))
    if flags.least_rounds:
        race.run([contestants[1:]], seconds=60 * flags.minutes, least_rounds=flags.least_rounds)
    table = Table(
        "chunks", "peak", "of one piece", "step time", "20 % to 80 %", "gradients off by", title=str(step.flags)
    )
    rows = []
    for contestant in contestants:
        name = f"{contestant.name} of {vocab_size}"
        rows += [
            Number("peak", "bytes", name, contestant.peak_bytes),
            Number("gradients_off_by", "1", name, contestant.difference),
        ]
        time, spread = "", ""
        if contestant.ratios:
            low, high = contestant.percentile(20), contestant.percentile(80)
            time, spread = f"{contestant.slowdown:+.1%}", f"{low:+.1%} to {high:+.1%}"
            rows += [
                Number("time_over_one_piece", "1", name, contestant.slowdown),
                Number("time_over_one_piece_p20", "1", name, low),
                Number("time_over_one_piece_p80", "1", name, high),
            ]
        part = f"{contestant.peak_bytes / one.peak_bytes:.0%}"
        table.add_row(
            contestant.name, format_bytes(contestant.peak_bytes), part, time, spread, f"{contestant.difference:.1e}"
        )
    return table, rows


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark with the flags of the command line."""
    flags = tyro.cli(Flags, args=arguments, description=__doc__)
    keep_freed_memory()
    console = Console(width=120)
    console.print(f"{machine_name(flags.device)}, PyTorch {torch.__version__}, {flags.threads} threads")
    config = {name: value for name, value in dataclasses.asdict(flags).items() if name != "out"}
    for vocab_size in flags.vocab_sizes:
        table, rows = measure(flags, vocab_size, console)
        console.print(table)
        append(flags.out / "loss_chunks.csv", rows, config)


if __name__ == "__main__":
    main()
