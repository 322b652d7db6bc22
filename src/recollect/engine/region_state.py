"""Lets a module run a second time as if it were the first: with the buffers and attributes that it had then.

Without that a second run would update batch norm's statistics twice, and compute something else wherever forward reads what
it has written before (moving averages, spectral norm, counters). What a module changes outside itself, in globals or in
objects that it is given, is not put back.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from recollect._torch_private import keeps_graph
from recollect.engine.content import has_same_bits
from recollect.engine.values import private_copy
from recollect.errors import MutatedValueError
from recollect.tensors import sparse_parts

__all__ = ["SMALL_BYTES", "ModuleState", "WrittenBuffers", "small_buffer_bytes"]

SMALL_BYTES = 64 * 1024
"""Buffers up to this size are always copied: some kernels (batch norm) write to them without raising their version."""

# A longer container is taken for data that forward reads: a vocabulary, not a history.
_LONGEST_CONTAINER = 1000

# How modules themselves are built, which forward does not change; and where the plan is.
_NOT_STATE = frozenset(vars(nn.Module())) - {"training"} | {"forward"}

_MISSING = object()


class WrittenBuffers:
    """Knows which large buffers a unit's forward writes to: found by comparing contents in the first call."""

    def __init__(self, unit_path: str, module: nn.Module) -> None:
        self.unit_path = unit_path
        self.module = module
        self.large: set[str] | None = None

    def copies(self, name: str, buffer: torch.Tensor) -> bool:
        """Whether this buffer's content has to be copied before forward runs."""
        return _is_small(buffer) or self.large is None or name in self.large

    def learn(self, names: Iterable[str]) -> None:
        """Add large buffers that forward wrote to."""
        self.large = {*(self.large or ()), *names}


class ModuleState:
    """The buffers and attributes of a module, and of those below it, when its forward begins.

    Args:
        written: what is known of the module.
    """

    def __init__(self, written: WrittenBuffers) -> None:
        self._written = written
        self._modules = list(written.module.named_modules())
        self._attributes = [_attributes(module) for _, module in self._modules]
        self._buffers = [dict(module._buffers) for _, module in self._modules]
        self._copies: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}
        self._late: list[tuple[torch.Tensor, int]] = []
        for name, buffer in self._named():
            if written.copies(name, buffer):
                self._copies[name] = private_copy(buffer.detach())
            else:
                self._versions[name] = buffer._version

    def forward_has_run(self) -> None:
        """Release copies of large buffers that forward has not written to; call after the first run."""
        written = []
        for name, buffer in self._named():
            held = self._copies.get(name)
            if held is None:
                if buffer._version != self._versions[name]:
                    written.append(name)
                    self._late.append((buffer, buffer._version - self._versions[name]))
            elif not _is_small(buffer) and self._written.large is None:
                if has_same_bits(held, buffer):
                    del self._copies[name]
                else:
                    written.append(name)
        self._written.learn(written)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have the module as it was for a second run, and as it is now again afterwards.

        Raises:
            MutatedValueError: forward wrote to a large buffer to which it had never written before.
        """
        for buffer, changes in self._late:
            shape = tuple(buffer.shape)
            raise MutatedValueError(unit=self._written.unit_path, module="", op="", shape=shape, changes=changes)
        present = [(_own(module), dict(module._buffers)) for _, module in self._modules]
        for (prefix, module), attributes, buffers in zip(self._modules, self._attributes, self._buffers, strict=True):
            _assign(vars(module), {name: _copied(value) for name, value in attributes.items()}, _own(module))
            copies = {name: self._copy_of(_joined(prefix, name), buffer) for name, buffer in buffers.items()}
            _assign(module._buffers, copies, dict(module._buffers))
        try:
            yield
        finally:
            for (_, module), (attributes, buffers) in zip(self._modules, present, strict=True):
                _assign(vars(module), attributes, _own(module))
                _assign(module._buffers, buffers, dict(module._buffers))

    def _copy_of(self, name: str, buffer: torch.Tensor | None) -> torch.Tensor | None:
        held = self._copies.get(name)
        if held is None:
            return buffer
        # The second run writes to it. There can only be a third run if backward keeps its graph.
        return private_copy(held) if keeps_graph() else held

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for (prefix, _), buffers in zip(self._modules, self._buffers, strict=True):
            for name, buffer in buffers.items():
                if buffer is not None:
                    yield _joined(prefix, name), buffer


def small_buffer_bytes(module: nn.Module) -> int:
    """Return the bytes of the buffers that a region copies whenever its forward runs.

    Example:
        >>> small_buffer_bytes(nn.BatchNorm1d(8))
        72
    """
    return sum(_nbytes(buffer) for buffer in module.buffers() if _is_small(buffer))


def _is_small(buffer: torch.Tensor) -> bool:
    return _nbytes(buffer) <= SMALL_BYTES


def _nbytes(buffer: torch.Tensor) -> int:
    return sum(part.nbytes for part in sparse_parts(buffer) or [buffer])


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _NOT_STATE}


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes, with containers copied, since forward may add to them."""
    return {name: _copied(value) for name, value in _own(module).items()}


def _copied(value: Any) -> Any:
    if isinstance(value, (list, dict, set, deque)) and len(value) <= _LONGEST_CONTAINER:
        return copy.copy(value)
    return value


def _assign(target: dict[str, Any], wanted: dict[str, Any], found: dict[str, Any]) -> None:
    """Change a dictionary's entries `found` to `wanted`, leaving alone those that are the same objects."""
    for name in found:
        if name not in wanted:
            del target[name]
    for name, value in wanted.items():
        if found.get(name, _MISSING) is not value:
            target[name] = value
