"""Runs a step as if a CUDA graph captured it, on any device, and notes what recollect does in it that no graph repeats.

That is each read of what a tensor holds (and a shape that depends on it, and a copy to the host), each access to the state of a
generator, and each look at a clock. Noted is the line of `src/recollect` that asks for it. What the model's own code does is
its own affair, also where recollect passes an op of it on.

Calls of C functions are seen by a profiler, which disturbs no trace; operators of Tensor that C code calls without one, by
methods in front of them; and ops by a dispatch mode, where there may be one: units that run from traces look for modes.
"""

import ctypes
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
from recollect._torch_private import rehearsing_capture, untraced

SOURCE = Path(recollect.__file__).parent
# What calls these is the one that asks.
_ASKED = frozenset({"engine/content.py", "engine/draws.py", "measuring/stopwatch.py", "measuring/timing.py"})
_TORCH, _NUMPY = str(Path(torch.__file__).parent), str(Path(np.__file__).parent)
_STDLIB, _PACKAGES = sysconfig.get_path("stdlib"), "site-packages"
# Parts of the model.
_LAYERS = (f"{_TORCH}/nn/", f"{_TORCH}/utils/checkpoint.py")

_READS = frozenset(
    {"item", "tolist", "numpy", "nonzero", "argwhere", "equal", "allclose", "is_nonzero", "_local_scalar_dense", "cpu"}
    | {"masked_select", "unique_consecutive", "_unique2", "unique_dim", "bincount", "from_address"}
)
_STATES = frozenset(
    {"get_state", "set_state", "get_offset", "set_offset", "initial_seed", "seed", "manual_seed", "clone_state"}
)
_CLOCKS = frozenset(
    getattr(time, name + unit)
    for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time")
    for unit in ("", "_ns")
)
_NAMES = _READS | _STATES | {clock.__name__ for clock in _CLOCKS}
_PYTHON: dict[CodeType, str] = {
    ctypes.string_at.__code__: "string_at",
    torch.cuda.synchronize.__code__: "synchronize",
    torch.cuda.get_rng_state.__code__: "get_state",
    torch.cuda.set_rng_state.__code__: "set_state",
    **{
        getattr(kind, name).__code__: name
        for kind in (torch.cuda.Event, torch.cuda.Stream)
        for name in ("synchronize", "query", "elapsed_time")
        if hasattr(getattr(kind, name, None), "__code__")
    },
}
# Of Tensor: C code calls these without a call that a profiler sees.
_OPERATORS = ("__bool__", "__int__", "__float__", "__index__")
_DATA_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_MASKS = (torch.bool, torch.uint8)


class Found(NamedTuple):
    """A line below `src/recollect`, and what it asks for."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


class CaptureChecker:
    """Notes what a capture would not repeat.

    Args:
        sees_ops: by a dispatch mode, too.
        tells: whether the engines are told of the capture.
    """

    def __init__(self, *, sees_ops: bool, tells: bool = True) -> None:
        self.found: list[Found] = []
        self._tells = tells
        self._mode = _Ops(self) if sees_ops else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Check what runs on this thread, as if it were captured."""
        with ExitStack() as stack:
            if self._tells:
                stack.enter_context(rehearsing_capture())
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for name in _OPERATORS:
                patch.setattr(torch.Tensor, name, self._operator(name))
            patch.setattr(torch.Tensor, "__getitem__", self._getitem())
            patch.setattr(torch.Tensor, "to", self._to())
            if self._mode is not None:
                stack.enter_context(self._mode)
            before = sys.getprofile()
            sys.setprofile(self._called)
            try:
                yield
            finally:
                sys.setprofile(before)

    @property
    def lines(self) -> list[str]:
        """What was found, each line once."""
        return list(dict.fromkeys(map(str, self.found)))

    def note(self, frame: FrameType | None, what: str, op: object = None) -> None:
        """Note what a frame asks for, unless it is the model that does; `op` is what is passed on where it is a `func`."""
        asked: Found | None = None
        while frame is not None:
            name = frame.f_code.co_filename
            if not _is_nobodys(name):
                if not Path(name).is_relative_to(SOURCE):
                    break
                found = Found(Path(name).relative_to(SOURCE).as_posix(), frame.f_lineno, what)
                if op is None or not _is_op(frame.f_locals.get("func"), op):
                    asked = asked or found
                    if found.file not in _ASKED:
                        asked = found
                        break
            frame = frame.f_back
        if asked is not None:
            self.found.append(asked)

    @untraced
    def _called(self, frame: FrameType, event: str, arg: Any) -> None:
        # Of hundreds of calls a step few have one of the names.
        if event == "call":
            if frame.f_code in _PYTHON:
                self.note(frame.f_back, _PYTHON[frame.f_code])
        elif event == "c_call":
            name = getattr(arg, "__name__", "")
            if frame.f_code is _CALLS_OP or frame.f_code is _CALLS_PACKET:
                op = frame.f_locals["self"]
                if (name := op.__name__.partition(".")[0]) in _READS:
                    self.note(frame, name, op)
            elif name in _NAMES and self._is_noted(arg, name):
                self.note(frame, name)

    def _is_noted(self, function: Any, name: str) -> bool:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.Generator):
            return name in _STATES
        return function in _CLOCKS or (name in _READS and not isinstance(owner, (np.ndarray, dict, str)))

    def _operator(self, name: str) -> Any:
        plain = getattr(torch.Tensor, name)

        def operator(tensor: torch.Tensor) -> Any:
            self.note(sys._getframe(1), name)
            return plain(tensor)

        return operator

    def _getitem(self) -> Any:
        plain = torch.Tensor.__getitem__

        def getitem(tensor: torch.Tensor, index: Any) -> Any:
            indices = index if isinstance(index, tuple) else (index,)
            if any(isinstance(one, torch.Tensor) and one.dtype in _MASKS for one in indices):
                self.note(sys._getframe(1), "__getitem__")
            return plain(tensor, index)

        return getitem

    def _to(self) -> Any:
        plain = torch.Tensor.to

        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            target = kwargs.get("device", args[0] if args else None)
            if isinstance(target, (str, torch.device)) and torch.device(target).type == "cpu":
                self.note(sys._getframe(1), "to")
            return plain(tensor, *args, **kwargs)

        return to


def _is_nobodys(file: str) -> bool:
    """Whether code is called on behalf of others: PyTorch's but for layers, NumPy's, Python's own, and this file."""
    if file.startswith((_TORCH, _NUMPY)):
        return not file.startswith(_LAYERS)
    return file == __file__ or file.startswith("<frozen") or (file.startswith(_STDLIB) and _PACKAGES not in file)


_CALLS_OP = torch._ops.OpOverload.__call__.__code__
_CALLS_PACKET = torch._ops.OpOverloadPacket.__call__.__code__


def _is_op(func: Any, op: Any) -> bool:
    return func is op or (isinstance(func, torch._ops.OpOverload) and func.overloadpacket is op)


class _Ops(TorchDispatchMode):
    """Sees ops whose results depend on what tensors hold, whatever Python called."""

    def __init__(self, checker: CaptureChecker) -> None:
        super().__init__()
        self._checker = checker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__ if isinstance(func, torch._ops.OpOverload) else ""
        if name in _READS or (name != "index" and any(tag in func.tags for tag in _DATA_TAGS if name)):
            self._checker.note(sys._getframe(1), name, func)
        return func(*args, **(kwargs or {}))
