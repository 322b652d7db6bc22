"""The tape's Python against the time of kernels: per op on tiny tensors, and as a part of steps from small to large.

A step is bound by Python where the device has nothing left to do when the last op was launched. So beside the time of a step
stands the time after which it was launched: nearly the same where Python is the limit, a fraction of it where kernels are.
"""

from __future__ import annotations

import functools
import gc
from dataclasses import replace

from rich.table import Table

from contest import Contestant, Race, check_gradients, percentile
from gpu.part import Context
from overhead import TAPE_ALL, TAPE_NOTHING, Flags, Tiny, on_tape
from peers import full
from recompute import Nothing, Replaced
from results_csv import Number
from subject import Step, StepFlags

# Width and tokens; four layers each.
_SIZES = ((256, 256), (256, 1024), (512, 1024), (1024, 1024), (1024, 2048), (2048, 2048), (2048, 4096), (4096, 4096))
_PLAIN, _FULL = "plain", "checkpoint"
_VANISHED = 0.01


def run(context: Context) -> str:
    """Run tiny tensors, then the sizes."""
    per_op_us = _tiny(context)
    table = Table(title="Python against kernels, bf16, 4 layers", title_justify="left")
    headings = ("d x tokens", "step", "launched after", TAPE_ALL, TAPE_NOTHING, _FULL, f"{TAPE_NOTHING} launched after")
    for heading in headings:
        table.add_column(heading, justify="right")
    idle_costs: dict[str, float] = {}
    for width, tokens in _SIZES[:1] if context.is_dry_run else _SIZES:
        name = f"d={width}, {tokens} tokens"
        if context.begins(name):
            context.attempt(name, functools.partial(_size, context, width, tokens, name, table, idle_costs))
    context.console.print(table)
    smallest = next((name for name, slowdown in idle_costs.items() if slowdown < _VANISHED), None)
    vanished = (
        f"an idle tape costs less than 1 % from {smallest} on" if smallest else "an idle tape costs more than 1 %"
    )
    return f"the tape that keeps nothing adds {per_op_us:.1f} us an op on tiny tensors; {vanished}"


def _tiny(context: Context) -> float:
    """Measure the added time on tiny tensors, and return the microseconds an op of the tape that drops all."""
    flags = Flags(
        device=str(context.device),
        num_layers=2 if context.is_dry_run else 8,
        tiny_minutes=0.0 if context.is_dry_run else 0.5,
        least_rounds=2 if context.is_dry_run else 20,
    )
    tiny = Tiny(flags, context.console)
    context.write(tiny.numbers(), num_layers=flags.num_layers)
    context.console.print(tiny.table())
    for line in tiny.claims():
        context.console.print(line)
    drops_all = next(one for one in tiny.contestants if one.name == TAPE_NOTHING)
    return tiny.added_us(drops_all) / flags.num_layers / tiny.ops_per_layer


def _size(context: Context, width: int, tokens: int, name: str, table: Table, idle_costs: dict[str, float]) -> None:
    """Measure one size; add a row to the table, and to `idle_costs` the slowdown of the tape that drops nothing."""
    sizes = StepFlags(
        hidden_size=width,
        num_layers=4,
        vocab_size=1024,
        batch_size=1,
        seq_length=tokens,
        dtype="bf16",
        device=str(context.device),
    )
    if context.is_dry_run:
        sizes = replace(sizes, hidden_size=32, num_layers=2, vocab_size=64, seq_length=16, threads=1)
    step = Step(sizes, "dense")
    contestants = [
        Contestant(name=_PLAIN, recompute=Nothing()),
        on_tape(step, TAPE_ALL, lambda op: False),
        on_tape(step, TAPE_NOTHING, lambda op: True),
        Contestant(name=_FULL, recompute=Replaced(full(list(step.layers.values())))),
    ]
    check_gradients(step, contestants)
    launched = {one.name: _launched_s(step, one) for one in contestants}
    race = Race(step, lambda text: None)
    race.run([contestants], seconds=0.0 if context.is_dry_run else 15.0, least_rounds=2 if context.is_dry_run else 9)
    plain_s = percentile(race.plain_s, 50)
    rows = [Number("step_time", "s", name, plain_s)]
    for one in contestants:
        rows.append(Number("launched_after", "s", f"{name}, {one.name}", launched[one.name]))
        rows += one.numbers(name=f"{name}, {one.name}")
    context.write(rows, sizes=str(sizes))
    by_name = {one.name: one for one in contestants}
    cells = [f"{1e3 * plain_s:.2f} ms", f"{1e3 * launched[_PLAIN]:.2f} ms"]
    cells += [f"{by_name[one].slowdown:+.1%}" for one in (TAPE_ALL, TAPE_NOTHING, _FULL)]
    table.add_row(f"{width} x {tokens}", *cells, f"{1e3 * launched[TAPE_NOTHING]:.2f} ms")
    idle_costs[name] = by_name[TAPE_ALL].slowdown


def _launched_s(step: Step, contestant: Contestant) -> float:
    """Return the median seconds until all of a step was launched, whether or not it was done by then."""
    found = []
    with contestant.recompute.on():
        for _ in range(5):
            step.clear()
            gc.collect()
            found.append(step.launched_s())
    return percentile(found, 50)
