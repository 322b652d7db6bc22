"""Train models of libraries that people build on: the same weights, every step within its budget?

    pip install timm x-transformers open_clip_torch litgpt torch_geometric torchvision
    pip install torchaudio monai denoising_diffusion_pytorch ultralytics
    python benchmarks/libraries.py                    # about an hour on one core
    python benchmarks/libraries.py --models timm/swin

Each model is trained for six steps without a plan, and under `recollect.attach` on both engines: at the budget that is a
quarter of the way from the least possible peak to the plain one. Peaks are read from a meter that shares nothing with
recollect's, from the third step on: the first is recorded, and in the second layers run on the tape once.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import recollect
from allocator_meter import AllocatorMeter, is_loaded, metered_environment
from flags import RESULTS, parse
from library_models import LIBRARIES, Model
from recollect.byte_format import format_bytes
from recollect.errors import BudgetTooSmallError
from results_csv import Number, append

STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What to train."""

    models: tuple[str, ...] = ()
    """Beginnings of names; all if empty."""
    engines: tuple[str, ...] = ("tape", "graph")
    """Engines."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of one training."""

    weights: dict[str, str]
    peak_bytes: int
    plan: recollect.Plan | None = None
    said: str = ""


def main() -> None:
    """Print a table, and append the numbers."""
    flags = parse(Flags, __doc__)
    if not is_loaded():
        with metered_environment() as environment:
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # The libraries', and that the first step is above its budget.
    meter = AllocatorMeter()
    numbers: list[Number] = []
    print("| model | engine | plain | budget | predicted | measured | weights | seconds | |")
    print("|---|---|--:|--:|--:|--:|---|--:|---|")
    for model in _chosen(flags):
        plain = _trained(model, meter)
        for engine in flags.engines:
            started = time.perf_counter()
            run = _within(model, meter, engine, plain.peak_bytes)
            name = f"{model.name}, {engine}"
            if run.plan is None:
                print(f"| {model.name} | {engine} | {format_bytes(plain.peak_bytes)} | | | | | | {run.said} |")
                continue
            equal = run.weights == plain.weights
            budget, predicted = run.plan.budget_bytes or 0, run.plan.predicted_peak_bytes or 0
            sizes = (plain.peak_bytes, budget, predicted, run.peak_bytes)
            cells = [*map(format_bytes, sizes), "equal" if equal else "DIFFERENT"]
            seconds = f"{time.perf_counter() - started:.0f}"
            print(f"| {model.name} | {engine} | {' | '.join(cells)} | {seconds} | {run.plan.note} |", flush=True)
            numbers += [
                Number(metric, "B", name, value)
                for metric, value in zip(("plain", "budget", "predicted", "peak"), sizes, strict=True)
            ]
            numbers.append(Number("weights_equal", "1", name, int(equal)))
    if numbers:
        append(RESULTS / "libraries.csv", numbers, {"device": "cpu", "steps": STEPS})


def _chosen(flags: Flags) -> Iterator[Model]:
    for library, models in LIBRARIES.items():
        if importlib.util.find_spec(library) is None:
            print(f"{library} is not installed", file=sys.stderr)
            continue
        yield from (one for one in models() if not flags.models or one.name.startswith(flags.models))


def _within(model: Model, meter: AllocatorMeter, engine: str, plain_bytes: int) -> Run:
    try:
        return _trained(model, meter, engine, "1%")
    except BudgetTooSmallError as error:
        least_bytes = error.least_peak_bytes
    if least_bytes > 0.97 * plain_bytes:
        return Run(weights={}, peak_bytes=0, said=f"the least possible peak is {format_bytes(least_bytes)}")
    return _trained(model, meter, engine, least_bytes + (plain_bytes - least_bytes) // 4)


def _trained(model: Model, meter: AllocatorMeter, engine: str | None = None, budget: int | str = "") -> Run:
    gc.collect()
    before_bytes = meter.now_bytes()
    torch.manual_seed(0)
    module = model.make().train()
    optimizer = torch.optim.SGD([one for one in module.parameters() if one.requires_grad], lr=1e-2)
    attached = None
    peaks = []
    if engine is not None:
        attached = recollect.attach(module, optimizer, budget, engine=engine, log=lambda _: None)  # type: ignore[arg-type]
    for number in range(STEPS):
        torch.manual_seed(number)
        random.seed(number)
        meter.restart()
        _step(module, optimizer, model.loss, model.batch(number))
        peaks.append(meter.peak_bytes() - before_bytes)
    plan = None
    if attached is not None:
        plan = attached.plan
        attached.remove()
    return Run(weights=_digests(module), peak_bytes=max(peaks[2:]), plan=plan)


def _digests(module: nn.Module) -> dict[str, str]:
    """Return what stands for each weight and buffer: copies would count as what the process holds besides a later step."""
    tensors = {name: one for name, one in module.state_dict().items() if isinstance(one, torch.Tensor)}
    whole = {
        name: one.detach().contiguous().reshape(-1).view(torch.uint8) for name, one in tensors.items() if one.numel()
    }
    return {name: hashlib.sha256(bytes(one.untyped_storage())).hexdigest() for name, one in whole.items()}


def _step(
    module: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[..., torch.Tensor], batch: tuple[Any, ...]
) -> None:
    loss(module, *batch).backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
