"""Devices by name. Rates are dense; data sheets with an asterisk at tensor-core figures double them for sparsity.

hardware.csv has a row for each GPU: its data sheet's numbers (memory in GiB, peaks in TFLOP/s), the fraction of the peaks that
products and attention reach, its usual links (`links.py`), and its full `torch.cuda.get_device_name()`: other
cards have names that begin the same ("RTX 4090 Laptop GPU"), and a part of a card (MIG) has its card's.

`cpu` is one thread of a virtual AMD EPYC (Zen 5), measured by `recollect calibrate` with torch 2.13; other CPUs differ, so
calibrate your own.

Of products in 8 bits, `fp8` have one scale a tensor or row. With one for each block of 128 (`fp8_blockwise`) PyTorch has
kernels only for Hopper (cuBLAS 12.9); one for 32 elements (`mxfp8`) needs Blackwell. All have the peak of the sheet's FP8.

The RTX 4090's tensor cores are twice as fast if they accumulate in fp16, which PyTorch does not do by default.
A GB of memory is 2**30 bytes on these sheets.

The fraction of the peak that bf16 matrix products reach was measured by S. Bekman, "Machine Learning Engineering", chapter
"Accelerators", table "Maximum Achievable Matmul FLOPS": 80 % (H100 and H200 SXM), 86 % (A100 SXM), 82 % (A100 PCIe), 78 %
(B200), 60 % (MI300X); 80 % is assumed for the others. Attention: Dao, "FlashAttention-2", 2023, figures 5 and 6 (A100:
up to 73 % forward, 63 % backward), and Shah et al., "FlashAttention-3", 2024 (its predecessor reaches 35 % on the
H100); assumed for the others. 85 % of the bandwidth, 5 us per launch, and half a wave of tiles of 128 x 128 (one
tile per multiprocessor, at a depth of 64) are assumptions, not measured here on any GPU.

Links to the memory of a host have the rates that large copies from and to pinned memory reach, per device and direction.
These are published figures, for one direction at a time; an H200 reached 50 GB/s out and 51 GB/s in here, beside other
programs. Both directions at once, devices that share a switch, and memory of a different socket can halve them. `recollect
calibrate` measures your own link, with both directions at once.

| link | data sheet | out | in | source of what is reached (nvbandwidth) |
|---|--:|--:|--:|---|
| PCIe 4 | 32 GB/s | 25 GB/s | 25 GB/s | forums.developer.nvidia.com, topic 352186: A100 SXM (at once: 24 out, 11 in) |
| PCIe 5 | 64 GB/s | 55 GB/s | 55 GB/s | the example of dev.smart-guide.co.kr: 55.6 in; out is assumed to be the same |
| NVLink-C2C | 450 GB/s | 170 GB/s | 410 GB/s | NVIDIA/Megatron-LM, issue 6491: GH200 (170 out, 411 to 421 in) |

The data sheets are PCI-SIG's for 16 lanes, and NVIDIA's "GH200 Grace Hopper Superchip" of 2023. A latency of 10 us, for the
launch of a copy and the event after it, is an assumption.
"""

import csv
import difflib
import os
import platform
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from recollect.costs.hardware import EIGHT_BITS, ArithmeticRate, Hardware, HostLink
from recollect.errors import HardwareError

_GIB = 2**30
_TILE = 128
_DEPTH = 64.0
_LAUNCH_S = 5e-6
_LATENCY_S = 10e-6

HOST_LINKS: dict[str, HostLink] = {
    "PCIe 4": HostLink(25e9, 25e9, _LATENCY_S),
    "PCIe 5": HostLink(55e9, 55e9, _LATENCY_S),
    "NVLink-C2C": HostLink(170e9, 410e9, _LATENCY_S),
}


def read_table(name: str) -> dict[str, dict[str, str]]:
    """Return the rows of a CSV file of this folder by their names, each as texts by column."""
    text = (resources.files(__package__) / name).read_text(encoding="utf-8")
    return {row["name"]: row for row in csv.DictReader(text.splitlines())}


def _gpu(row: Mapping[str, str]) -> Hardware:
    matmul, forward, backward = (float(row[name]) for name in ("matmul", "attention", "attention_backward"))
    half_rate_outputs = int(row["multiprocessors"]) * _TILE * _TILE / 2
    return Hardware(
        name=row["full_name"],
        device="cuda",
        memory_bytes=int(row["memory_gib"]) * _GIB,
        bandwidth_bytes_per_s=float(row["bandwidth_bytes_per_s"]),
        launch_s=_LAUNCH_S,
        rates=tuple(
            ArithmeticRate(dtype, 1e12 * float(row[dtype]), matmul, forward, backward, half_rate_outputs, _DEPTH)
            for dtype in ("fp32", "tf32", "fp16", "bf16", *EIGHT_BITS)
            if row[dtype]
        ),
        host_link=HOST_LINKS[row["to_host"]],
    )


GPUS = read_table("hardware.csv")
"""The rows of the table, by name."""

HARDWARE: dict[str, Hardware] = {
    **{name: _gpu(row) for name, row in GPUS.items()},
    "cpu": Hardware(
        name="AMD EPYC (Zen 5), 1 thread",
        device="cpu",
        memory_bytes=24 * _GIB,
        bandwidth_bytes_per_s=39e9,
        traffic_efficiency=1.0,
        launch_s=7e-6,
        rates=(
            ArithmeticRate("fp32", 93e9, 1.0, 0.51, 0.54, half_rate_outputs=5100, half_rate_depth=11),
            ArithmeticRate("bf16", 525e9, 1.0, 0.11, 0.13, half_rate_outputs=39_000, half_rate_depth=51),
        ),
        cache_bytes=4_300_000,
        cache_bytes_per_s=73e9,
        elements_per_s={
            "copy": 4.6e9,
            "elementwise": 7.7e9,
            "transcendental": 1.2e9,
            "reduction": 7.1e9,
            "softmax": 2.4e9,
            "random": 0.2e9,
            "gather": 1.9e9,
            "scatter": 1.1e9,
            "sort": 0.12e9,
        },
        host_link=HostLink(9.3e9, 9.4e9, 0.7e-6),
    ),
}


def hardware_of_device(device_name: str) -> Hardware | None:
    """Return the table's entry for a device, by its `torch.cuda.get_device_name()`; None if there is none."""
    short = re.sub(r"^(NVIDIA|AMD|Tesla)\s+", "", device_name.strip(), flags=re.IGNORECASE)
    names = (name for name, row in GPUS.items() if re.fullmatch(row["reported_as"], short, flags=re.IGNORECASE))
    return HARDWARE.get(next(names, ""))


def processor_model() -> str:
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return name


def find_hardware(which: str | os.PathLike[str] | Hardware) -> Hardware:
    """Return the device that a user names.

    It is a name in the table, in any case and with or without spaces; a device's own name; the path of a JSON file that
    `recollect calibrate` wrote; or a `Hardware`.
    """
    if isinstance(which, Hardware):
        return which
    if isinstance(which, os.PathLike) or which.endswith(".json"):
        return Hardware.load(Path(which))
    by_short_name = {_short(name): hardware for name, hardware in HARDWARE.items()}
    by_short_name |= {_short(hardware.name): hardware for hardware in HARDWARE.values()}
    found = by_short_name.get(_short(which)) or hardware_of_device(which)
    if found is None:
        names = {_short(name): name for name in HARDWARE}
        close = [names[short] for short in difflib.get_close_matches(_short(which), names, n=2, cutoff=0.5)]
        meant = f"Did you mean {' or '.join(repr(name) for name in close)}? " if close else ""
        raise HardwareError(
            f"hardware: got {which!r}, expected one of {', '.join(HARDWARE)}, or a .json file. {meant}"
            "`recollect calibrate` measures other devices."
        )
    return found


def choose_hardware(which: str | os.PathLike[str] | Hardware | None, *, own_device: str) -> Hardware:
    """Return the device that times are modelled for: the user's choice, else this machine's GPU if it is in the table."""
    if which is not None:
        return find_hardware(which)
    return (hardware_of_device(own_device) if own_device else None) or HARDWARE["H100"]


def _short(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("nvidia"))
