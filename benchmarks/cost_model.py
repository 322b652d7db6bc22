"""Measure the accuracy of the cost model: modelled and measured op times, and the plans they lead to.

    python benchmarks/cost_model.py

Five models run their step on real tensors. Each op is timed and modelled on the same arguments, on this device as `recollect
calibrate` measures it first. On the CPU, times are processor times of one thread, so that other programs matter less; on
CUDA, times of the op's kernels.

The regret is the cost of wrong times: the slowdown of a plan chosen with modelled times, minus the slowdown of the plan
chosen with measured times, both evaluated with measured times. As controls, plans are also chosen with the times of another
device (an H100; on CUDA this device as in the built-in table), and with equal times for all ops.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import recollect
from flags import RESULTS, parse
from models import ModelName, build
from recollect.costs.calibrate import calibrate
from recollect.costs.hardware import Hardware
from recollect.costs.hardware_table import HARDWARE
from recollect.costs.op_costs import Key, OpRun, key_of, timed_alone
from recollect.costs.op_work import work_of
from recollect.costs.roofline import seconds
from recollect.engine.facts import OpFacts
from recollect.errors import BudgetTooSmallError
from recollect.lab.bench.race import keep_freed_memory
from recollect.lab.models.gpt import GPTModel
from recollect.planning.choose import Planner
from recollect.profile.profile import Profile
from recollect.recording.model_step import Step
from recollect.recording.record import record_with
from recollect.simulation.decisions import decide
from recollect.simulation.simulate import simulate
from results_csv import Number, append, machine_name

_MODELLED, _UNIFORM = "modelled", "all ops alike"
OTHER = ("times of an H100", HARDWARE["H100"])
_REPEATS = 3
_NAMES: dict[ModelName, str] = {
    "reference": "reference Llama",
    "dense": "HF Llama",
    "moe": "Mixtral",
    "mla": "DeepSeek-V3",
    "gpt2": "GPT-2 (dropout)",
}


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Sizes of the models, and effort of the measurement."""

    hidden_size: int = 256
    """Width of the residual stream, a multiple of 128."""
    num_layers: int = 4
    """Layers of each model."""
    vocab_size: int = 1024
    """Size of the vocabulary."""
    batch_size: int = 2
    """Sequences in the batch."""
    seq_length: int = 256
    """Tokens per sequence."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of weights and activations."""
    budgets: tuple[float, ...] = (0.75, 0.5, 0.25)
    """Budgets, as fractions of the range from full recompute (0) to none (1)."""
    recordings: int = 4
    """Measured steps, after a warm-up step."""
    calibration_s: float = 40.0
    """Seconds for the calibration; 0 for a quick one."""
    hardware: str | None = None
    """A file written by `recollect calibrate`, instead of a new calibration."""
    device: str = "cpu"
    """A torch device."""
    seed: int = 0
    """Seed of weights and tokens."""
    out: Path = RESULTS
    """Folder for the rows."""


def subjects(flags: Flags) -> Iterator[tuple[str, nn.Module, dict[str, torch.Tensor]]]:
    """Yield (name, model in training mode, batch): dense, routed, with latent attention, with dropout."""
    sizes = {"hidden_size": flags.hidden_size, "num_layers": flags.num_layers, "vocab_size": flags.vocab_size}
    for name, text in _NAMES.items():
        torch.manual_seed(flags.seed)
        dtype = torch.bfloat16 if flags.dtype == "bf16" else torch.float32
        with torch.device(flags.device):
            model = build(name, num_heads=0, **sizes).to(dtype).train()
            tokens = torch.randint(0, flags.vocab_size, (flags.batch_size, flags.seq_length))
        yield text, model, {"tokens" if isinstance(model, GPTModel) else "input_ids": tokens, "labels": tokens}


class BothCosts:
    """Time and model each op; `reads` chooses which times a profile gets.

    Args:
        hardware: this device, as it was calibrated.
        device: where ops run.
        other: the name of another device's times, and that device.
    """

    def __init__(self, hardware: Hardware, device: torch.device, other: tuple[str, Hardware]) -> None:
        self.reads = _MODELLED
        self.samples: dict[Key, list[float]] = {}
        self.counts: dict[Key, int] = {}
        self.modelled: dict[Key, dict[str, float]] = {}
        self.other = other[0]
        self._device = device
        self._hardware = {_MODELLED: hardware, self.other: other[1]}

    def forget(self) -> None:
        """Forget all measurements; the next recording counts the runs."""
        self.samples.clear()
        self.counts.clear()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Treat everything in the with-block as one step."""
        self.counts.clear()
        yield

    def run(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, *, may_repeat: bool) -> tuple[Any, OpRun]:
        """Run an op, several times if that has no side effects."""
        key = key_of(func, args, kwargs)
        repeats = _REPEATS if may_repeat and not (facts.writes or facts.is_random or facts.keeps) else 1
        for _ in range(repeats):
            output, op_s = self._timed(lambda: func(*args, **kwargs))
            self.samples.setdefault(key, []).append(op_s)
        self.counts[key] = self.counts.get(key, 0) + 1
        if key not in self.modelled:
            work = work_of(func, facts, args, kwargs, output)
            times = {name: seconds(work, hardware) for name, hardware in self._hardware.items()}
            self.modelled[key] = {**times, _UNIFORM: float(work.launches)}
        return output, OpRun(key, 0)

    def _timed(self, run: Callable[[], Any]) -> tuple[Any, float]:
        if self._device.type == "cuda":
            return timed_alone(run, self._device)
        begin = time.thread_time()
        output = run()
        return output, time.thread_time() - begin

    def seconds_of(self, run: OpRun | None) -> float:
        """Return an op's measured median, or its modelled time."""
        if run is None:
            return 0.0
        return self.measured_s(run.key) if self.reads == "measured" else self.modelled[run.key][self.reads]

    def working_bytes_of(self, key: Key | None) -> int:
        """Return the workspace, which does not depend on times."""
        return 0

    def measured_s(self, key: Key) -> float:
        """Return the median time of an op."""
        return statistics.median(self.samples[key])


def profiles(model: nn.Module, batch: Any, costs: BothCosts, recordings: int) -> dict[str, Profile]:
    """Record the step several times; return its profile with measured times and with each kind of modelled times."""

    def record(reads: str) -> Profile:
        costs.reads = reads
        torch.manual_seed(0)  # Equal random numbers give equal routes and shapes.
        return record_with(costs, Step(model, batch))

    record(_MODELLED)  # The first step loads kernels and grows the heap.
    costs.forget()
    for _ in range(recordings - 1):
        record(_MODELLED)
    return {reads: record(reads) for reads in ("measured", _MODELLED, costs.other, _UNIFORM)}


def weighted_quantiles(errors: list[tuple[float, float]], fractions: tuple[float, ...]) -> list[float]:
    """Return weighted quantiles of errors, given pairs of (error, weight)."""
    total = sum(weight for _, weight in errors)
    found = []
    for fraction in fractions:
        reached = 0.0
        for error, weight in sorted(errors):
            reached += weight
            if reached >= fraction * total:
                found.append(error)
                break
    return found


def slowdown(profile: Profile, plan: recollect.Plan) -> float:
    """Return the slowdown of a plan with the times of a profile."""
    return simulate(profile, decide(profile, plan)).recompute_s / profile.step_s


@dataclass(frozen=True)
class Choice:
    """The slowdown of a plan that was chosen for a budget with one kind of times.

    Attributes:
        chosen_with: which times.
        budget: fraction of what recompute can change.
        promised: slowdown by the times that it was chosen with.
        real: slowdown by measured times.
        best: the same of the plan chosen with measured times.
        missed: how much better that plan is even by the times that this one was chosen with: what the search missed, and no
            fault of the times.
    """

    chosen_with: str
    budget: float
    promised: float
    real: float
    best: float
    missed: float


def choices(found: dict[str, Profile], budgets: tuple[float, ...]) -> Iterator[Choice]:
    """Yield the plans for each budget, chosen with each kind of times except measured ones."""
    measured = found["measured"]
    plain = recollect.classic_plan(measured, "keep_all").predicted_peak_bytes or 0
    least = recollect.classic_plan(measured, "full").predicted_peak_bytes or 0
    planners = {name: Planner(profile) for name, profile in found.items()}
    for fraction in budgets:
        budget_bytes = int(least + fraction * (plain - least))
        try:
            plans = {name: planner.plan(budget_bytes) for name, planner in planners.items()}
        except BudgetTooSmallError:
            continue
        best = slowdown(measured, plans["measured"])
        for name, plan in plans.items():
            if name != "measured":
                promised = plan.predicted_slowdown or 0.0
                missed = max(0.0, promised - slowdown(found[name], plans["measured"]))
                yield Choice(name, fraction, promised, slowdown(measured, plan), best, missed)


def numbers_of(name: str, costs: BothCosts, found: dict[str, Profile], flags: Flags) -> list[Number]:
    """Return one model's rows."""
    total = {
        kind: sum(count * of(key) for key, count in costs.counts.items())
        for kind, of in (("measured", costs.measured_s), (_MODELLED, lambda key: costs.modelled[key][_MODELLED]))
    }
    errors = []
    for key, count in costs.counts.items():
        measured_s = costs.measured_s(key)
        errors.append((abs(costs.modelled[key][_MODELLED] / measured_s - 1), count * measured_s))
    median, high = weighted_quantiles(errors, (0.5, 0.9))
    rows = [
        Number("step_processor_time", "s", name, total["measured"]),
        Number("step_ratio", "1", name, total[_MODELLED] / total["measured"]),
        Number("op_error_median", "1", name, median),
        Number("op_error_90", "1", name, high),
    ]
    for choice in choices(found, flags.budgets):
        who = name if choice.chosen_with == _MODELLED else f"{name}, {choice.chosen_with}"
        percent = f"{100 * choice.budget:.0f}"
        rows.append(Number(f"regret_{percent}", "1", who, choice.real - choice.best))
        rows.append(Number(f"missed_by_search_{percent}", "1", who, choice.missed))
        if choice.chosen_with == _MODELLED:
            rows.append(Number(f"slowdown_{percent}", "1", name, choice.best))
            rows.append(Number(f"promised_slowdown_{percent}", "1", name, choice.promised))
    return rows


def table(rows: list[Number], names: list[str], budgets: tuple[float, ...], other: str = OTHER[0]) -> Table:
    """Return a table with a line per model, and one per kind of times; `other`: those of another device."""
    values = {(row.metric, row.contestant): row.value for row in rows}
    metrics = [("step_ratio", "step, modelled / measured", ".2f"), ("op_error_median", "op error, median", ".0%")]
    metrics.append(("op_error_90", "op error, 90 %", ".0%"))
    for fraction in budgets:
        percent = f"{100 * fraction:.0f}"
        metrics += [(f"slowdown_{percent}", f"slowdown at {percent} %", ".1%"), (f"regret_{percent}", "regret", ".2%")]
    shown = Table("model", *(title for _, title, _ in metrics))
    for name in names:
        for suffix in ("", f", {other}", f", {_UNIFORM}"):
            cells = [values.get((metric, name + suffix)) for metric, _, _ in metrics]
            texts = ["" if v is None else format(v, spec) for v, (_, _, spec) in zip(cells, metrics, strict=True)]
            shown.add_row(name if not suffix else f"  {suffix[2:]}", *texts, style="dim" if suffix else "")
    return shown


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark with the flags of the command line."""
    flags = parse(Flags, __doc__, arguments)
    keep_freed_memory()
    console = Console(width=None if sys.stdout.isatty() else 170)
    torch.set_num_threads(1)
    device = torch.device(flags.device)
    if flags.hardware is not None:
        hardware = Hardware.load(flags.hardware)
    else:
        console.print("calibrating ...", style="bold")
        is_quick = flags.calibration_s == 0
        measured = calibrate(device, seconds_to_spend=flags.calibration_s, quick=is_quick)
        hardware = measured.hardware
        off = statistics.median(max(ratio, 1 / ratio) for ratio in measured.ratios())
        console.print(
            f"{hardware.name}: {len(measured.ops)} ops, the fit is off by a factor of {off:.2f} in the median"
        )
    rows: list[Number] = []
    names = []
    for name, model, batch in subjects(flags):
        console.print(f"{name} ...", style="bold")
        costs = BothCosts(hardware, device, OTHER)
        found = profiles(model, batch, costs, flags.recordings)
        rows += numbers_of(name, costs, found, flags)
        names.append(name)
    console.print(table(rows, names, flags.budgets))
    config = {name: value for name, value in dataclasses.asdict(flags).items() if name != "out"}
    append(flags.out / "cost_model.csv", rows, {**config, "threads": 1})
    console.print(f"{machine_name(flags.device)}; appended to {flags.out / 'cost_model.csv'}", soft_wrap=True)


if __name__ == "__main__":
    main()
