"""`recollect calibrate`: measure this device and write a file for `--hardware`."""

import statistics
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from recollect.byte_format import format_bytes
from recollect.cli.commands import Calibrate
from recollect.cli.common import check_folder, write_file
from recollect.costs.calibrate import Calibration, calibrate
from recollect.costs.hardware import KINDS
from recollect.errors import RecollectError
from recollect.lab.train.optimizer_step import resolve_device
from recollect.recording.host_times import around_ops


def run_calibrate(command: Calibrate, console: Console) -> None:
    check_folder(command.out, "--out")
    if command.out.suffix != ".json":
        raise RecollectError(f"--out {command.out}: expected a name that ends in .json, as --hardware does.")
    device = resolve_device(command.device)
    measured = calibrate(device, quick=command.quick)
    measured = replace(measured, hardware=replace(measured.hardware, host=around_ops(device, traces=True).host))
    console.print(rates_table(measured))
    console.print(fit_table(measured))
    note = f", for --hardware {command.out}"
    write_file(command.out, measured.hardware.to_json(), console, flag="--out", note=note)


def rates_table(measured: Calibration) -> Table:
    hardware = measured.hardware
    table = Table(title=hardware.name, title_justify="left")
    table.add_column("what")
    table.add_column("rate", justify="right")
    for rate in hardware.rates:
        for name, efficiency in (
            ("large matrix products", rate.matmul_efficiency),
            ("attention forward", rate.attention_efficiency),
            ("attention backward", rate.attention_backward_efficiency),
        ):
            table.add_row(f"{rate.dtype} {name}", f"{rate.peak_flops_per_s * efficiency / 1e9:,.0f} GFLOP/s")
    bandwidth = hardware.bandwidth_bytes_per_s * hardware.traffic_efficiency
    table.add_row("memory", f"{bandwidth / 1e9:,.1f} GB/s")
    table.add_row(f"within {format_bytes(hardware.cache_bytes)}", f"{hardware.cache_bytes_per_s / 1e9:,.1f} GB/s")
    for kind, elements_per_s in hardware.elements_per_s.items():
        table.add_row(f"{kind}, fp32", f"{elements_per_s / 1e6:,.0f} million elements/s")
    table.add_row("smallest op", f"{hardware.launch_s * 1e6:.1f} us")
    if (link := hardware.host_link) is not None:
        table.add_row("copies to the host's memory", f"{link.to_host_bytes_per_s / 1e9:,.1f} GB/s")
        table.add_row("copies from the host's memory", f"{link.from_host_bytes_per_s / 1e9:,.1f} GB/s")
        table.add_row("smallest copy", f"{link.latency_s * 1e6:.1f} us")
    if (host := hardware.host) is not None:
        for what, seconds in (
            ("issue an op in forward", host.forward_op_s),
            ("issue an op in backward", host.backward_op_s),
            ("tape: a call of a layer", host.unit_s),
            ("tape: an op that it sees", host.seen_op_s),
            ("tape: an op that it sees, more if large", host.large_op_s),
            ("tape: an op that it runs again", host.again_op_s),
        ):
            table.add_row(what, f"{seconds * 1e6:.1f} us")
    return table


def fit_table(measured: Calibration) -> Table:
    """Return the error of the cost model by kind of op: the median ratio of the larger to the smaller time."""
    title = f"Modelled vs measured, {measured.rounds} rounds in {measured.elapsed_s:.0f} s"
    table = Table(title=title, title_justify="left")
    table.add_column("kind")
    for column in ("ops", "modelled / measured", "off by a factor of"):
        table.add_column(column, justify="right")
    for kind in (*KINDS, None):
        ratios = measured.ratios(kind)
        if ratios:
            off = statistics.median(max(ratio, 1 / ratio) for ratio in ratios)
            table.add_row(kind or "all", str(len(ratios)), f"{statistics.median(ratios):.2f}", f"{off:.2f}")
    return table
