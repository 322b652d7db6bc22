"""Lets a module's second run behave like the first, with the state that it had then.

Without that a second run would update batch norm's statistics twice, and compute different results wherever forward
reads values that it wrote before (moving averages, spectral norm, counters), or that no longer exist (the parameters of
`torch.func.functional_call`). `region_engine.py` lists the restored state.

Containers are copied. Tensors are not, beforehand: an alias holds the memory that a tensor had, as autograd does with saved
tensors; before an op writes to it, it is copied; and an unseen write is an error, if it can be detected
(`content.py`).
"""

import copy
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from recollect._torch_private import is_traceable_wrapper_subclass, keeps_graph, preserved_versions
from recollect.engine.content import glance_at, has_same_bits
from recollect.engine.values import TapeValue, alias_in_hook, layout_of, private_copy, watch
from recollect.errors import MutatedValueError
from recollect.tensors import sparse_parts

SMALL_BYTES = 64 * 1024
"""Buffers up to this size are always copied: some kernels (batch norm) write to them without raising their version."""

# A module's state besides its attributes, as dictionaries that stay the same objects.
HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)
_TABLES = ("_parameters", "_buffers", "_modules", *HOOKS)

_NOT_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}

_MISSING = object()

# A longer container counts as data that forward reads: a vocabulary, not a history.
_LONGEST_CONTAINER = 1000

_UNCHANGING = frozenset({int, float, bool, str, bytes, type(None)})


class _Copies:
    """Copies containers, which forward may change, with those inside them, each once; other contents stay the same.

    Example:
        >>> history, shared = [1, [2]], {"x": [3]}
        >>> one, other = (copies := _Copies()).of((history, shared)), copies.of(shared)
        >>> history[1].append(4)
        >>> one, other is one[1]
        (([1, [2]], {'x': [3]}), True)
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        # With the originals, whose ids must not be reused in the meantime.
        self._made: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """Return a copy of a container, or of a generator of random numbers; anything else as it is."""
        if type(value) in _UNCHANGING:
            return value
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, tuple):
            items = [self.of(item) for item in value]
            if any(item is not other for item, other in zip(items, value, strict=True)):
                return getattr(value, "_make", tuple)(items)
        elif isinstance(value, (list, dict, set, deque)) and len(value) <= _LONGEST_CONTAINER:
            if id(value) not in self._made:
                self._made[id(value)] = value, copy.copy(value)
                self._fill(self._made[id(value)][1])
            return self._made[id(value)][1]
        elif isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random"):
            return self._made.setdefault(id(value), (value, copy.deepcopy(value)))[1]
        return value

    def _fill(self, copied: Any) -> None:
        if isinstance(copied, set):
            return
        for key, item in list(copied.items() if isinstance(copied, dict) else enumerate(copied)):
            if (other := self.of(item)) is not item:
                copied[key] = other


def _is_put_in_place(tensor: object) -> bool:
    """Whether a library provides a parameter's memory, or replaces the parameter, whenever a module runs.

    DeepSpeed's ZeRO-3, the mixed precision of `DistributedDataParallel`, and FSDP2 with its DTensors.
    """
    return hasattr(tensor, "ds_tensor") or hasattr(tensor, "_mp_param") or is_traceable_wrapper_subclass(tensor)


class _HeldTensors:
    """The tensors that one call of a region may read, as they are when it begins."""

    def __init__(self, unit_path: str) -> None:
        self._unit_path = unit_path
        self._held: dict[int, tuple[torch.Tensor, TapeValue, bool]] = {}
        # Those that are no plain memory: only their versions tell.
        self._others: list[tuple[torch.Tensor, int, str]] = []

    def hold(self, tensor: torch.Tensor, module_path: str = "") -> None:
        """Hold the content of a tensor, unless a library manages it; `module_path`: where in the unit it is."""
        if id(tensor) in self._held or tensor.is_inference():
            return
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            self._others.append((tensor, tensor._version, module_path))
            return
        storage = tensor.untyped_storage()
        if _is_put_in_place(tensor) or not storage.nbytes():
            return
        label = (self._unit_path, module_path, "")
        value = TapeValue(alias_in_hook(tensor), None, tensor._version, label, glance_at(tensor))
        watch(value, storage)
        self._held[id(tensor)] = tensor, value, tensor.requires_grad

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the earlier content of all tensors, and afterwards their current content.

        Raises:
            MutatedValueError: something unseen has written to one of them.
            FreedValueError: the memory of one was freed.
        """
        for other, version, path in self._others:
            if other._version != version:
                shape, changes = tuple(other.shape), other._version - version
                raise MutatedValueError(unit=self._unit_path, module=path, op="", shape=shape, changes=changes)
        with ExitStack() as stack:
            for tensor, value, requires_grad in self._held.values():
                content = value.fetch()
                if content.untyped_storage() is not tensor.untyped_storage() or layout_of(content) != layout_of(tensor):
                    # The second run may write to it. There can only be a third run if backward keeps its graph.
                    stack.enter_context(_contains(tensor, private_copy(content) if keeps_graph() else content))
                if tensor.requires_grad is not requires_grad and tensor.is_leaf:
                    stack.callback(tensor.requires_grad_, tensor.requires_grad)
                    tensor.requires_grad_(requires_grad)
            yield


@contextmanager
def _contains(tensor: torch.Tensor, content: torch.Tensor) -> Iterator[None]:
    present = alias_in_hook(tensor)
    with preserved_versions(tensor):
        tensor.data = content
        try:
            yield
        finally:
            tensor.data = present


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
        self.large = {*(self.large or ()), *names}


class ModuleParts:
    """A module's state at some moment: its attributes, and some tables."""

    def __init__(self, module: nn.Module, copies: _Copies | None = None, names: Sequence[str] = _TABLES) -> None:
        self.module = module
        self.names = names
        self.attributes = _attributes(module)
        if copies is not None:
            self.attributes = {name: copies.of(value) for name, value in self.attributes.items()}
        # Few are not empty, and there are many.
        self.tables = {name: dict(table) for name in names if (table := vars(module).get(name))}

    def put(self, copies: _Copies | None = None) -> None:
        """Restore this state of the module, except for parameters that a library puts in place."""
        module = self.module
        present = _attributes(module)
        for name in present.keys() - self.attributes.keys():
            del vars(module)[name]
        for name, value in self.attributes.items():
            wanted = value if copies is None else copies.of(value)
            if present.get(name, _MISSING) is not wanted:
                vars(module)[name] = wanted
        for name in self.names:
            table, entries = vars(module).get(name, {}), self.tables.get(name, {})
            # In their order, too, which hooks run in.
            if (table or entries) and _identities(table) != _identities(entries):
                wanted = {key: table.get(key) if _is_put_in_place(entry) else entry for key, entry in entries.items()}
                table.clear()
                table.update(wanted)


class ModuleState:
    """A module, and those below it, when its forward begins; and the arguments that it is called with."""

    def __init__(self, written: WrittenBuffers, arguments: Any) -> None:
        self._written = written
        copies = _Copies()
        self._arguments = copies.of(arguments)
        self._parts = [(path, ModuleParts(module, copies)) for path, module in written.module.named_modules()]
        self._copies: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}
        self._held = _HeldTensors(written.unit_path)
        for name, buffer in self._named("_buffers"):
            if written.copies(name, buffer):
                self._copies[name] = private_copy(buffer.detach())
            else:
                self._versions[name] = buffer._version
                self._held.hold(buffer, name)
        for name, parameter in self._named("_parameters"):
            self._held.hold(parameter, name.rpartition(".")[0])
        for tensor in copies.tensors:
            self._held.hold(tensor)

    def forward_has_run(self) -> None:
        """Release copies of large buffers that forward has not written to; call after the first run."""
        written = []
        for name, buffer in self._named("_buffers"):
            held = self._copies.get(name)
            if held is None:
                if buffer._version != self._versions[name]:
                    written.append(name)
            elif not _is_small(buffer) and self._written.large is None:
                if has_same_bits(held, buffer):
                    del self._copies[name]
                else:
                    written.append(name)
        self._written.learn(written)

    @contextmanager
    def restored(self) -> Iterator[Any]:
        """Restore the module's earlier state for a second run, and its current state afterwards; yield the arguments.

        Raises:
            MutatedValueError: something unseen has written to a tensor that is not copied.
        """
        present = [ModuleParts(parts.module) for _, parts in self._parts]
        copies = _Copies()
        with self._held.restored():
            try:
                arguments = copies.of(self._arguments)
                for prefix, parts in self._parts:
                    parts.put(copies)
                    buffers = parts.module._buffers
                    for name, buffer in buffers.items():
                        buffers[name] = self._copy_of(_joined(prefix, name), buffer)
                yield arguments
            finally:
                for parts in present:
                    parts.put()

    def _copy_of(self, name: str, buffer: torch.Tensor | None) -> torch.Tensor | None:
        held = self._copies.get(name)
        if held is None:
            return buffer
        # The second run writes to it. There can only be a third run if backward keeps its graph.
        return private_copy(held) if keeps_graph() else held

    def _named(self, table: str) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, parts in self._parts:
            for name, tensor in parts.tables.get(table, {}).items():
                if tensor is not None:
                    yield _joined(prefix, name), tensor


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


def _identities(table: Mapping[Any, Any]) -> list[tuple[Any, int]]:
    return [(key, id(entry)) for key, entry in table.items()]


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _NOT_ATTRIBUTES}
