"""Plans on the tape and from traces, beside checkpointing at equal peak: host and step time, peaks, bits, and what is saved.

At width 2048 Python is the limit, at 4096 kernels hide it. A turn begins with an idle device: the first of its steps tells when
`backward()` returns, and all together how long a step takes back to back. Numbers are written as soon as they are there.
"""

from __future__ import annotations

import functools
import gc
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch
from rich.table import Table

import recollect
from gpu.engines_saved import Traces, saved_and_kept
from gpu.part import Context, deterministic_kernels
from gpu.prediction_part import Case, Loop
from peers import ATTENTION, GROUPED, LINEAR, MATMUL, full, selective
from recollect.byte_format import format_bytes
from recollect.errors import BudgetTooSmallError
from recollect.measuring.device_memory import empty_cache
from recollect.measuring.meter import measure_peak, storage_bytes
from recollect.measuring.timing import wait_for
from recollect.plans.action import EngineChoice
from recollect.recording.model_step import resident_tensors
from recollect.simulation.clocks import StepTimes, has_two_clocks, step_times
from recollect.simulation.decisions import decide
from recompute import Nothing, Recompute, Replaced, SwitchablePlan
from results_csv import Number
from subject import StepFlags

Engine = Literal["tape", "graph"]

PLAIN = "plain"
_PEERS = ("every layer", "SAC products", "every 2nd layer")
_ENGINES: tuple[Engine, ...] = ("tape", "graph")
# A unit is noted in its first step, and traced in the second; the third may trace a backward of another kind.
_NUM_FIRST = 3
_STEPS_A_TURN = 3
_ROUNDS_S = 30.0
# Width, layers, sequences; the tokens of each are 4096.
_WIDTHS = {"2048": (2048, 16, 1), "4096": (4096, 8, 2)}


@dataclass(eq=False, kw_only=True)
class Way:
    """A way to run the step, and what was measured of it.

    Attributes:
        peak_bytes: of a step, once all is traced.
        host_s: seconds until `backward()` had returned, turn by turn.
        step_s: seconds of a step among steps back to back, turn by turn.
        predicted: the same by two clocks; None of peers.
    """

    name: str
    recompute: Recompute
    peak_bytes: int = 0
    host_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    predicted: StepTimes | None = None

    def ratio(self, plain: Way) -> float:
        """Return the median of its step's time over the plain one's, turn by turn."""
        return statistics.median(own / other for own, other in zip(self.step_s, plain.step_s, strict=False))


class Width:
    """One model, and all ways to run its step, of which each is active only in its turn."""

    def __init__(self, context: Context, case: Case, stack: ExitStack) -> None:
        self.context = context
        self.loop = Loop(case, None)
        self.sizes = case.sizes
        self.ways: dict[str, Way] = {}
        self._stack = stack
        self._profile: recollect.Profile | None = None

    def write(self, name: str, **values: tuple[str, float | int | str]) -> None:
        """Write what was measured of a way, each with its unit, and print it."""
        self.context.write(
            [Number(metric, unit, name, value) for metric, (unit, value) in values.items()], **asdict(self.sizes)
        )
        shown = ", ".join(f"{metric} {_shown(unit, value)}" for metric, (unit, value) in values.items())
        self.context.say(f"{name}: {shown}")

    def peers(self) -> None:
        """Measure the peaks of the plain step and of the peers."""
        layers = list(self.loop.step.layers.values())
        found: dict[str, Recompute] = {
            PLAIN: Nothing(),
            "every layer": Replaced(full(layers)),
            "SAC products": Replaced(selective(layers, MATMUL | LINEAR | GROUPED | ATTENTION)),
            "every 2nd layer": Replaced(full(layers, every=2)),
        }
        for name, recompute in found.items():
            self._add(Way(name=name, recompute=recompute))

    def record(self) -> None:
        """Record the step, from which all plans are made."""
        begin = time.perf_counter()
        self._profile = recollect.record(self.loop.model, self.loop.batch, holds_output=False, gradients="freed")
        self.write("profile", recording=("s", time.perf_counter() - begin))
        if (host := self._profile.host) is not None:
            self.write("profile", **{f"host_{name}": ("s", seconds) for name, seconds in asdict(host).items()})
        if PLAIN in self.ways:
            self._predict(self.ways[PLAIN], recollect.Plan({}))

    def plans(self, peer: str) -> None:
        """Apply and measure the plan for the peak of a peer, on each engine."""
        if self._profile is None or peer not in self.ways:
            raise RuntimeError(f"there is no profile, or no peak of {peer!r}")
        for engine in _ENGINES:
            self.context.attempt(f"{engine} / {peer}", functools.partial(self._planned, engine, peer))

    def _planned(self, engine: Engine, peer: str) -> None:
        assert self._profile is not None
        name, begin = f"{engine} / {peer}", time.perf_counter()
        try:
            plan = recollect.plan(self._profile, self.ways[peer].peak_bytes, engine=engine)
        except BudgetTooSmallError as refused:
            self.write(name, refused_below=("bytes", refused.least_peak_bytes))
            plan = recollect.plan(self._profile, refused.least_peak_bytes, engine=engine)
        self.write(
            name,
            planning=("s", time.perf_counter() - begin),
            budget=("bytes", plan.budget_bytes or 0),
            predicted_peak=("bytes", plan.predicted_peak_bytes or 0),
            predicted_slowdown=("1", plan.predicted_slowdown or 0.0),
        )
        self._plan(name, plan)

    def _plan(self, name: str, plan: recollect.Plan) -> None:
        applied = self._stack.enter_context(recollect.apply(self.loop.model, plan))
        with Traces() as traces:
            way = Way(name=name, recompute=SwitchablePlan(applied))
            self._predict(way, plan)
            self._add(way)
        asked = [path for path, unit in plan.units.items() if unit.engine is EngineChoice.GRAPH]
        if not asked:
            return
        self.write(
            name,
            units_asked=("1", len(asked)),
            units_traced=("1", len(traces.units)),
            why_not=("text", "; ".join(traces.reasons(applied)) or "none"),
        )
        if traces.units:
            assert self._profile is not None
            numbers, table = saved_and_kept(name, traces.units, plan, self._profile)
            self.context.write(numbers, **asdict(self.sizes))
            self.context.console.print(table)

    def _predict(self, way: Way, plan: recollect.Plan) -> None:
        """Write how long host and device should work in a step, and how long it should take."""
        assert self._profile is not None
        if not has_two_clocks(self._profile):
            return
        way.predicted = times = step_times(self._profile, decide(self._profile, plan))
        self.write(
            way.name,
            predicted_host_time=("s", times.host_s),
            predicted_device_time=("s", times.device_s),
            predicted_step_time=("s", times.step_s),
        )

    def _add(self, way: Way) -> None:
        """Run a way's first steps, and measure its peaks: of these, of a later one, and with two micro-batches."""
        with way.recompute.on():
            begin = time.perf_counter()
            first = [self.loop.peak().peak_bytes for _ in range(_NUM_FIRST)]
            first_s = time.perf_counter() - begin
            begin = time.perf_counter()
            way.peak_bytes = self.loop.peak().peak_bytes
            later_s = time.perf_counter() - begin
            self.write(
                way.name,
                peak=("bytes", way.peak_bytes),
                first_peak=("bytes", max(first)),
                tracing=("s", first_s - _NUM_FIRST * later_s),
            )
            self.ways[way.name] = way
            self.write(way.name, held=("bytes", self._held_bytes()), two_peak=("bytes", self._two_peak_bytes()))

    def _held_bytes(self) -> int:
        """Return what forward leaves behind for backward."""
        found = measure_peak(lambda: self.loop.model(**self.loop.batch).loss, device=self.loop.device)
        found.result.backward()
        self.loop.clear()
        return found.end_bytes - found.start_bytes

    def _two_peak_bytes(self) -> int:
        """Return the peak of a step of two micro-batches, the second of which adds to gradients."""

        def two() -> None:
            self.loop.step.run()
            self.loop.step.run()

        baseline_bytes = None
        if self.loop.device.type != "cuda":
            baseline_bytes = storage_bytes(resident_tensors(self.loop.model, self.loop.batch, None))
        empty_cache(self.loop.device)
        found = measure_peak(two, device=self.loop.device, baseline_bytes=baseline_bytes).peak_bytes
        self.loop.clear()
        return found

    def times(self, *, seconds: float, least_rounds: int) -> None:
        """Time all ways in turns, and write the medians after each round."""
        begin, num_done = time.perf_counter(), 0
        while num_done < least_rounds or (time.perf_counter() - begin) * (1 + 1 / num_done) < seconds:
            for way in self.ways.values():
                with way.recompute.on():
                    self._turn(way)
            num_done += 1
            self._write_times(num_done)

    def _turn(self, way: Way) -> None:
        gc.collect()
        wait_for(self.loop.device)
        begin = time.perf_counter()
        self.loop.step.run()
        way.host_s.append(time.perf_counter() - begin)
        self.loop.clear()
        for _ in range(_STEPS_A_TURN - 1):
            self.loop.run()
        wait_for(self.loop.device)
        way.step_s.append((time.perf_counter() - begin) / _STEPS_A_TURN)

    def _write_times(self, num_rounds: int) -> None:
        numbers = []
        for way in self.ways.values():
            numbers += [
                Number("host_time", "s", way.name, statistics.median(way.host_s)),
                Number("step_time", "s", way.name, statistics.median(way.step_s)),
                Number("rounds", "1", way.name, num_rounds),
            ]
            if PLAIN in self.ways:
                numbers.append(Number("to_plain", "1", way.name, way.ratio(self.ways[PLAIN])))
        self.context.write(numbers, **asdict(self.sizes))
        self.context.console.print(self._table(num_rounds))

    def _table(self, num_rounds: int) -> Table:
        found = Table(title=f"{self.sizes}, {num_rounds} rounds", title_justify="left")
        for heading in ("", "peak", "host ms", "predicted", "step ms", "predicted", "kernels predicted", "to plain"):
            found.add_column(heading, justify="right" if heading else "left")
        for way in self.ways.values():
            host, step = (f"{1e3 * statistics.median(times):.1f}" for times in (way.host_s, way.step_s))
            clocks = ("", "", "") if way.predicted is None else [f"{1e3 * seconds:.1f}" for seconds in way.predicted]
            ratio = f"{way.ratio(self.ways[PLAIN]):.3f}" if PLAIN in self.ways else ""
            found.add_row(way.name, format_bytes(way.peak_bytes), host, clocks[0], step, clocks[2], clocks[1], ratio)
        return found

    def bits(self) -> None:
        """Compare the gradients of our ways with those of the plain step, with kernels that repeat themselves."""
        with deterministic_kernels():
            expected = self._gradients()
            for name, way in self.ways.items():
                if not name.startswith(_ENGINES):
                    continue
                with Traces() as traces, way.recompute.on():
                    # Other settings: traced anew.
                    for _ in range(_NUM_FIRST):
                        got = self._gradients()
                num_equal = sum(map(torch.equal, expected, got))
                self.write(
                    name,
                    equal=("bool", int(num_equal == len(expected) == len(got))),
                    equal_gradients=("text", f"{num_equal} of {len(expected)}"),
                    units_traced_again=("1", len(traces.units)),
                )

    def _gradients(self) -> list[torch.Tensor]:
        self.loop.clear()
        self.loop.step.run()
        found = [p.grad for p in self.loop.model.parameters() if p.grad is not None]
        self.loop.clear()
        return found


def _shown(unit: str, value: float | int | str) -> str:
    if unit == "bytes":
        return format_bytes(int(value))
    return value if isinstance(value, str) else f"{value:.4g}{'' if unit == '1' else ' ' + unit}"


def case_of(context: Context, width: str) -> Case:
    """Return the model and sizes of a width."""
    hidden_size, num_layers, batch_size = _WIDTHS[width]
    sizes = context.large_step(hidden_size=hidden_size, num_layers=num_layers, batch_size=batch_size)
    if context.is_dry_run:
        sizes = StepFlags(
            hidden_size=64, num_layers=3, vocab_size=64, batch_size=1, seq_length=256, dtype="bf16", threads=1
        )
    return Case(name=f"Llama {width}", model="dense", sizes=sizes)


def run(context: Context, *, width: str) -> str:
    """Measure one width, what matters most first."""
    # For the bits: read once, by the first product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with ExitStack() as stack:
        found = Width(context, case_of(context, width), stack)
        peers = _PEERS[:1] if context.is_dry_run else _PEERS
        stages: dict[str, Callable[[], None]] = {
            "peers": found.peers,
            "recording": found.record,
            **{f"plans / {peer}": functools.partial(found.plans, peer) for peer in peers},
            "times": functools.partial(
                found.times,
                seconds=0.0 if context.is_dry_run else _ROUNDS_S,
                least_rounds=1 if context.is_dry_run else 3,
            ),
            "bits": found.bits,
        }
        for name, stage in stages.items():
            if context.begins(name):
                context.attempt(name, stage)
        return _finding(found)


def _finding(found: Width) -> str:
    plain = found.ways.get(PLAIN)
    if plain is None or not plain.step_s:
        return "nothing was timed"
    parts = []
    for peer in _PEERS:
        ways = [found.ways[name] for name in (peer, *(f"{one} / {peer}" for one in _ENGINES)) if name in found.ways]
        parts.append(f"{peer} " + ", ".join(f"{way.ratio(plain):.3f}" for way in ways))
    return f"step time to plain, peer, tape and graph at its peak: {'; '.join(parts)}"
