"""Random numbers under plans that recompute everything, on the tape and from traces: bits of losses, gradients and generators.

Dropout in the model, and in attention by each backend. Between forward and backward of each step, other code draws too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import recollect
from contest import reason
from gpu.engines_saved import Traces
from gpu.part import Context, deterministic_kernels
from models import build, model_inputs
from results_csv import Number

# The first step is noted and the second traced, and the trace runs in it and in all after it.
_NUM_STEPS = 4
_RATE = 0.1
_BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)


@dataclass(frozen=True)
class Case:
    """A model with dropout, in one dtype, and the only backend of attention; None for PyTorch's choice."""

    name: str
    make: Callable[[Context], nn.Module]
    dtype: torch.dtype
    backend: SDPBackend | None = None


def cases() -> list[Case]:
    """Return all cases, those that say most first."""
    bf16, fp32 = torch.bfloat16, torch.float32
    return [
        Case("GPT-2, bf16", _gpt2, bf16),
        Case("Llama, attention dropout, bf16", _llama, bf16),
        Case("GPT-2, fp32", _gpt2, fp32),
        *(Case(f"Llama, {backend.name.lower()}, bf16", _llama, bf16, backend) for backend in _BACKENDS),
    ]


def _sizes(context: Context) -> dict[str, int]:
    return {"hidden_size": 64 if context.is_dry_run else 512, "num_layers": 2, "num_heads": 0, "vocab_size": 256}


def _gpt2(context: Context) -> nn.Module:
    return build("gpt2", **_sizes(context))


def _llama(context: Context) -> nn.Module:
    model = build("dense", **_sizes(context))
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = _RATE
    return model


def run(context: Context) -> str:
    """Run each case on both engines."""
    outcomes: list[str] = []
    for case in cases()[: 2 if context.is_dry_run else None]:
        if context.begins(case.name):
            context.attempt(case.name, lambda case=case: outcomes.extend(_case(context, case)))  # type: ignore[misc]
    counts = {one: outcomes.count(one) for one in ("equal", "DIFFERENT", "skipped", "not traced")}
    return ", ".join(f"{count} {one}" for one, count in counts.items() if count) or "no case ran"


def _case(context: Context, case: Case) -> list[str]:
    """Compare the engines with the plain model; return what came out for each."""
    torch.manual_seed(0)
    with context.device:
        model = case.make(context).to(case.dtype)
        tokens = torch.randint(256, (2, 32 if context.is_dry_run else 256))
    batch = model_inputs("gpt2", tokens)
    before = copy.deepcopy(model.state_dict())
    outcomes = []
    with _kernels(case):
        try:
            expected = _train(model, batch, context.device)
        except RuntimeError as refused:
            # A backend that this device, or dropout, does not have; or not one that repeats itself.
            context.say(f"{case.name}: skipped: {reason(refused)}")
            context.write([Number("skipped", "text", case.name, reason(refused))], case=case.name)
            return ["skipped"]
        model.load_state_dict(before)
        model.zero_grad(set_to_none=True)
        plan = recollect.classic_plan(recollect.record(model, batch, holds_output=False, gradients="freed"), "full")
        for engine in ("tape", "graph"):
            model.load_state_dict(before)
            with Traces() as traces, recollect.apply(model, plan.with_engine(engine)) as applied:
                got = _train(model, batch, context.device)
                reasons = traces.reasons(applied)
            different = [name for name in expected if not torch.equal(expected[name], got[name])]
            outcome = "DIFFERENT" if different else "not traced" if reasons else "equal"
            outcomes.append(outcome)
            name = f"{case.name} / {engine}"
            first = different[0] if different else "none"
            context.say(f"{name}: {outcome}, {len(different)} of {len(expected)} differ, first {first} {reasons}")
            numbers = [
                Number("equal", "bool", name, int(not different)),
                Number("num_different", "1", name, len(different)),
                Number("num_compared", "1", name, len(expected)),
                Number("first_difference", "text", name, first),
                Number("units_traced", "1", name, len(traces.units)),
                Number("why_not", "text", name, "; ".join(reasons) or "none"),
            ]
            context.write(numbers, case=case.name)
    return outcomes


@contextmanager
def _kernels(case: Case) -> Iterator[None]:
    chosen = nullcontext() if case.backend is None else sdpa_kernel([case.backend])
    with deterministic_kernels(), chosen:
        yield


def _train(model: nn.Module, batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Train for some steps under a seed; return each step's loss, gradients, draws and generators, by name."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: dict[str, Tensor] = {}
    for step in range(_NUM_STEPS):
        loss = model(**batch).loss
        drawn = torch.rand(8, device=device), torch.rand(8)
        loss.backward()
        found[f"step {step}: loss"] = loss.detach()
        found[f"step {step}: draws on the device"], found[f"step {step}: draws on the CPU"] = drawn
        found[f"step {step}: generator of the CPU"] = torch.get_rng_state()
        if device.type == "cuda":
            found[f"step {step}: generator of the device"] = torch.cuda.get_rng_state(device)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"step {step}: gradient of {name}"] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return found
