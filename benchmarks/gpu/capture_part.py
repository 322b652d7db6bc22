"""Whole steps as CUDA graphs: the plain one, checkpointing, and plans within its memory. Pools, times, bits, kernels.

Captured is compared with captured: kernels under capture need not be the eager ones. All of them are kernels that repeat
themselves. On a CPU a function that runs again stands in for a graph.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from gpu.engines_part import case_of
from gpu.part import Context, deterministic_kernels
from gpu.prediction_part import Loop
from recollect.byte_format import format_bytes
from recollect.capturing.captured_step import CapturedStep
from recollect.capturing.cuda_graphs import CudaGraphs, Graphs
from recollect.engine.captured import told_of_capture
from recollect.errors import BudgetTooSmallError
from recollect.measuring.meter import storage_bytes
from recollect.measuring.timing import wait_for
from recollect.recording.eager_masks import eager_masks
from recollect.recording.model_step import Step, resident_tensors
from recompute import Nothing, Recompute, Replaced
from results_csv import Number

PLAIN = "plain"
_ROUNDS_S = 20.0
_STEPS_A_TURN = 5
_NUM_REPLAYS = 50
_MOST_KERNELS = 6


@dataclass(eq=False, kw_only=True)
class Way:
    """A step that can be repeated.

    Attributes:
        replay: runs it; gradients are then in `gradients`.
        holds: what the graph reads.
        step_s: seconds of a step among steps back to back, turn by turn.
    """

    name: str
    pool_bytes: int
    replay: Callable[[], object]
    gradients: list[torch.Tensor]
    holds: object = None
    step_s: list[float] = field(default_factory=list)


class _Runs:
    """Stands in for graphs on a CPU."""

    @contextmanager
    def running(self) -> Iterator[None]:
        yield

    rehearsing = running

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        return step(), lambda: None

    def pool_bytes(self) -> int:
        return 0


class Captures:
    """One model, and its step in several captured forms."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.case = case_of(context, "2048")
        self.loop = Loop(self.case, None)
        self.ways: dict[str, Way] = {}

    def write(self, name: str, **values: tuple[str, float | int | str]) -> None:
        """Write what was measured, each with its unit, and say it."""
        self.context.write(
            [Number(metric, unit, name, value) for metric, (unit, value) in values.items()], **asdict(self.case.sizes)
        )
        shown = (f"{metric} {format_bytes(int(v)) if unit == 'bytes' else v}" for metric, (unit, v) in values.items())
        self.context.say(f"{name}: {', '.join(shown)}")

    def _graphs(self) -> Graphs:
        return CudaGraphs(self.loop.device) if self.loop.device.type == "cuda" else _Runs()

    def peers(self) -> None:
        """Capture the plain step and checkpointing, by hand."""
        layers = list(self.loop.step.layers.values())

        def every(number: int) -> Recompute:
            # Capture refuses to read the state of a generator, which PyTorch's checkpoint does by default.
            options = {"use_reentrant": False, "preserve_rng_state": False}
            return Replaced(
                {layer: functools.partial(checkpoint, layer.forward, **options) for layer in layers[::number]}
            )

        for name, recompute in {PLAIN: Nothing(), "every layer": every(1), "every 2nd layer": every(2)}.items():
            self.context.attempt(name, functools.partial(self._by_hand, name, recompute))

    def _by_hand(self, name: str, recompute: Recompute) -> None:
        graphs = self._graphs()
        parameters = list(self.loop.model.parameters())

        def step() -> torch.Tensor:
            # Ours do the same: no masks, and in warm-up steps what is captured.
            with told_of_capture(), eager_masks(self.loop.batch, is_like_others=True):
                loss: torch.Tensor = self.loop.model(**self.loop.batch).loss
                loss.backward()
            return loss.detach()

        with recompute.on():
            for _ in range(3):
                self.loop.clear()
                with graphs.running():
                    step()
            self.loop.clear()
            begin = time.perf_counter()
            _, replay = graphs.capture(step)
            capture_s = time.perf_counter() - begin
        gradients = [p.grad for p in parameters if p.grad is not None]
        self.loop.clear()
        self._add(Way(name=name, pool_bytes=graphs.pool_bytes(), replay=replay, gradients=gradients))
        self.write(name, capturing=("s", capture_s))

    def plans(self, engine: Literal["tape", "graph"]) -> None:
        """Capture plans within the memory of each peer."""
        for peer in [*self.ways]:
            if not peer.startswith("every"):
                continue
            self.context.attempt(f"{engine} / {peer}", functools.partial(self._planned, engine, peer))

    def _planned(self, engine: Literal["tape", "graph"], peer: str) -> None:
        name, model, batch = f"{engine} / {peer}", self.loop.model, self.loop.batch
        # On a CPU there are no pools: some budget.
        resident_bytes = storage_bytes(resident_tensors(model, batch))
        budget: int | str = resident_bytes + self.ways[peer].pool_bytes if self.ways[peer].pool_bytes else "100%"
        graphs, begin = self._graphs(), time.perf_counter()

        def made(budget: int | str) -> CapturedStep:
            step = Step(model, batch, None, None, holds_output=False, gradients="freed")
            return CapturedStep(step, budget, graphs=lambda: graphs, engine=engine, log=self.context.say)

        try:
            captured = made(budget)
        except BudgetTooSmallError as refused:
            self.write(name, refused_below=("bytes", refused.least_peak_bytes))
            captured = made(refused.least_peak_bytes)
        self.write(
            name,
            capturing=("s", time.perf_counter() - begin),
            predicted_pool=("bytes", captured.predicted_pool_bytes),
            predicted_slowdown=("1", captured.plan.predicted_slowdown or 0.0),
        )
        (kind,) = captured._kinds.values()
        assert kind.graph is not None
        gradients = [gradient for _, gradient in kind.graph.gradients]
        kind.applied.remove()  # The graph does without.
        way = Way(name=name, pool_bytes=captured.pool_bytes, replay=kind.graph.replay, gradients=gradients)
        way.holds = captured
        self._add(way)

    def _add(self, way: Way) -> None:
        self.ways[way.name] = way
        self.write(way.name, pool=("bytes", way.pool_bytes))

    def bits(self) -> None:
        """Compare the gradients of all ways with those of the captured plain step, over many replays."""
        plain = self.ways[PLAIN]
        plain.replay()
        expected = [gradient.clone() for gradient in plain.gradients]
        for name, way in self.ways.items():
            num_equal = len(expected)
            for _ in range(2 if self.context.is_dry_run else _NUM_REPLAYS):
                way.replay()
                num_equal = min(num_equal, sum(map(torch.equal, expected, way.gradients)))
            self.write(name, equal_gradients=("text", f"{num_equal} of {len(expected)}"))

    def times(self) -> None:
        """Time all ways, and the eager plain step, in turns."""

        def eager() -> None:
            self.loop.step.run()
            self.loop.clear()

        ways = {**self.ways, "plain, eager": Way(name="plain, eager", pool_bytes=0, replay=eager, gradients=[])}
        begin, num_done = time.perf_counter(), 0
        seconds = 0.0 if self.context.is_dry_run else _ROUNDS_S
        while num_done < 1 or time.perf_counter() - begin < seconds:
            for way in ways.values():
                wait_for(self.loop.device)
                start = time.perf_counter()
                for _ in range(_STEPS_A_TURN):
                    way.replay()
                wait_for(self.loop.device)
                way.step_s.append((time.perf_counter() - start) / _STEPS_A_TURN)
            num_done += 1
        plain = ways[PLAIN].step_s
        for name, way in ways.items():
            ratio = statistics.median(own / other for own, other in zip(way.step_s, plain, strict=True))
            self.write(name, step_time=("s", statistics.median(way.step_s)), to_plain=("1", round(ratio, 4)))

    def kernels(self) -> None:
        """Name the kernels that take different time in the plain step, eagerly and captured."""
        if self.loop.device.type != "cuda":
            return
        found = {}
        for name, run in {"eager": self.loop.step.run, "captured": self.ways[PLAIN].replay}.items():
            self.loop.clear()
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                run()
                wait_for(self.loop.device)
            found[name] = Counter({event.key: event.device_time_total for event in profiler.key_averages()})
            self.write(f"{PLAIN}, {name}", kernels=("s", 1e-6 * found[name].total()))
        self.loop.clear()
        names = found["eager"].keys() | found["captured"].keys()
        for key in sorted(names, key=lambda key: -abs(found["eager"][key] - found["captured"][key]))[:_MOST_KERNELS]:
            self.write(key[:80], **{f"{how}_kernel": ("s", 1e-6 * times[key]) for how, times in found.items()})


def run(context: Context) -> str:
    """Capture, compare and time; what matters most first."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with ExitStack() as stack:
        stack.enter_context(deterministic_kernels())
        found = Captures(context)
        stages: dict[str, Callable[[], None]] = {
            "peers": found.peers,
            "tape": functools.partial(found.plans, "tape"),
            "graph": functools.partial(found.plans, "graph"),
            "bits": found.bits,
            "times": found.times,
            "kernels": found.kernels,
        }
        for name, stage in stages.items():
            if context.begins(name):
                context.attempt(name, stage)
    plans = [way for name, way in found.ways.items() if "/" in name and way.step_s]
    if not plans:
        return "nothing was captured"
    ratios = ", ".join(f"{way.name} {statistics.median(way.step_s) * 1e3:.1f} ms" for way in plans)
    return f"captured steps: {ratios}; plain {statistics.median(found.ways[PLAIN].step_s) * 1e3:.1f} ms"
