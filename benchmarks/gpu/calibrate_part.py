"""The hardware file of the device, how far the table's roofline is off for it, and what plans lose that trust either."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.table import Table

import cost_model
from gpu.part import Context, device_slug
from recollect.costs.calibrate import Calibration, MeasuredOp, calibrate
from recollect.costs.hardware import KINDS, Hardware
from recollect.costs.hardware_table import HARDWARE, hardware_of_device
from recollect.costs.roofline import seconds
from results_csv import Number, machine_name

_SECONDS = 60.0


def table_entry(device: torch.device) -> Hardware:
    """Return what the table says of a device; of one that it does not know, what it says of an H100."""
    if device.type == "cpu":
        return HARDWARE["cpu"]
    return hardware_of_device(torch.cuda.get_device_name(device)) or HARDWARE["H100"]


def op_numbers(measured: Calibration, known: Hardware) -> list[Number]:
    """Return a row for each op: measured, and modelled by the fit and by the table."""
    rows = []
    for index, op in enumerate(measured.ops):
        name = (
            f"{index} {op.work.kind} {op.name} {op.work.dtype} {op.work.flops:.3g} flops {op.work.traffic_bytes} bytes"
        )
        rows += [
            Number("op_time", "s", name, op.median_s),
            Number("op_time_fit", "s", name, seconds(op.work, measured.hardware)),
            Number("op_time_table", "s", name, seconds(op.work, known)),
        ]
    return rows


def _ratios(ops: Sequence[MeasuredOp], hardware: Hardware) -> list[float]:
    return [seconds(op.work, hardware) / op.median_s for op in ops]


def _factor(ratios: Sequence[float]) -> float:
    return statistics.median(max(ratio, 1 / ratio) for ratio in ratios)


def fit_rows(measured: Calibration, known: Hardware) -> tuple[list[Number], Table]:
    """Return modelled over measured time by kind of op, medians, of the fit and of the table, as rows and printed."""
    rows: list[Number] = []
    table = Table(title=f"modelled / measured; table: {known.name}", title_justify="left")
    for heading in ("kind", "ops", "fit", "off by", "table", "off by"):
        table.add_column(heading, justify="right")
    groups = {kind: [op for op in measured.ops if op.work.kind == kind] for kind in KINDS}
    groups["ops of launches only"] = [op for op in measured.ops if op.is_tiny]
    groups["all"] = list(measured.ops)
    for kind, ops in groups.items():
        if not ops:
            continue
        cells = [kind, str(len(ops))]
        for name, hardware in (("fit", measured.hardware), ("table", known)):
            ratios = _ratios(ops, hardware)
            rows.append(Number(f"{name}_ratio", "1", kind, statistics.median(ratios)))
            rows.append(Number(f"{name}_factor", "1", kind, _factor(ratios)))
            cells += [f"{statistics.median(ratios):.2f}", f"{_factor(ratios):.2f}"]
        table.add_row(*cells)
    return rows, table


def run(context: Context) -> str:
    """Calibrate, compare, write the hardware file, and plan five models with each kind of times."""
    measured = calibrate(context.device, seconds_to_spend=context.share(_SECONDS), quick=context.is_dry_run)
    hardware, known = measured.hardware, table_entry(context.device)
    path = _hardware_path(context)
    path.write_text(hardware.to_json(), encoding="utf-8")
    rows, table = fit_rows(measured, known)
    context.write([*rows, *op_numbers(measured, known)], rounds=measured.rounds, table=known.name)
    context.console.print(table)
    context.say(f"{measured.rounds} rounds in {measured.elapsed_s:.0f} s, written to {path.name}")
    regret = _regrets(context, hardware, known)
    factors = {row.metric: row.value for row in rows if row.contestant == "all"}
    return (
        f"off by a factor of {factors['fit_factor']:.2f} in the median with the fit, {factors['table_factor']:.2f} with the "
        f"table's {known.name}; plans lose up to {100 * regret:.2f} % of the step with the fit's times"
    )


def _hardware_path(context: Context) -> Path:
    return context.out / f"{device_slug(machine_name(str(context.device)))}-hardware.json"


def _regrets(context: Context, hardware: Hardware, known: Hardware) -> float:
    """Plan five models with modelled times; return the largest regret."""
    sizes = {"hidden_size": 1024, "num_layers": 4, "vocab_size": 32_000, "batch_size": 2, "seq_length": 1024}
    recordings = 4
    if context.is_dry_run:
        sizes = {"hidden_size": 128, "num_layers": 2, "vocab_size": 64, "batch_size": 1, "seq_length": 16}
        recordings = 1
    flags = cost_model.Flags(**sizes, dtype="bf16", device=str(context.device), recordings=recordings)
    other = ("times of the table", known)
    rows: list[Number] = []
    names: list[str] = []

    def one_model(name: str, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
        costs = cost_model.BothCosts(hardware, context.device, other)
        found = cost_model.profiles(model, batch, costs, flags.recordings)
        numbers = cost_model.numbers_of(name, costs, found, flags)
        context.write(numbers, **sizes, dtype=flags.dtype)
        rows.extend(numbers)
        names.append(name)

    for name, model, batch in cost_model.subjects(flags):
        if context.is_dry_run and names:
            break
        if context.begins(name):
            context.attempt(name, lambda one=(name, model, batch): one_model(*one))
    context.console.print(cost_model.table(rows, names, flags.budgets, other[0]))
    return max(
        (float(row.value) for row in rows if row.metric.startswith("regret_") and row.contestant in names), default=0.0
    )
