"""Devices by name. Rates are dense; data sheets with an asterisk at tensor-core figures double them for sparsity.

| name | fp32 | tf32 | fp16, bf16 | fp8 | TFLOP/s; memory | bandwidth | source |
|---|--:|--:|--:|--:|--:|--:|---|
| H100 (SXM) | 67 | 494.7 | 989.4 | 1979 | 80 GB | 3.35 TB/s | NVIDIA, "H100 Tensor Core GPU" data sheet, 2023 |
| H100 PCIe | 51 | 378 | 756 | 1513 | 80 GB | 2.0 TB/s | the same, 2022 edition |
| H100 NVL | 60 | 417.5 | 835.5 | 1671 | 94 GB | 3.9 TB/s | the same, 2024 edition, for one of the two cards |
| H800 (SXM) | 67 | 494.7 | 989.4 | 1979 | 80 GB | 3.35 TB/s | an H100 with less fp64 and NVLink: arXiv 2505.09343 |
| GH200 | 67 | 494.7 | 989.4 | 1979 | 96 GB | 4.0 TB/s | NVIDIA, "GH200 Grace Hopper Superchip" data sheet, 2023, with HBM3 |
| H200 | 67 | 494.7 | 989.4 | 1979 | 141 GB | 4.8 TB/s | NVIDIA, "H200 Tensor Core GPU" data sheet, 2024 |
| A100 40GB | 19.5 | 156 | 312 | | 40 GB | 1.555 TB/s | NVIDIA, "A100 Tensor Core GPU" data sheet, 2020 |
| A100 (80 GB) | 19.5 | 156 | 312 | | 80 GB | 2.039 TB/s | the same, 2021 edition, SXM |
| A100 80GB PCIe | 19.5 | 156 | 312 | | 80 GB | 1.935 TB/s | the same, 2021 edition |
| B200 | 75 | 1100 | 2250 | 4500 | 180 GB | 7.7 TB/s | NVIDIA, "Blackwell" data sheet, HGX B200 per GPU, 2024 |
| L40S | 91.6 | 183 | 362 | 733 | 48 GB | 0.864 TB/s | NVIDIA, "L40S" data sheet, 2023 |
| RTX 4090 | 82.6 | 82.6 | 165.2 | 330.3 | 24 GB | 1.008 TB/s | NVIDIA, "Ada GPU Architecture" white paper, appendix A |
| MI300X | 163.4 | 653.7 | 1307.4 | 2614.9 | 192 GB | 5.3 TB/s | AMD, "Instinct MI300X Accelerator" data sheet, 2023 |

`cpu` is one thread of a virtual AMD EPYC (Zen 5), measured by `recollect calibrate` with torch 2.13; other CPUs differ, so
calibrate your own.

The RTX 4090's tensor cores are twice as fast if they accumulate in fp16, which PyTorch does not do by default.
A GB of memory is 2**30 bytes on these sheets.

The fraction of the peak that bf16 matrix products reach was measured by S. Bekman, "Machine Learning Engineering", chapter
"Accelerators", table "Maximum Achievable Matmul FLOPS": 80 % (H100 and H200 SXM), 86 % (A100 SXM), 82 % (A100 PCIe), 78 %
(B200), 60 % (MI300X); 80 % is assumed for the others. Attention: Dao, "FlashAttention-2", 2023, figures 5 and 6 (A100:
up to 73 % forward, 63 % backward), and Shah et al., "FlashAttention-3", 2024 (its predecessor reaches 35 % on the
H100); assumed for the others. 85 % of the bandwidth, 5 us per launch, and half a wave of tiles of 128 x 128 (one
tile per multiprocessor, at a depth of 64) are assumptions, not measured here on any GPU.

Links to the memory of a host have the rates that large copies from and to pinned memory reach, per device and direction.
Nothing of them is measured by us: these are others' figures, for one direction at a time. Both directions at once, devices that
share a switch, and memory of another socket can halve them. `recollect calibrate` measures your own link, with both directions
at once.

| link | data sheet | out | in | source of what is reached (nvbandwidth) |
|---|--:|--:|--:|---|
| PCIe 4 | 32 GB/s | 25 GB/s | 25 GB/s | forums.developer.nvidia.com, topic 352186: A100 SXM (at once: 24 out, 11 in) |
| PCIe 5 | 64 GB/s | 55 GB/s | 55 GB/s | the example of dev.smart-guide.co.kr: 55.6 in; out is assumed to be the same |
| NVLink-C2C | 450 GB/s | 170 GB/s | 410 GB/s | NVIDIA/Megatron-LM, issue 6491: GH200 (170 out, 411 to 421 in) |

The data sheets are PCI-SIG's for 16 lanes, and NVIDIA's "GH200 Grace Hopper Superchip" of 2023. A latency of 10 us, for the
launch of a copy and the event after it, is an assumption.
"""

from __future__ import annotations

import difflib
import os
import platform
import re
from pathlib import Path

from recollect.costs.hardware import ArithmeticRate, ElementRate, Hardware, HostLink
from recollect.errors import HardwareError

_DEFAULT_NAME = "H100"

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


def _gpu(
    name: str,
    memory_gib: int,
    bandwidth_bytes_per_s: float,
    host_link: HostLink,
    num_multiprocessors: int,
    tflops_per_s: dict[str, float],
    matmul_efficiency: float = 0.8,
    attention_efficiencies: tuple[float, float] = (0.35, 0.3),
) -> Hardware:
    forward, backward = attention_efficiencies
    half_rate_outputs = num_multiprocessors * _TILE * _TILE / 2
    return Hardware(
        name=name,
        device="cuda",
        memory_bytes=memory_gib * _GIB,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        launch_s=_LAUNCH_S,
        rates=tuple(
            ArithmeticRate(dtype, 1e12 * peak, matmul_efficiency, forward, backward, half_rate_outputs, _DEPTH)
            for dtype, peak in tflops_per_s.items()
        ),
        host_link=host_link,
    )


def _tensor_cores(fp32: float, tf32: float, half: float, fp8: float | None = None) -> dict[str, float]:
    rates = {"fp32": fp32, "tf32": tf32, "fp16": half, "bf16": half}
    return rates if fp8 is None else {**rates, "fp8": fp8}


_HOPPER = _tensor_cores(67, 494.7, 989.4, 1979)
_AMPERE = _tensor_cores(19.5, 156, 312)
_FLASH_2 = (0.7, 0.6)  # where FlashAttention-2 does as well as on the A100

_PCIE_4, _PCIE_5 = HOST_LINKS["PCIe 4"], HOST_LINKS["PCIe 5"]

# A GPU's memory in GiB, bytes/s of it, link to its host, multiprocessors, TFLOP/s; fractions of these in matrix products and
# attention.
HARDWARE: dict[str, Hardware] = {
    "H100": _gpu("NVIDIA H100 SXM", 80, 3.35e12, _PCIE_5, 132, _HOPPER),
    "H100 PCIe": _gpu("NVIDIA H100 PCIe", 80, 2.0e12, _PCIE_5, 114, _tensor_cores(51, 378, 756, 1513)),
    "H100 NVL": _gpu("NVIDIA H100 NVL", 94, 3.9e12, _PCIE_5, 132, _tensor_cores(60, 417.5, 835.5, 1671)),
    "GH200": _gpu("NVIDIA GH200", 96, 4.0e12, HOST_LINKS["NVLink-C2C"], 132, _HOPPER),
    "H200": _gpu("NVIDIA H200", 141, 4.8e12, _PCIE_5, 132, _HOPPER),
    "H800": _gpu("NVIDIA H800 SXM", 80, 3.35e12, _PCIE_5, 132, _HOPPER),
    "A100 40GB": _gpu("NVIDIA A100 40GB", 40, 1.555e12, _PCIE_4, 108, _AMPERE, 0.86, _FLASH_2),
    "A100": _gpu("NVIDIA A100 80GB SXM", 80, 2.039e12, _PCIE_4, 108, _AMPERE, 0.86, _FLASH_2),
    "A100 80GB PCIe": _gpu("NVIDIA A100 80GB PCIe", 80, 1.935e12, _PCIE_4, 108, _AMPERE, 0.82, _FLASH_2),
    "B200": _gpu("NVIDIA B200", 180, 7.7e12, _PCIE_5, 148, _tensor_cores(75, 1100, 2250, 4500), 0.78),
    "L40S": _gpu("NVIDIA L40S", 48, 0.864e12, _PCIE_4, 142, _tensor_cores(91.6, 183, 362, 733), 0.8, (0.6, 0.5)),
    "RTX 4090": _gpu(
        "NVIDIA GeForce RTX 4090", 24, 1.008e12, _PCIE_4, 128, _tensor_cores(82.6, 82.6, 165.2, 330.3), 0.8, _FLASH_2
    ),
    "MI300X": _gpu("AMD Instinct MI300X", 192, 5.3e12, _PCIE_5, 304, _tensor_cores(163.4, 653.7, 1307.4, 2614.9), 0.6),
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
        elements=(
            ElementRate("copy", 4.6e9),
            ElementRate("elementwise", 7.7e9),
            ElementRate("transcendental", 1.2e9),
            ElementRate("reduction", 7.1e9),
            ElementRate("softmax", 2.4e9),
            ElementRate("random", 0.2e9),
            ElementRate("gather", 1.9e9),
            ElementRate("scatter", 1.1e9),
            ElementRate("sort", 0.12e9),
        ),
        host_link=HostLink(9.3e9, 9.4e9, 0.7e-6),
    ),
}

# What `torch.cuda.get_device_name()` says. In full: other cards have names that begin the same ("RTX 4090 Laptop GPU"), and a
# part of a card (MIG) has its card's.
_DEVICE_NAMES = {
    "H100": r"H100 80GB HBM3|H100 SXM5?",
    "H100 PCIe": r"H100 PCIe",
    "H100 NVL": r"H100 NVL",
    "GH200": r"GH200 480GB",
    "H200": r"H200( NVL)?",
    "H800": r"H800( SXM5?| 80GB HBM3)?",
    "A100 40GB": r"A100-(SXM4|SXM|PCIE|PG509-200)(-40GB)?",
    "A100": r"A100-SXM(4)?-80GB",
    "A100 80GB PCIe": r"A100[- ]80GB[- ]PCIe|A100-PCIE-80GB",
    "B200": r"B200",
    "L40S": r"L40S",
    "RTX 4090": r"(GeForce )?RTX 4090",
    "MI300X": r"(Instinct )?MI300X( VF)?",
}


def hardware_of_device(device_name: str) -> Hardware | None:
    """Return the table's entry for a device, by its `torch.cuda.get_device_name()`; None if there is none.

    Example:
        >>> hardware_of_device("NVIDIA A100-SXM4-80GB").name
        'NVIDIA A100 80GB SXM'
        >>> hardware_of_device("NVIDIA GeForce RTX 4090 Laptop GPU") is None
        True
    """
    short = re.sub(r"^(NVIDIA|AMD|Tesla)\s+", "", device_name.strip(), flags=re.IGNORECASE)
    for name, pattern in _DEVICE_NAMES.items():
        if re.fullmatch(pattern, short, flags=re.IGNORECASE):
            return HARDWARE[name]
    return None


def processor_model() -> str:
    """Return the name of this machine's processor."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return name


def find_hardware(which: str | os.PathLike[str] | Hardware) -> Hardware:
    """Return the device that a user means.

    Args:
        which: a name in the table, in any case and with or without spaces; a device's own name; the path of a JSON file
            that `recollect calibrate` wrote; or a `Hardware`.

    Raises:
        HardwareError: an unknown name (lists the known ones); an unreadable or malformed file.

    Example:
        >>> find_hardware("rtx4090").name
        'NVIDIA GeForce RTX 4090'
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
    """Return the device that times are modelled for.

    Args:
        which: the user's choice, as for `find_hardware`; None for no choice.
        own_device: name of this machine's GPU, the default if it is in the table; empty if there is none.

    Raises:
        HardwareError: as `find_hardware`.
    """
    if which is not None:
        return find_hardware(which)
    return (hardware_of_device(own_device) if own_device else None) or HARDWARE[_DEFAULT_NAME]


def _short(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("nvidia"))
