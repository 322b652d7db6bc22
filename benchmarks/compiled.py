"""Compare recollect, eager and inside the compiler, with `torch.compile` and its own recompute.

    python benchmarks/compiled.py

At each compiled variant's measured peak stand recollect's plan for the eager model, and its plans for blocks inside the
compiler: one that is the same for all blocks, and one that may differ from block to block. All are timed side by side, with the
seconds that compiling took.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from rich.console import Console

from compiled_peers import BACKEND, compiled_peers
from contest import Contestant, Race, percentile, reason
from flags import RunFlags, parse
from models import DESCRIPTIONS, ModelName
from peers import Peer
from recollect import Plan, Profile, apply
from recollect.byte_format import format_bytes
from recollect.errors import BudgetTooSmallError
from recollect.lab.bench.race import few_objects, keep_freed_memory
from recollect.planning.choose import Planner
from recollect.simulation.decisions import compiled_unit
from recompute import Nothing, SwitchablePlan
from results_csv import Number, RowsFile
from subject import Step, StepFlags, largest_difference
from tables import markdown

# Compiled code sums in another order: gradients count as equal if they differ by at most this fraction of their largest entry.
_TOLERANCE = 1e-3

Measured = Callable[[Contestant], Contestant]
Keep = Callable[[list[Number]], None]


@dataclass(frozen=True, kw_only=True)
class Flags(RunFlags):
    """Compare recollect with compiled steps at equal peak."""

    step: StepFlags = field(default_factory=StepFlags)
    """The training step."""
    models: tuple[ModelName, ...] = ("dense",)
    """Models to run."""
    minutes: float = 5.0
    """Seconds of timed rounds per model; compiling and measuring peaks take extra time."""
    only: str = ""
    """Only the variants whose names contain this."""
    compile_minutes: float = 60.0
    """Seconds after which no further variant is compiled."""
    backend: str = BACKEND
    """Backend of `torch.compile`; others than inductor only for a smoke test."""
    quick: bool = False
    """Tiny sizes, few variants and one round, as a smoke test; times are meaningless."""


@dataclass(eq=False, kw_only=True)
class Entry:
    """A variant, and recollect's plans for its peak; `reason`: why there is none."""

    peer: Peer
    contestant: Contestant | None = None
    answers: dict[str, Contestant] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


class EagerPlans:
    """recollect as it is: the plan for a budget, on the eager model."""

    name = "recollect, eager"

    def __init__(self, step: Step, measured: Measured) -> None:
        self._step = step
        self._measured = measured
        self._planner = Planner(step.record())
        self._made: dict[str, Contestant] = {}

    def within(self, budget_bytes: int) -> Contestant:
        """Return the contestant of the plan for a budget, the same one for an equal plan.

        Raises:
            BudgetTooSmallError: there is none.
        """
        plan = self._planner.plan(budget_bytes)
        key = repr(sorted((path, sorted(unit.actions.items()), unit.output) for path, unit in plan.units.items()))
        if key not in self._made:
            recompute = SwitchablePlan(apply(self._step.model, plan))
            name = f"{self.name} {plan.predicted_peak_bytes}"
            self._made[key] = self._measured(Contestant(name=name, recompute=recompute, plan=plan))
        return self._made[key]


class CompiledPlans(EagerPlans):
    """recollect's compile engine: the plan for a budget, which may have each block keep something else."""

    name = "recollect, compile engine"

    def __init__(self, step: Step, measured: Measured) -> None:
        self._step = step
        self._measured = measured
        self._planner = Planner(_compiled_profile(step))
        self._made: dict[str, Contestant] = {}


class UniformPlans:
    """recollect's compile engine with one plan for all blocks: the fastest of what was recorded, by measured peak."""

    name = "recollect, compile engine, uniform"

    def __init__(self, step: Step, measured: Measured) -> None:
        self._step = step
        self._measured = measured
        profile = _compiled_profile(step)
        repeated = [call for call in profile.calls if call.repeated]
        graph = profile.graph_of(repeated[0])
        fastest = sorted(range(len(graph.variants)), key=lambda variant: graph.variants[variant].step_s)
        units = [compiled_unit(graph, variant) for variant in fastest]
        self._plans = [Plan({call.path: unit for call in repeated}) for unit in units]
        self._made: list[Contestant] = []

    def within(self, budget_bytes: int) -> Contestant:
        """Return the fastest contestant within a budget.

        Raises:
            BudgetTooSmallError: there is none.
        """
        for number, plan in enumerate(self._plans):
            if number == len(self._made):
                on_blocks = SwitchablePlan(apply(self._step.model, plan))
                name = f"{self.name}, {number} in order of time"
                self._made.append(self._measured(Contestant(name=name, recompute=on_blocks, plan=plan)))
            if self._made[number].peak_bytes <= budget_bytes:
                return self._made[number]
        least_bytes = min(one.peak_bytes for one in self._made)
        raise BudgetTooSmallError(budget_bytes=budget_bytes, least_peak_bytes=least_bytes, unit="a block")


@functools.cache
def _compiled_profile(step: Step) -> Profile:
    return step.record(engine="compile")


Ours: TypeAlias = EagerPlans | UniformPlans

OURS = (EagerPlans, CompiledPlans, UniformPlans)


class Comparison:
    """The comparison of one model."""

    def __init__(self, flags: Flags, model: ModelName, say: Callable[[str], None], keep: Keep) -> None:
        self.say = say
        self._keep = keep
        self._backend = flags.backend
        # The compile engine is for inductor only.
        self.makers = OURS if flags.backend == BACKEND else OURS[:1]
        # Held to the end: a plan that is suspended when it is collected goes back onto the model.
        self._ours: list[Ours] = []
        self.step = Step(flags.step, model)
        self.race = Race(self.step, lambda text: say(f"  {text}"))
        self._expected = self.step.gradients()
        self.plain = self._measured(Contestant(name="eager, no recompute", recompute=Nothing()))

    def prepare(self, peers: list[Peer], *, compile_s: float = math.inf) -> None:
        """Compile, plan, and measure peaks and gradients; after `compile_s`, compile nothing more."""
        self.say("compiling")
        ends_s = time.perf_counter() + compile_s
        self.entries = [self._entry(peer) if time.perf_counter() < ends_s else self._left_out(peer) for peer in peers]
        for make in self.makers:
            self.say(f"planning: {make.name}")
            try:
                ours = make(self.step, self._measured)
                self._ours.append(ours)
                for entry in self.entries:
                    self._answer(entry, ours)
            except Exception as error:  # a combination that does not work is a result
                self.say(f"  {reason(error)}")
                for entry in self.entries:
                    entry.reasons.setdefault(make.name, reason(error))

    def _answer(self, entry: Entry, ours: Ours) -> None:
        if entry.contestant is None:
            return
        try:
            entry.answers[ours.name] = ours.within(entry.contestant.peak_bytes)
        except BudgetTooSmallError as error:
            entry.reasons[ours.name] = f"needs {self.percent(error.least_peak_bytes)}"

    def run(self, *, seconds: float, least_rounds: int) -> None:
        """Race each variant against its plans."""
        groups = [[e.contestant, *e.answers.values()] for e in self.entries if e.contestant is not None]
        self.say(f"timing {sum(map(len, groups))} contestants for {seconds:.0f} s")
        self.race.run(groups, seconds=seconds, least_rounds=least_rounds)

    def percent(self, peak_bytes: int) -> str:
        """Format a peak as a fraction of the eager step's activations."""
        resident_bytes = self.step.resident_bytes
        part = (peak_bytes - resident_bytes) / (self.plain.peak_bytes - resident_bytes)
        return f"{100 * part:.1f} %"

    def _left_out(self, peer: Peer) -> Entry:
        self._keep([Number("failed", "text", peer.name, "left out, no time")])
        return Entry(peer=peer, reasons={"": "left out, no time"})

    def _entry(self, peer: Peer) -> Entry:
        begin = time.perf_counter()
        try:
            contestant = Contestant(name=peer.name, recompute=peer.recompute(self.step))
            with contestant.recompute.on():
                self.step.run()
            contestant.compile_s = compile_s = time.perf_counter() - begin
            contestant = self._measured(contestant)
        except Exception as error:  # a variant's error is a result; the others are still measured
            self.step.clear()
            self.say(f"  {peer.name}: {reason(error)}")
            self._keep([Number("failed", "text", peer.name, reason(error))])
            return Entry(peer=peer, reasons={"": reason(error)})
        self.say(f"  {peer.name}: {self.percent(contestant.peak_bytes)}, compiled in {compile_s:.0f} s")
        rows = [
            Number("peak", "bytes", peer.name, contestant.peak_bytes),
            Number("compile_time", "s", peer.name, compile_s),
        ]
        self._keep([*rows, Number("gradients_largest_difference", "1", peer.name, contestant.difference)])
        return Entry(peer=peer, contestant=contestant)

    def _measured(self, contestant: Contestant) -> Contestant:
        begin = time.perf_counter()
        with contestant.recompute.on():
            contestant.difference = largest_difference(self._expected, self.step.gradients(copied=False))
            if contestant.plan is not None and "compile" in {unit.engine for unit in contestant.plan.units.values()}:
                contestant.compile_s = time.perf_counter() - begin
            contestant.peak_bytes = self.step.peak_bytes()
        return contestant


def table(found: Comparison) -> str:
    """Format the results of one model."""
    names = [ours.name for ours in found.makers]
    columns = "peak | to eager | to the variant | compiled in"
    header = ["compiled variant", "its peak", "to eager", "compiled in", *(f"{n}: {columns}" for n in names)]
    header = " | ".join(header).split(" | ")
    rows = []
    for entry in found.entries:
        one = entry.contestant
        if one is None:
            rows.append([entry.peer.name, entry.reasons[""], *[""] * (len(header) - 2)])
            continue
        is_right = one.difference <= _TOLERANCE
        row = [entry.peer.name + ("" if is_right else f" (gradients differ by {one.difference:.0e})")]
        row += [found.percent(one.peak_bytes), _change(one.slowdown) if one.ratios else "not timed", _seconds(one)]
        for name in names:
            answer = entry.answers.get(name)
            if answer is None or not answer.ratios:
                row += [entry.reasons.get(name, "not timed"), "", "", ""]
                continue
            ratios = answer.time_ratios_to(one)
            low, middle, high = (percentile(ratios, p) - 1 for p in (20, 50, 80))
            row += [found.percent(answer.peak_bytes), _change(answer.slowdown)]
            row += [f"{_change(middle)} ({100 * low:+.1f} .. {100 * high:+.1f})", _seconds(answer)]
        rows.append(row)
    return markdown(rows, header)


def _seconds(contestant: Contestant) -> str:
    return f"{contestant.compile_s:.0f} s" if contestant.compile_s else ""


def _change(ratio: float) -> str:
    return f"{100 * ratio:+.1f} %"


def numbers(found: Comparison) -> list[Number]:
    """Return all results as rows, except those of single variants, which are saved as they come."""
    rows = [Number("peak", "bytes", found.plain.name, found.plain.peak_bytes)]
    rows += [Number("resident", "bytes", found.plain.name, found.step.resident_bytes)]
    if found.race.plain_s:
        rows += [Number("step_time", "s", found.plain.name, statistics.median(found.race.plain_s))]
    for entry in found.entries:
        if entry.contestant is None:
            continue
        rows += [Number("failed", "text", f"{name} / {entry.peer.name}", why) for name, why in entry.reasons.items()]
        rows += entry.contestant.numbers()
        for name, answer in entry.answers.items():
            ratios = answer.time_ratios_to(entry.contestant)
            versus = f"{name} / {entry.peer.name}"
            rows += [Number("peak", "bytes", versus, answer.peak_bytes)]
            rows += [Number("compile_time", "s", versus, answer.compile_s)] if answer.compile_s else []
            if ratios:
                rows += [Number("time_ratio_at_equal_peak", "1", versus, percentile(ratios, 50))]
                rows += [Number(f"time_ratio_at_equal_peak_p{p}", "1", versus, percentile(ratios, p)) for p in (20, 80)]
                rows += [Number("rounds", "1", versus, len(ratios))]
    return rows


@few_objects()
def run_model(flags: Flags, model: ModelName, console: Console, rows: RowsFile | None = None) -> Comparison:
    """Run one model; write rows as soon as they are known, by default to `compiled.csv` in the folder of the flags."""
    rows = rows or RowsFile(flags.out / "compiled.csv", {**dataclasses.asdict(flags.step), "model": model})
    console.print(f"{DESCRIPTIONS[model]}: {flags.step}", style="bold")
    found = Comparison(
        flags,
        model,
        lambda text: console.print(text, style="dim", highlight=False),
        rows.append,
    )
    chosen = [peer for peer in compiled_peers(flags.backend) if flags.only in peer.name]
    found.prepare(chosen, compile_s=60 * flags.compile_minutes)
    found.run(seconds=60 * flags.minutes, least_rounds=flags.least_rounds)
    rows.append(numbers(found))
    resident = format_bytes(found.step.resident_bytes)
    peak = format_bytes(found.plain.peak_bytes)
    text = f"### {DESCRIPTIONS[model]}, compiled\n\n{flags.step}; the eager step peaks at {peak}, {resident} of it resident."
    text += f"\n\n{table(found)}\n"
    console.print(text, highlight=False, soft_wrap=True, markup=False)
    return found


def quick(flags: Flags) -> Flags:
    """Return the flags of a smoke test on tiny sizes."""
    step = dataclasses.replace(flags.step, hidden_size=32, num_layers=2, vocab_size=64, seq_length=32, threads=1)
    return dataclasses.replace(flags, step=step, minutes=0.0, least_rounds=1, only=flags.only or "full")


@contextmanager
def empty_cache() -> Iterator[None]:
    """Disable compile caches of earlier runs, because compile times are reported."""
    with tempfile.TemporaryDirectory(prefix="compiled-", ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        yield


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark with the flags of the command line."""
    flags = parse(Flags, __doc__, arguments)
    keep_freed_memory()
    if flags.quick:
        flags = quick(flags)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(width=None if sys.stdout.isatty() else 140)
    with empty_cache():
        for model in flags.models:
            if run_model(flags, model, console).race.is_interrupted:
                break
    console.print(f"appended to {flags.out / 'compiled.csv'}", soft_wrap=True)


if __name__ == "__main__":
    main()
