"""Products in 8 bits by the device's own kernels: bits under plans, how far they are from the emulation, peaks, and times.

A recipe that the device has no kernel for is skipped, with the reason: mxfp8 needs Blackwell, blockwise Hopper. On a CPU
products are emulated.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import recollect
from gpu.part import Context, deterministic_kernels
from recollect.errors import BudgetTooSmallError, HardwareError
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.fp8 import Fp8Product
from recollect.lab.models.gpt import GPTModel
from recollect.measuring.meter import measure_peak
from recollect.plans.plan import Plan
from results_csv import Number

_RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "delayed": {"fp8": "hybrid", "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}
# Experts one by one: not every recipe has a grouped kernel.
_KINDS: dict[str, dict[str, Any]] = {"dense": {}, "experts": {"num_moe_experts": 4}}


def run(context: Context) -> str:
    """Run each recipe in each kind of model."""
    outcomes: dict[str, str] = {}
    for kind, recipe in itertools.product(_KINDS, _RECIPES):
        name = f"{kind} {recipe}"
        if context.begins(name):
            context.attempt(name, lambda: outcomes.update({name: _case(context, name, kind, recipe)}))  # noqa: B023
    if not outcomes:
        return "no case ran"
    counts = {outcome: list(outcomes.values()).count(outcome) for outcome in ("equal", "DIFFERENT", "skipped")}
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def _case(context: Context, name: str, kind: str, recipe: str) -> str:
    model, batch = _model(context, kind, recipe)
    try:
        with deterministic_kernels():
            expected = _step(model, batch)
    except HardwareError as error:
        context.say(f"{name}: skipped: {error}")
        context.write([Number("skipped", "text", name, str(error))], case=name)
        return "skipped"
    profile = recollect.record(model, batch, loss_fn=lambda out: out.loss, holds_output=False, gradients="freed")
    plans = {"full": recollect.classic_plan(profile, "full"), "budget": _half(profile)}
    numbers = [Number("step", "s", name, _seconds(lambda: _step(model, batch)))]
    is_equal = True

    def backward() -> None:
        model(*batch).loss.backward()

    before = copy.deepcopy(dict(model.named_buffers()))

    for word, plan in plans.items():
        with recollect.apply(model, plan):
            with deterministic_kernels():
                equal = all(map(torch.equal, expected, _step(model, batch)))
            model.zero_grad()  # As in the recorded step, which makes its own gradients.
            growth = measure_peak(backward, device=context.device).peak_growth_bytes
        for buffer_name, buffer in model.named_buffers():
            buffer.copy_(before[buffer_name])
        is_equal &= equal
        numbers.append(Number("equal", "bool", f"{name}, {word}", int(equal)))
        numbers.append(Number("predicted_peak", "bytes", f"{name}, {word}", plan.predicted_peak_bytes or 0))
        numbers.append(Number("measured_peak", "bytes", f"{name}, {word}", profile.persistent_bytes + growth))
    if recipe != "bf16":
        numbers.append(Number("distance", "1", name, _distance(model, batch)))
    context.write(numbers, case=name)
    return "equal" if is_equal else "DIFFERENT"


def _model(context: Context, kind: str, recipe: str) -> tuple[GPTModel, tuple[Tensor, Tensor]]:
    width, positions = (128, 64) if context.is_dry_run else (2048, 2048)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=width,
        num_attention_heads=width // 64,
        vocab_size=256 if context.is_dry_run else 32_000,
        max_position_embeddings=positions,
        **_KINDS[kind],
        **_RECIPES[recipe],
    )
    tokens = torch.randint(256, (2, positions + 1), device=context.device)
    return GPTModel(config).bfloat16().to(context.device), (tokens[:, :-1], tokens[:, 1:])


def _step(model: GPTModel, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return gradients, histories and scales after a step, and leave the latter as they were."""
    before = copy.deepcopy(dict(model.named_buffers()))
    model.zero_grad(set_to_none=False)
    torch.manual_seed(0)
    model(*batch).loss.backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for name, buffer in model.named_buffers():
        found.append(buffer.clone())
        buffer.copy_(before[name])
    return found


def _half(profile: Any) -> Plan:
    """Return the plan for half of what can be saved."""
    try:
        return recollect.plan(profile, 1)
    except BudgetTooSmallError as refused:
        plain = recollect.plan(profile, "100%").predicted_peak_bytes or 0
        return recollect.plan(profile, (refused.least_peak_bytes + plain) // 2)


def _distance(model: GPTModel, batch: tuple[Tensor, Tensor]) -> float:
    """Return how far the loss is from that of the emulation, relative to it."""
    products = [module for module in model.modules() if isinstance(module, Fp8Product)]
    losses = []
    for is_emulated in (None, True):
        for product in products:
            product.emulated = is_emulated
        model.eval()
        with torch.no_grad():
            losses.append(model(*batch).loss.item())
        model.train()
    return abs(losses[0] - losses[1]) / losses[1]


def _seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
