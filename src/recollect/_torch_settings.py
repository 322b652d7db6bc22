"""PyTorch's settings for kernels, and those by which it chooses the ops of a call."""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

_Switch = tuple[Callable[[], Any], Callable[[Any], object]]


def kernel_switches() -> list[_Switch]:
    """Return the switches of kernels as (getter, setter); the public ones are properties and contexts of 1 us and more."""
    names = ["mkldnn_enabled", "nnpack_enabled", "mkldnn_deterministic"]
    backends = ["mkldnn"]
    if torch.cuda.is_available():
        names += ["cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cublas_allow_fp16_accumulation"]
        backends.append("cuda")
    found: list[_Switch] = [
        (getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}"))
        for name in names
        if hasattr(torch._C, f"_get_{name}") and hasattr(torch._C, f"_set_{name}")
    ]
    if torch.cuda.is_available():
        found += [_reduced_precision_switch("fp16"), _reduced_precision_switch("bf16")]
    return found + [_precision_switch(backend, op) for backend in backends for op in ("matmul", "conv")]


def _precision_switch(backend: str, op: str) -> _Switch:
    """Return the switch for the arithmetic of fp32: full precision, TF32 or bf16."""
    get = functools.partial(torch._C._get_fp32_precision_getter, backend, op)
    return get, functools.partial(torch._C._set_fp32_precision_setter, backend, op)


def _reduced_precision_switch(kind: str) -> _Switch:
    name = f"cublas_allow_{kind}_reduced_precision_reduction"
    change = getattr(torch._C, f"_set_{name}")
    return getattr(torch._C, f"_get_{name}"), lambda value: change(*value if isinstance(value, tuple) else (value,))


# By these, and an order of priority, PyTorch chooses the ops of attention.
_CHOICES: Final = tuple(
    getattr(torch._C, name)
    for name in (
        *(f"_get_{kind}_sdp_enabled" for kind in ("flash", "fa3", "mem_efficient", "math", "cudnn")),
        "_get_math_sdp_allow_fp16_bf16_reduction",
    )
    if hasattr(torch._C, name)
)


def op_choices() -> tuple[Any, ...]:
    """Return the settings by which PyTorch chooses ops, and which no guard of Dynamo's sees."""
    return (*[get() for get in _CHOICES], *torch._C._get_sdp_priority_order())
