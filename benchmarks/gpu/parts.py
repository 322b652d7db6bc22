"""The parts of `scripts/gpu`. What a part needs beyond PyTorch is imported when it runs."""

from __future__ import annotations

import functools
from importlib import import_module

from gpu.part import Context, Part

__all__ = ["PARTS"]


def _run(module: str, context: Context, **settings: str) -> str:
    finding: str = import_module(f"gpu.{module}").run(context, **settings)
    return finding


def _part(
    name: str, what: str, module: str, *, least_gib: float, packages: tuple[str, ...] = (), **settings: str
) -> Part:
    run = functools.partial(_run, module, **settings)
    return Part(name=name, what=what, least_gib=least_gib, packages=packages, run=run)


_FRONTIER = ("transformers", "matplotlib")

PARTS = (
    _part(
        "tests",
        "the tests of tests/gpu: exact gradients, generators, allocator, streams, autocast, out of memory",
        "tests_part",
        least_gib=8,
        packages=("pytest", "transformers"),
    ),
    _part(
        "calibrate",
        "the hardware file of this device, how far the table's roofline is off, and what plans lose by it",
        "calibrate_part",
        least_gib=16,
        packages=("transformers",),
    ),
    _part(
        "prediction",
        "predicted against measured peak and time: four models, eight budgets, with and without AdamW",
        "prediction_part",
        least_gib=16,
        packages=("transformers",),
    ),
    _part(
        "offload",
        "copies to host memory and back, and plans that offload beside those that recompute: peaks, times, bits",
        "offload_part",
        least_gib=16,
        packages=("transformers",),
    ),
    _part(
        "fp8",
        "products in 8 bits by the device's kernels: bits under plans, distance from the emulation, peaks, times",
        "fp8_part",
        least_gib=8,
    ),
    _part(
        "overhead",
        "the tape's Python against the time of kernels, from tiny tensors to sizes at which it vanishes",
        "overhead_part",
        least_gib=16,
        packages=("transformers",),
    ),
    _part(
        "engines-2048",
        "the tape and traces beside checkpointing at equal peak, where Python is the limit: host and step times, bits",
        "engines_part",
        least_gib=24,
        packages=("transformers",),
        width="2048",
    ),
    _part(
        "engines-4096",
        "the same where kernels hide Python",
        "engines_part",
        least_gib=40,
        packages=("transformers",),
        width="4096",
    ),
    _part(
        "engines-random",
        "random numbers under plans, on the tape and from traces: losses, gradients and generators to the bit",
        "engines_random_part",
        least_gib=4,
        packages=("transformers",),
    ),
    _part(
        "capture",
        "whole steps as CUDA graphs beside captured checkpointing: pools, times, bits, kernels",
        "capture_part",
        least_gib=40,
        packages=("transformers",),
    ),
    _part(
        "claims",
        "the rows of docs/claims.md that are modelled for an H100, measured on a few layers of the same widths",
        "claims_part",
        least_gib=40,
    ),
    _part(
        "frontier-dense",
        "peak against step time beside all eager peers, Llama of about 1B",
        "frontier_part",
        least_gib=40,
        packages=_FRONTIER,
        model="dense",
    ),
    _part(
        "frontier-moe",
        "the same with Mixtral",
        "frontier_part",
        least_gib=40,
        packages=_FRONTIER,
        model="moe",
    ),
    _part(
        "frontier-mla",
        "the same with DeepSeek-V3",
        "frontier_part",
        least_gib=40,
        packages=_FRONTIER,
        model="mla",
    ),
    _part(
        "frontier-7b",
        "the same with a Llama of 7B at batch 1, beside the fastest peers",
        "frontier_part",
        least_gib=70,
        packages=_FRONTIER,
        model="7b",
    ),
    _part(
        "compiled",
        "the same beside torch.compile, per block and whole",
        "compiled_part",
        least_gib=24,
        packages=("transformers",),
    ),
)
