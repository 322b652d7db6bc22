"""Measure the overhead of the engines: Python time on tiny models, and its effect at real sizes.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --parts engines
    python benchmarks/overhead.py --parts dtensors

Engines: four tiny models, plain, with checkpoint and SAC, and with plans on the tape and from traces (overhead_engines.py).
DTensors: the same for Llama, whose layers hold their weights as DTensors, as under tensor parallelism.
Tiny tensors: step time minus that of the plain step, for checkpoint, selective checkpoint (SAC) and the tape.
Real sizes: the tape that keeps everything compared with the plain step, in fp32 and bf16.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from contest import Contestant, Race, check_gradients, percentile
from flags import MachineFlags, RunFlags, parse
from overhead_engines import MODELS, tables
from overhead_engines import Tiny as TinyModel
from peers import full, selective
from recollect.applying import apply_policy
from recollect.lab.bench.race import keep_freed_memory
from recollect.plans.action import Action
from recompute import Nothing, Replaced, SwitchablePlan
from results_csv import Number, append, machine_name
from subject import Step, StepFlags

Part = Literal["engines", "dtensors", "tiny", "real"]

_PLAIN, _FULL, _REENTRANT = "plain", "checkpoint", "checkpoint, reentrant"
_SAC_MATMULS, _SAC_NOTHING = "SAC, saves matmuls", "SAC, saves nothing"
TAPE_ALL, TAPE_MATMULS, TAPE_NOTHING = "tape, keeps all", "tape, keeps matmuls", "tape, keeps nothing"
_SAME_KEPT_SET = ((TAPE_MATMULS, _SAC_MATMULS), (TAPE_NOTHING, _SAC_NOTHING))


@dataclass(frozen=True, kw_only=True)
class Flags(MachineFlags, RunFlags):
    """Sizes and times of all parts; tiny tensors get one thread."""

    parts: tuple[Part, ...] = get_args(Part)
    """Parts to run."""
    engine_minutes: float = 1.0
    """Minutes of rounds of each tiny model, of steps and of layers together."""
    num_layers: int = 8
    """Layers of the tiny model."""
    tiny_minutes: float = 1.0
    """Minutes of rounds on tiny tensors."""
    real_hidden_size: int = 1024
    """Width of the real model."""
    real_num_layers: int = 2
    """Layers of the real model."""
    real_seq_length: int = 2048
    """Tokens of the real step."""
    real_minutes: float = 2.2
    """Minutes of rounds at real size, for each dtype."""
    dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
    """Dtypes at real size."""
    least_rounds: int = 5
    """Rounds to run even if the time is over."""


@dataclass(frozen=True)
class Drops:
    """A policy of the tape by op name; outputs of units are kept, as by checkpoint."""

    drops_outputs: ClassVar[bool] = False
    drops_op: Callable[[str], bool]

    def action(self, unit_path: str, value_name: str) -> Action:
        """Return what happens to a value: "mlp.up_proj.mm#1" is one of mm."""
        is_dropped = self.drops_op(value_name.rpartition(".")[2].partition("#")[0])
        return Action.RECOMPUTE if is_dropped else Action.KEEP

    def acts_in(self, unit_path: str, module_path: str) -> bool:
        """Any module may run an op of that name."""
        return True

    def output_action(self, unit_path: str) -> Action:
        """Keep it."""
        return Action.KEEP


class CountOps(TorchDispatchMode):
    """Count all ops."""

    num_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += 1
        return func(*args, **(kwargs or {}))


def ops_per_layer(step: Step) -> int:
    """Count the ops, views included, in the forward of the first layer."""
    layer = next(iter(step.layers.values()))
    counter, forward = CountOps(), layer.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        with counter:
            return forward(*args, **kwargs)

    with Replaced({layer: counted}).on():
        step.run()
    return counter.num_ops


def on_tape(step: Step, name: str, drops_op: Callable[[str], bool]) -> Contestant:
    """Apply the tape to the layers."""
    return Contestant(name=name, recompute=SwitchablePlan(apply_policy(step.model, step.layers, Drops(drops_op))))


def tiny_contestants(step: Step) -> list[Contestant]:
    """Return the contestants on tiny tensors, with the plain step twice to show the noise."""
    layers: Sequence[nn.Module] = list(step.layers.values())
    matmuls = [torch.ops.aten.mm.default]
    return [
        Contestant(name=_PLAIN, recompute=Nothing()),
        Contestant(name=_FULL, recompute=Replaced(full(layers))),
        Contestant(name=_REENTRANT, recompute=Replaced(full(layers, use_reentrant=True))),
        Contestant(name=_SAC_MATMULS, recompute=Replaced(selective(layers, matmuls))),
        Contestant(name=_SAC_NOTHING, recompute=Replaced(selective(layers, []))),
        on_tape(step, TAPE_ALL, lambda op: False),
        on_tape(step, TAPE_MATMULS, lambda op: op != "mm"),
        on_tape(step, TAPE_NOTHING, lambda op: True),
    ]


class Tiny:
    """The race on tiny tensors; overhead is a step's time minus that of the adjacent plain step."""

    def __init__(self, flags: Flags, console: Console) -> None:
        sizes = StepFlags(
            hidden_size=32,
            num_heads=2,
            num_layers=flags.num_layers,
            vocab_size=64,
            batch_size=1,
            seq_length=16,
            device=flags.device,
            threads=1,  # the ops are too small to share, so threads would only wait for each other
        )
        self.step = Step(sizes)
        self.ops_per_layer = ops_per_layer(self.step)
        self.contestants = tiny_contestants(self.step)
        check_gradients(self.step, self.contestants)
        self.race = Race(self.step, _now_and_then(console))
        self.race.run([self.contestants], seconds=60 * flags.tiny_minutes, least_rounds=flags.least_rounds)
        self.plain_s = percentile(self.race.plain_s, 50)

    def added_us(self, contestant: Contestant, percent: int = 50) -> float:
        """Return the overhead of a step, forward and backward, in microseconds."""
        return 1e6 * self.plain_s * contestant.percentile(percent)

    def ratios(self, tape: str, sac: str) -> list[float]:
        """Return the ratio of the tape's overhead to SAC's, round by round."""
        named = {one.name: one.ratios for one in self.contestants}
        return [(named[tape][turn] - 1) / (named[sac][turn] - 1) for turn in named[tape] if named[sac][turn] > 1]

    def table(self) -> Table:
        """Return the overhead of all contestants."""
        title = f"Added time per step on tiny tensors, 1 thread; the plain step takes {1e3 * self.plain_s:.2f} ms"
        table = Table(title=title, title_justify="left")
        table.add_column("")
        for name in ("added ms", "p20 .. p80", "us per layer", "us per op", "of plain"):
            table.add_column(name, justify="right")
        for one in self.contestants:
            low, middle, high = (self.added_us(one, percent) for percent in (20, 50, 80))
            per_layer = middle / self.step.flags.num_layers
            row = [f"{middle / 1e3:.2f}", f"{low / 1e3:.2f} .. {high / 1e3:.2f}", f"{per_layer:.0f}"]
            table.add_row(one.name, *row, f"{per_layer / self.ops_per_layer:.1f}", f"{one.slowdown:+.0%}")
        return table

    def claims(self) -> list[str]:
        """Compare the tape with SAC that keeps the same values."""
        lines = []
        for tape, sac in _SAME_KEPT_SET:
            ratios = self.ratios(tape, sac) or [float("nan")]
            low, middle, high = (percentile(ratios, percent) for percent in (20, 50, 80))
            verdict = "met" if middle <= 0.5 else "NOT met"
            lines.append(
                f"{tape} / {sac}: {middle:.2f} of the added time ({low:.2f} .. {high:.2f}); aim 0.5: {verdict}"
            )
        return lines

    def numbers(self) -> list[Number]:
        """Return all results as rows."""
        rows = [Number("tiny_step_time", "us", _PLAIN, 1e6 * self.plain_s)]
        rows += [Number("ops_per_layer", "1", _PLAIN, self.ops_per_layer)]
        for one in self.contestants:
            per_layer = self.added_us(one) / self.step.flags.num_layers
            rows += [
                Number("tiny_added_time", "us", one.name, self.added_us(one)),
                *(Number(f"tiny_added_time_p{p}", "us", one.name, self.added_us(one, p)) for p in (20, 80)),
                Number("tiny_added_time_per_layer", "us", one.name, per_layer),
                Number("tiny_added_time_per_op", "us", one.name, per_layer / self.ops_per_layer),
                Number("rounds", "1", one.name, len(one.ratios)),
            ]
        for tape, sac in _SAME_KEPT_SET:
            rows += [Number("tiny_added_time_ratio_to_sac", "1", tape, percentile(self.ratios(tape, sac) or [0.0], 50))]
        return rows


def real_race(flags: Flags, dtype: Literal["fp32", "bf16"], console: Console) -> tuple[Race, Contestant]:
    """Compare the tape that keeps everything with the plain step."""
    sizes = StepFlags(
        hidden_size=flags.real_hidden_size,
        num_layers=flags.real_num_layers,
        seq_length=flags.real_seq_length,
        batch_size=1,
        dtype=dtype,
        device=flags.device,
        threads=flags.threads,
    )
    step = Step(sizes)
    tape = on_tape(step, TAPE_ALL, lambda op: False)
    check_gradients(step, [tape])
    race = Race(step, _now_and_then(console))
    race.run([[tape]], seconds=60 * flags.real_minutes, least_rounds=flags.least_rounds)
    return race, tape


def half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of the median, by order statistics."""
    ordered, num = sorted(values), len(values)
    reach = 0.98 * num**0.5
    low, high = max(0, int(num / 2 - reach)), min(num - 1, int(num / 2 + reach))
    return (ordered[high] - ordered[low]) / 2


def real_part(flags: Flags, dtype: Literal["fp32", "bf16"], console: Console) -> list[Number]:
    """Measure and print one dtype at real size, and return its rows."""
    console.print(f"real size, {dtype} ...", style="bold")
    race, tape = real_race(flags, dtype, console)
    plain_s = percentile(race.plain_s, 50)
    error = half_width(list(tape.ratios.values()))
    verdict = (
        "met" if tape.slowdown + error <= 0.01 else "NOT met" if tape.slowdown - error > 0.01 else "too noisy to tell"
    )
    console.print(f"{race.step.flags}: plain step {plain_s:.3f} s, {race.num_rounds} rounds")
    console.print(f"{tape.name}: {tape.slowdown:+.2%} +- {error:.2%} of the plain step; aim 1 %: {verdict}")
    return [
        Number(f"real_step_time_{dtype}", "s", _PLAIN, plain_s),
        Number(f"real_slowdown_{dtype}", "1", tape.name, tape.slowdown),
        Number(f"real_slowdown_half_width_{dtype}", "1", tape.name, error),
        Number(f"real_rounds_{dtype}", "1", tape.name, race.num_rounds),
    ]


def engines_part(flags: Flags, console: Console, *, splits: bool) -> list[Number]:
    """Measure and print the tiny models on all engines, and return their rows; with `splits`, of Llama with DTensors."""
    found = []
    for model, name in MODELS.items():
        if splits and model != "dense":
            continue
        console.print(f"{name} ...", style="bold")
        tiny = TinyModel(model, splits=splits)
        tiny.run(seconds=60 * flags.engine_minutes, least_rounds=flags.least_rounds, report=_now_and_then(console))
        found.append(tiny)
    sizes = f"{found[0].step.flags}, one thread, {found[0].num_rounds} rounds or more"
    console.print(f"Engines: {sizes}")
    for table in tables(found):
        console.print(table)
    for line in dict.fromkeys(line for one in found for line in one.not_traced):
        console.print(f"on the tape: {line}")
    return [number for one in found for number in one.numbers()]


def _now_and_then(console: Console) -> Callable[[str], None]:
    """Print reports, ever more rarely the more there are."""
    count = 0

    def report(text: str) -> None:
        nonlocal count
        count += 1
        if str(count).rstrip("0") in ("1", "2", "5"):
            console.print(f"  {text}", style="dim")

    return report


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark with the flags of the command line."""
    flags = parse(Flags, __doc__, arguments)
    keep_freed_memory()
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(f"{machine_name(flags.device)}, PyTorch {torch.__version__}, {flags.threads} threads")
    rows: list[Number] = []
    for part in ("engines", "dtensors"):
        if part in flags.parts:
            rows += engines_part(flags, console, splits=part == "dtensors")
    if "tiny" in flags.parts:
        console.print("tiny tensors ...", style="bold")
        tiny = Tiny(flags, console)
        console.print(tiny.table())
        for line in tiny.claims():
            console.print(line)
        rows += tiny.numbers()
    for dtype in flags.dtypes if "real" in flags.parts else ():
        rows += real_part(flags, dtype, console)
    config = {name: value for name, value in dataclasses.asdict(flags).items() if name != "out"}
    append(flags.out / "overhead.csv", rows, config)
    console.print(f"appended to {flags.out / 'overhead.csv'}", soft_wrap=True)


if __name__ == "__main__":
    main()
