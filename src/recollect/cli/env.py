"""`recollect env`: print the facts of a machine for a bug report: versions, devices, memory, and settings of allocators."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console

from recollect import __version__
from recollect.byte_format import format_bytes
from recollect.cli.commands import Env
from recollect.lab.bench.race import processor_name
from recollect.measuring.device_memory import memory_bytes
from recollect.measuring.host_memory import host_memory_bytes
from recollect.printing import print_line

_PACKAGES = (
    *("transformers", "accelerate", "deepspeed", "lightning", "pytorch-lightning", "torchao", "torchtitan", "peft"),
    *("trl", "bitsandbytes", "diffusers", "transformer-engine", "megatron-core", "triton", "numpy"),
)
# Variables that begin like one of these may change how memory is allocated, or how fast a step is. None of them is a secret.
_VARIABLES = (
    "PYTORCH_",
    "TORCH_",
    "CUDA_",
    "CUBLAS_",
    "NCCL_",
    "NVTE_",
    "OMP_",
    "KMP_",
    "MKL_",
    "MALLOC_",
    "RECOLLECT_",
)
_MORE_VARIABLES = ("GLIBC_TUNABLES", "LD_PRELOAD", "RANK", "WORLD_SIZE", "LOCAL_RANK")
_ALLOCATORS = re.compile(r"lib(?:jemalloc|tcmalloc|mimalloc)[\w.-]*")
_DRIVER = Path("/proc/driver/nvidia/version")
_MAPS = Path("/proc/self/maps")


def run_env(_command: Env, console: Console) -> None:
    for name, text in environment():
        print_line(console, f"{name:17} {text}")


def environment() -> Iterator[tuple[str, str]]:
    yield "recollect", __version__
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "OS", platform.platform()
    yield "CPU", f"{processor_name()}, {torch.get_num_threads()} threads of PyTorch"
    yield "host memory", format_bytes(host_memory_bytes())
    yield "malloc", host_allocator()
    if _DRIVER.is_file():
        yield "driver", _DRIVER.read_text(encoding="utf-8").splitlines()[0]
    if torch.cuda.is_available():
        yield "CUDA malloc", torch.cuda.get_allocator_backend()
        for index in range(torch.cuda.device_count()):
            device = torch.device("cuda", index)
            capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
            memory = format_bytes(memory_bytes(device))
            yield f"GPU {index}", f"{torch.cuda.get_device_name(device)}, {memory}, capability {capability}"
    else:
        yield "GPU", "none that PyTorch can use"
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES) or name in _MORE_VARIABLES:
            yield "variable", f"{name}={value}"


def host_allocator() -> str:
    """Name the allocator of host memory: one that was loaded in place of the C library's, or that."""
    maps = _MAPS.read_text(encoding="utf-8", errors="replace") if _MAPS.is_file() else ""
    loaded = _ALLOCATORS.search(maps)
    return loaded[0] if loaded else " ".join(part for part in platform.libc_ver() if part) or "of the C library"
