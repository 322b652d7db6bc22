"""The whole record of one training step: `Profile`, with its files.

A profile is recorded once (`recollect.record`) and read by every planner. It needs no torch, so it can be saved where the
accelerator is and planned anywhere else.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from recollect.byte_format import format_bytes
from recollect.errors import ProfileFormatError
from recollect.fields import read_document, read_file, writing
from recollect.notebooks import ShownInNotebooks
from recollect.plans.paths import expand_classes
from recollect.profile.events import ALLOC, PHASE, StepLog, check_log
from recollect.profile.graph import OpRecord, PartRecord, UnitCall, UnitGraph, ValueRecord
from recollect.profile.host_times import HostTimes
from recollect.profile.joint import JointOp, JointRecord
from recollect.profile.variant import VariantRecord

_FORMAT = "recollect.profile"
_VERSION = 3

# The CUDA caching allocator hands out multiples of this (PYTORCH_NO_CUDA_MEMORY_CACHING unset).
_CUDA_BLOCK_BYTES = 512
# It takes memory for blocks of 10 MiB or more in multiples of 2 MiB, and splits off no rest up to 1 MiB.
_LARGE_BLOCK_BYTES, _SEGMENT_BYTES, _WHOLE_REST_BYTES = 10 << 20, 2 << 20, 1 << 20

_KINDS = {
    "other_tensors": "other tensors that the step reads",
    "communication_buckets": "DDP's communication buckets (gradient_as_bucket_view=True makes gradients part of them)",
    "gradient_buffers": "Megatron's gradient buffers",
    "other_allocations": "what this process holds besides the step",
    "units_of_other_steps": "room for what other steps do",
}

# By their units.
_FLOATS = {
    "seconds": ("step_s", "gather_latency_s", "gather_s_per_byte", "host_latency_s"),
    "bytes per second": ("to_host_bytes_per_s", "from_host_bytes_per_s"),
}


@dataclass(frozen=True)
class Profile(ShownInNotebooks):
    """The record of one training step.

    Attributes:
        graphs: distinct unit graphs.
        calls: the runs of the units, in forward order.
        log: the step's memory events.
        step_s: predicted seconds of forward and backward without recompute.
        persistent: bytes alive through the whole step, by kind ("parameters", "gradients", "buffers", "batch",
            "gradient_buffers", "optimizer_state", "communication_buckets", "other_allocations"); `kind_text` describes them.
        device: "cpu", "cuda:0", ...
        device_name: model of the device that the times are for.
        kernels: type of the device whose kernels were recorded, "cpu" or "cuda"; empty: that of `device`.
        fake: recorded on fake tensors, so times come from a cost model.
        calibration_bytes: measured minus simulated peak of the recorded step; 0 for a fake profile.
        torch_version, model_class, batch: the source of the record, in words.
        loss_chunks: parts in which LM head and loss were computed; see `Plan.loss_chunks`.
        device_memory_bytes: size of the device's memory; 0 if unknown.
        shard_ranks: number of ranks that may each hold a part of a value, in place of all of it; 1 if none may.
        gather_latency_s, gather_s_per_byte: time to gather such a value: fixed seconds, and seconds per byte.
        to_host_bytes_per_s, from_host_bytes_per_s: rates of copies from the device to its host's memory, and of copies back; 0
            if unknown, and nothing can be offloaded.
        host_latency_s: seconds of the smallest such copy.
        host: the measured overhead of the tape around ops, which the graphs' times include; None if it was not measured.
        outputs: the events with which the log would say that an output of the model died.
        parameter_itemsize: bytes of an element of a parameter, of the widest one; 0 if unknown.
        makes_cache: the model's output holds keys and values for generation, as a Hugging Face model's does by default.
        class_names: of modules that have a number for a name, as in an `nn.Sequential`; see `Plan.class_names`.

    Raises:
        ValueError: a call or an event that refers to something missing, or a negative or non-finite number.
    """

    graphs: tuple[UnitGraph, ...]
    calls: tuple[UnitCall, ...]
    log: StepLog
    step_s: float
    persistent: Mapping[str, int] = field(default_factory=dict)
    device: str = "cpu"
    device_name: str = ""
    kernels: str = ""
    fake: bool = False
    calibration_bytes: Annotated[int, "may be negative"] = 0
    torch_version: str = ""
    model_class: str = ""
    batch: str = ""
    loss_chunks: int = 1
    device_memory_bytes: int = 0
    shard_ranks: int = 1
    gather_latency_s: float = 0.0
    gather_s_per_byte: float = 0.0
    to_host_bytes_per_s: float = 0.0
    from_host_bytes_per_s: float = 0.0
    host_latency_s: float = 0.0
    outputs: tuple[tuple[int, ...], ...] = ()
    class_names: tuple[tuple[str, str], ...] = ()
    parameter_itemsize: int = 0
    makes_cache: bool = False
    host: HostTimes | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "persistent", MappingProxyType(dict(self.persistent)))
        for name in ("loss_chunks", "shard_ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected 1 or more")
        if self.device_memory_bytes < 0:
            raise ValueError(f"device_memory_bytes: got {self.device_memory_bytes} bytes, expected 0 or more")
        for unit, names in _FLOATS.items():
            for name in names:
                number = getattr(self, name)
                if not (math.isfinite(number) and number >= 0):
                    raise ValueError(f"{name}: got {number}, expected a finite number of {unit}, 0 or more")
        for kind, nbytes in self.persistent.items():
            if nbytes < 0:
                raise ValueError(f"persistent[{kind!r}]: got {nbytes} bytes, expected 0 or more")
        try:
            expand_classes(self.class_names)
        except ValueError as problem:
            raise ValueError(f"class_names: {problem}") from None
        for index, call in enumerate(self.calls):
            if not 0 <= call.graph < len(self.graphs):
                what = f"call {index} ({call.path!r})"
                raise ValueError(f"{what}: graph {call.graph}, expected 0 to {len(self.graphs) - 1}")
            for origin in call.origins:
                self._check_origin(f"call {index} ({call.path!r}): origin {origin}", call, origin)
            for value, storage in call.outside:
                if not 0 <= value < len(self.graphs[call.graph].values):
                    what = f"call {index} ({call.path!r}): outside ({value}, {storage})"
                    raise ValueError(f"{what} is of a value that is not there")

    def _check_origin(self, where: str, call: UnitCall, origin: tuple[int, int, int]) -> None:
        here, other, there = origin
        if not 0 <= other < len(self.calls):
            raise ValueError(f"{where} is of call {other}, expected 0 to {len(self.calls) - 1}")
        source = self.graphs[self.calls[other].graph]
        if not (0 <= here < len(self.graphs[call.graph].values) and 0 <= there < len(source.values)):
            raise ValueError(f"{where} is of a value that is not there")

    def __reduce__(self) -> tuple[Any, ...]:
        # A mappingproxy cannot be pickled or deep-copied.
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Profile, tuple({**values, "persistent": dict(self.persistent)}.values())

    def __hash__(self) -> int:
        return hash((self.graphs, self.calls, self.step_s, self.model_class, self.batch))

    def __repr__(self) -> str:
        source, last_bytes = "fake" if self.fake else self.device, self.last_step_bytes
        return (
            f"Profile({self.model_class or 'model'} on {source}, batch {self.batch or 'unknown'}, "
            f"{len(self.calls)} unit calls, {len(self.graphs)} distinct"
            f"{f', {format_bytes(last_bytes)} of the step before it' if last_bytes else ''})"
        )

    @property
    def last_step_bytes(self) -> int:
        """Bytes that the step before leaves alive into forward: its output, and gradients that are freed after forward."""
        first = takewhile(lambda event: event[0] in (ALLOC, PHASE), self.log.events)
        return sum(event[2] for event in first if event[0] == ALLOC)

    @property
    def times_text(self) -> str:
        """The source of the times if nothing was measured, as in "times modelled for NVIDIA H100"; "" if they were measured."""
        if self.fake:
            return f"times modelled for {self.device_name or self.device}"
        return "times of the meta device, which computes nothing" if self.device_name == "meta" else ""

    @property
    def persistent_bytes(self) -> int:
        """Bytes alive through the whole step."""
        return sum(self.persistent.values())

    @property
    def calls_by_path(self) -> dict[str, list[int]]:
        """Indices in `calls` of each unit's runs, by its path, in the order of the first ones."""
        found: dict[str, list[int]] = {}
        for index, call in enumerate(self.calls):
            found.setdefault(call.path, []).append(index)
        return found

    def graph_of(self, call: UnitCall) -> UnitGraph:
        """Return the graph of one of `calls`."""
        return self.graphs[call.graph]

    def has_value(self, unit_path: str, name: str) -> bool:
        """Whether a call of a unit computed a value with this name."""
        graphs = (self.graph_of(call) for call in self.calls if call.path == unit_path)
        return any(value.name == name for graph in graphs for value in graph.values)

    def block_bytes(self, nbytes: int) -> int:
        """Return the bytes that a storage of this size takes on the profile's device."""
        return block_bytes(nbytes, self.device)

    def for_capture(self) -> Profile:
        """Return the profile of the same step for plans that a CUDA graph may capture: they keep what random ops make.

        To recompute dropout takes the state of a generator, which cannot be read during a capture.

        Example:
            >>> import torch, recollect
            >>> from torch import nn
            >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Dropout()) for _ in range(4)))
            >>> profile = recollect.record(model, torch.randn(8, 32), loss_fn=torch.sum, fake=True)
            >>> "keep" in recollect.classic_plan(profile, "full").units["0"].actions.values()
            False
            >>> "keep" in recollect.classic_plan(profile.for_capture(), "full").units["0"].actions.values()
            True
        """
        return replace(self, graphs=tuple(map(UnitGraph.keeping_draws, self.graphs)))

    def to_json(self) -> str:
        """Return the profile as JSON text; `from_json` reads it back as an equal profile."""
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            **{f.name: getattr(self, f.name) for f in fields(self)[3:]},
            "persistent": dict(self.persistent),
            "class_names": dict(self.class_names),
            "calls": self.calls,
            "graphs": self.graphs,
            "log": {"events": self.log.events},
        }
        return json.dumps(document, separators=(",", ":"), allow_nan=False, default=_encode)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read a profile from JSON text.

        Raises:
            ProfileFormatError: the text is not JSON, not a profile, of a later version, or holds impossible numbers;
                says where.
        """
        root = read_document(text, format=_FORMAT, version=_VERSION, error=ProfileFormatError)
        profile = root.record(cls)
        graphs = [profile.graph_of(call) for call in profile.calls]
        root.checked(check_log, log=profile.log, graphs=graphs)
        return profile

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, compressed if the name ends in ".gz".

        Raises:
            ProfileFormatError: no file can be written there; the message says why.
        """
        data = self.to_json().encode()
        # The fixed time stamp makes equal profiles equal files.
        packed = gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data
        with writing(path, ProfileFormatError):
            Path(path).write_bytes(packed)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile that `save` wrote.

        Raises:
            ProfileFormatError: the file holds no profile; names the file.
            MissingFileError: there is no such file.
        """
        data = read_file(
            path,
            expected="a profile that Profile.save wrote",
            advice="Record one: recollect.record(model, batch).save(path).",
            error=ProfileFormatError,
        )
        try:
            text = (gzip.decompress(data) if str(path).endswith(".gz") else data).decode()
        except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise ProfileFormatError(f"{path}: not a profile: {error}. Record it again.") from None
        try:
            return cls.from_json(text)
        except ProfileFormatError as error:
            raise ProfileFormatError(f"{path}: {error}") from None


def block_bytes(nbytes: int, device: str) -> int:
    """Return the bytes that an allocation takes on a device: on CUDA whole blocks, as the caching allocator makes them first.

    With `expandable_segments:True` blocks of 10 MiB or more take up to 1 MiB less.
    """
    if not device.startswith("cuda"):
        return nbytes
    block = -(-nbytes // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES
    rest = -block % _SEGMENT_BYTES
    return block + rest if block >= _LARGE_BLOCK_BYTES and rest <= _WHOLE_REST_BYTES else block


def kind_text(kind: str) -> str:
    """Return a kind of `Profile.persistent` in words.

    Example:
        >>> kind_text("optimizer_state"), kind_text("other_tensors")
        ('optimizer state', 'other tensors that the step reads')
    """
    return _KINDS.get(kind, kind.replace("_", " "))


def _encode(
    record: (
        UnitGraph | ValueRecord | OpRecord | PartRecord | VariantRecord | JointRecord | JointOp | UnitCall | HostTimes
    ),
) -> dict[str, Any]:
    """Return a record as JSON data, without fields that have their default."""
    data = {f.name: value for f in fields(record) if (value := getattr(record, f.name)) != f.default}
    if isinstance(record, UnitGraph) and record.module_tape_s:
        data["module_tape_s"] = dict(record.module_tape_s)
    return data
