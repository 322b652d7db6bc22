"""Measure peak and step time by number of loss chunks, for vocabularies of 32 and 128 thousand words.

    python benchmarks/loss_chunks.py                   # about six minutes on two cores
    python benchmarks/loss_chunks.py --least-rounds 0  # bytes and gradients only

Steps: the reference Llama, nothing recomputed; what changes is in how many parts output matrix and cross entropy run. Bytes
are exact on the CPU and the same on every machine. Times are medians over rounds of the ratio to the step in one piece that
ran beside each (`contest.py`). The last column is how far the gradients are from those in one piece: the largest difference
of a gradient over its largest entry.

Products: where the time goes. The three matrix products of the loss, alone on tensors of the step's sizes, and all the rest
of it. A line of one chunk is the same code with one chunk, where the step in one piece is the model's own.
"""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
from contest import Contestant, Race
from flags import MachineFlags, RunFlags, parse
from recollect.byte_format import format_bytes
from recollect.lab.bench.race import keep_freed_memory
from recollect.measuring.timing import timed
from recollect.plans.plan import Plan
from recompute import Nothing, SwitchablePlan
from results_csv import Number, append, machine_name
from subject import Step, StepFlags, largest_difference

# The results of the loss' matrix products.
PRODUCTS = {
    "logits": "logits",
    "hidden": "gradient of hidden states",
    "weight": "gradient of the matrix",
    "rest": "all else",
}


@dataclass(frozen=True, kw_only=True)
class Flags(MachineFlags, RunFlags):
    """What to measure, and the sizes of the step."""

    vocab_sizes: tuple[int, ...] = (32_768, 131_072)
    """Sizes of the vocabulary."""
    parts: tuple[Literal["steps", "products"], ...] = ("steps", "products")
    """What to measure."""
    chunks: tuple[int, ...] = (2, 4, 8, 32)
    """Numbers of loss chunks, besides one."""
    hidden_size: int = 512
    """Width of the residual stream."""
    num_layers: int = 2
    """Decoder layers."""
    batch_size: int = 2
    """Sequences."""
    seq_length: int = 512
    """Tokens per sequence."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of activations and matrix products; weights are fp32."""
    minutes: float = 1.2
    """Seconds of rounds for each vocabulary."""
    least_rounds: int = 3
    """Least number of rounds, and runs of the matrix products; 0 measures bytes only."""

    def step(self, vocab_size: int) -> Step:
        """Return the step for a size of the vocabulary."""
        same = {field.name for field in dataclasses.fields(StepFlags)} & {
            field.name for field in dataclasses.fields(self)
        }
        return Step(StepFlags(vocab_size=vocab_size, **{name: getattr(self, name) for name in same}))


def measure_steps(flags: Flags, vocab_size: int, console: Console) -> tuple[Table, list[Number]]:
    """Measure steps with one vocabulary; return the table to print and the rows to save."""
    step = flags.step(vocab_size)
    plain = step.gradients()
    one = Contestant(name="1", recompute=Nothing(), peak_bytes=step.peak_bytes())
    contestants = [one]
    for count in flags.chunks:
        contestant = Contestant(
            name=str(count), recompute=SwitchablePlan(recollect.apply(step.model, Plan({}, loss_chunks=count)))
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
        rows += contestant.numbers("time_over_one_piece", name)
        time, spread = "", ""
        if contestant.ratios:
            low, high = contestant.percentile(20), contestant.percentile(80)
            time, spread = f"{contestant.slowdown:+.1%}", f"{low:+.1%} to {high:+.1%}"
        part = f"{contestant.peak_bytes / one.peak_bytes:.0%}"
        table.add_row(
            contestant.name, format_bytes(contestant.peak_bytes), part, time, spread, f"{contestant.difference:.1e}"
        )
    return table, rows


class ProductTimes(TorchDispatchMode):
    """Time the ops of a loss: matrix products by their result, and all others together."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__()
        self.seconds = dict.fromkeys(PRODUCTS, 0.0)
        self._vocab_size = vocab_size
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output, op_s = timed(lambda: func(*args, **(kwargs or {})), self._device)
        self.seconds[self._part(func.overloadpacket, args)] += op_s
        return output

    def _part(self, op: Any, args: Any) -> str:
        if op not in (torch.ops.aten.mm, torch.ops.aten.addmm):
            return "rest"
        left, right = args[-2:]
        if right.shape[1] == self._vocab_size:
            return "logits"
        return "hidden" if left.shape[1] == self._vocab_size else "weight"


def product_seconds(flags: Flags, vocab_size: int, num_chunks: int) -> dict[str, float]:
    """Run the chunked loss alone; return the seconds of its parts."""
    device, dtype = torch.device(flags.device), {"fp32": torch.float32, "bf16": torch.bfloat16}[flags.dtype]
    num_tokens = flags.batch_size * flags.seq_length
    hidden = torch.randn(num_tokens, flags.hidden_size, device=device, dtype=dtype, requires_grad=True)
    # As in a new model: large logits would lead to denormal exponentials, which are slow.
    weight = (0.02 * torch.randn(vocab_size, flags.hidden_size, device=device)).requires_grad_()
    labels = torch.randint(vocab_size, (num_tokens,), device=device)
    with ProductTimes(vocab_size, device) as times:
        recollect.chunked_cross_entropy(hidden, weight, labels, num_chunks=num_chunks)
    return times.seconds


def measure_products(flags: Flags, vocab_size: int) -> tuple[Table, list[Number]]:
    """Measure the chunked loss alone; return the table to print and the rows to save."""
    table = Table("chunks", *(f"{heading}, ms" for heading in PRODUCTS.values()), title=f"vocabulary {vocab_size}")
    rows = []
    product_seconds(flags, vocab_size, 1)
    for count in (1, *flags.chunks):
        runs = [product_seconds(flags, vocab_size, count) for _ in range(flags.least_rounds)]
        medians = {part: statistics.median(run[part] for run in runs) for part in PRODUCTS}
        rows += [Number(f"loss_{part}_time", "s", f"{count} of {vocab_size}", s) for part, s in medians.items()]
        table.add_row(str(count), *(f"{1e3 * s:.0f}" for s in medians.values()))
    return table, rows


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark with the flags of the command line."""
    flags = parse(Flags, __doc__, arguments)
    keep_freed_memory()
    console = Console(width=120)
    console.print(f"{machine_name(flags.device)}, PyTorch {torch.__version__}, {flags.threads} threads")
    torch.set_num_threads(flags.threads)
    config = {name: value for name, value in dataclasses.asdict(flags).items() if name != "out"}
    for vocab_size in flags.vocab_sizes:
        if "steps" in flags.parts:
            table, rows = measure_steps(flags, vocab_size, console)
            console.print(table)
            append(flags.out / "loss_chunks.csv", rows, config)
        if "products" in flags.parts and flags.least_rounds:
            table, rows = measure_products(flags, vocab_size)
            console.print(table)
            append(flags.out / "loss_chunks.csv", rows, config)


if __name__ == "__main__":
    main()
