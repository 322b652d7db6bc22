"""`benchmarks/compiled.py` on the device: compiled variants, and recollect at their peaks."""

from __future__ import annotations

import statistics
from dataclasses import asdict, replace

from compiled import EagerPlans, Flags, empty_cache, quick, run_model
from gpu.part import Context

_SECONDS_TO_RACE = 90.0


def run(context: Context) -> str:
    """Run the dense model."""
    race_s = context.share(_SECONDS_TO_RACE)
    flags = Flags(
        step=context.large_step(num_layers=4),
        minutes=race_s / 60,
        only=context.only,
        out=context.out,
        # Answers to their peaks are made and measured after that, which takes time, too.
        compile_minutes=(context.seconds - race_s - context.share(60.0)) / 60,
    )
    if context.is_dry_run:
        flags = quick(replace(flags, only=context.only or "full", backend="aot_eager"))
    with empty_cache():
        found = run_model(flags, "dense", context.console, context.rows(**asdict(flags.step), model="dense"))
    ran = [entry for entry in found.entries if entry.contestant is not None]
    ratios = [
        statistics.median(answer.time_ratios_to(entry.contestant))
        for entry in ran
        for name, answer in entry.answers.items()
        if entry.contestant is not None and name == EagerPlans.name and answer.time_ratios_to(entry.contestant)
    ]
    text = f"{len(ran)} of {len(found.entries)} variants ran"
    return text + (
        f"; eager plans at their peaks take {min(ratios):.2f} to {max(ratios):.2f} of their time" if ratios else ""
    )
