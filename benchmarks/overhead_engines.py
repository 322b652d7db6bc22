"""The tape and traces beside checkpoint and SAC, on tiny models in bf16 and one thread: host times and measured peaks.

Times are of this process on its CPU, ratios to the plain step right before and after, medians over rounds. A plan that keeps
least recomputes all that it can; one that keeps all recomputes a single value of each layer that its backward does not read.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map

import recollect
from contest import Contestant, check_gradients, percentile
from gpu.engines_saved import Traces
from models import ModelName
from peers import ATTENTION, GROUPED, LINEAR, MATMUL, full, selective
from recollect.byte_format import format_bytes
from recollect.lab.bench.race import Race, few_objects
from recollect.simulation.decisions import recompute_unread_unit
from recompute import Nothing, Recompute, Replaced, SwitchablePlan
from results_csv import Number
from subject import Step, StepFlags

__all__ = ["MODELS", "Tiny", "tables"]

MODELS: dict[ModelName, str] = {"dense": "Llama", "gpt2": "GPT-2", "bert": "BERT", "moe": "Mixtral"}
_PLAIN = "plain"
_ENGINES = ("tape", "graph")
# Noted, traced, and run from the trace.
_WARM_UP = 4
_LAYER_RUNS = 4


class Layer:
    """Forward and backward of the layer in the middle, on what the step gives to it."""

    def __init__(self, step: Step) -> None:
        self.module = list(step.layers.values())[len(step.layers) // 2]
        hook = self.module.register_forward_pre_hook(self._note, with_kwargs=True)
        step.run()
        hook.remove()
        hidden = next(one for one in self._args if isinstance(one, Tensor))
        hidden.requires_grad_()
        self._gradient = torch.randn_like(hidden)

    def _note(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self._args, self._kwargs = tree_map(
            lambda one: one.detach() if isinstance(one, Tensor) else one, (args, kwargs)
        )

    def run(self) -> None:
        """Run it once; gradients add up."""
        output = self.module(*self._args, **self._kwargs)
        (output if isinstance(output, Tensor) else output[0]).backward(self._gradient)


class Tiny:
    """One model and all ways to run it.

    Args:
        splits: have products read DTensors, as under tensor parallelism, which is of this process only.

    Attributes:
        ways: in the order of the tables; those of a layer have the same names.
        plain_bytes, plain_s, plain_layer_s: peak and median seconds of the plain step, and seconds of its layer.
        num_rounds: of the race that had fewer.
        not_traced: what should run from a trace and does not, with the reasons.
    """

    def __init__(self, model: ModelName, *, num_layers: int = 3, seed: int = 0, splits: bool = False) -> None:
        sizes = StepFlags(
            hidden_size=64, num_layers=num_layers, vocab_size=96, seq_length=32, dtype="bf16", threads=1, seed=seed
        )
        self.model, self.splits = model, splits
        self.step = Step(sizes, model)
        if model == "moe":
            # As by default: hooks of transformers collect them, which keeps the layers off traces.
            self.step.model.config.output_router_logits = False
        if splits:
            _split(self.step.layers.values())
        self.layer = Layer(self.step)
        self.not_traced: list[str] = []

    def run(self, *, seconds: float, least_rounds: int, report: Callable[[str], None]) -> None:
        """Measure peaks, then race steps, then layers.

        Raises:
            RuntimeError: a gradient has not the bits that it has in the plain step.
        """
        with few_objects(), ExitStack() as stack:
            self.ways = [Contestant(name=name, recompute=one) for name, one in self._recomputes(stack).items()]
            check_gradients(self.step, self.ways)
            self.plain_bytes = self.step.peak_bytes()
            for way in self.ways:
                with way.recompute.on():
                    way.peak_bytes = self.step.peak_bytes()
            self.layer_ways = [Contestant(name=way.name, recompute=way.recompute) for way in self.ways]
            race = self._race(self.step.run, report)
            race.run([[way] for way in self.ways], seconds=seconds / 2, least_rounds=least_rounds)
            layers = self._race(self._layers, report)
            layers.run([[way] for way in self.layer_ways], seconds=seconds / 2, least_rounds=least_rounds)
            self.num_rounds = min(race.num_rounds, layers.num_rounds)
            self.plain_s = percentile(race.reference_s, 50)
            self.plain_layer_s = percentile(layers.reference_s, 50) / _LAYER_RUNS

    def _layers(self) -> None:
        for _ in range(_LAYER_RUNS):
            self.layer.run()

    def _race(self, run: Callable[[], object], report: Callable[[str], None]) -> Race[Contestant]:
        def seconds(recompute: Recompute) -> float:
            self.step.clear()
            gc.collect()
            with recompute.on():
                begin = time.process_time()
                run()
                return time.process_time() - begin

        plain = Nothing()
        return Race(
            lambda: seconds(plain), lambda way: seconds(way.recompute), report=report, seed=self.step.flags.seed
        )

    def _recomputes(self, stack: ExitStack) -> dict[str, Recompute]:
        layers = list(self.step.layers.values())
        found: dict[str, Recompute] = {
            "checkpoint": Replaced(full(layers)),
            "SAC, keeps products and attention": Replaced(selective(layers, MATMUL | LINEAR | GROUPED | ATTENTION)),
        }
        profile = self.step.record()
        plans = {"least": recollect.classic_plan(profile, "full"), "all": keeps_almost_all(profile)}
        for what, plan in plans.items():
            for engine in _ENGINES:
                found[f"{engine}, keeps {what}"] = self._applied(plan.with_engine(engine), stack)
        for recompute in found.values():
            self._warm_up(recompute)
        return found

    def _applied(self, plan: recollect.Plan, stack: ExitStack) -> SwitchablePlan:
        applied = stack.enter_context(recollect.apply(self.step.model, plan))
        found = SwitchablePlan(applied)
        self._warm_up(found)
        self.not_traced += [f"{MODELS[self.model]}, {why}" for why in Traces.reasons(applied)]
        return found

    def _warm_up(self, recompute: Recompute) -> None:
        with recompute.on():
            for _ in range(_WARM_UP):
                self.step.run()
                self.layer.run()

    def numbers(self) -> list[Number]:
        """Return all results as rows."""
        name = f"{MODELS[self.model]}{', DTensors' if self.splits else ''}"
        rows = [
            Number("engine_peak", "bytes", f"{name}, {_PLAIN}", self.plain_bytes),
            Number("engine_step_time", "s", f"{name}, {_PLAIN}", self.plain_s),
            Number("engine_layer_time", "s", f"{name}, {_PLAIN}", self.plain_layer_s),
        ]
        for way, layer in zip(self.ways, self.layer_ways, strict=True):
            rows.append(Number("engine_peak", "bytes", f"{name}, {way.name}", way.peak_bytes))
            rows += way.numbers("engine_step_slowdown", f"{name}, {way.name}")
            rows += layer.numbers("engine_layer_slowdown", f"{name}, {way.name}")
        return rows


def _split(layers: Iterable[nn.Module]) -> None:
    """Have Llama's layers split their products over the processes of a group, which is this one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    by_rows = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    ways: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in by_rows}
    ways |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in layers:
        parallelize_module(layer, init_device_mesh("cpu", (1,)), ways)


def keeps_almost_all(profile: recollect.Profile) -> recollect.Plan:
    """Return a plan that keeps all that backward reads; a plan that keeps everything would leave the layers as they are."""
    repeated = [call for call in profile.calls if call.repeated]
    return recollect.Plan({call.path: recompute_unread_unit(profile.graph_of(call)) for call in repeated})


def tables(found: Sequence[Tiny]) -> list[Table]:
    """Return a table of steps and one of layers, in Markdown."""
    steps, layers = (_table(found, what) for what in ("a whole step, and its peak", "one layer, forward and backward"))
    steps.add_row(_PLAIN, *(f"{1e3 * one.plain_s:.1f} ms, {format_bytes(one.plain_bytes)}" for one in found))
    layers.add_row(_PLAIN, *(f"{1e3 * one.plain_layer_s:.2f} ms" for one in found))
    for place, way in enumerate(found[0].ways):
        of_step = [one.ways[place] for one in found]
        cells = [f"{1 + one.slowdown:.2f}, {format_bytes(one.peak_bytes)}" for one in of_step]
        steps.add_row(way.name, *cells)
        layers.add_row(way.name, *(f"{1 + one.layer_ways[place].slowdown:.2f}" for one in found))
    return [steps, layers]


def _table(found: Sequence[Tiny], what: str) -> Table:
    table = Table(box=box.MARKDOWN)
    table.add_column(f"host time to plain, {what}")
    for one in found:
        table.add_column(MODELS[one.model], justify="right")
    return table
