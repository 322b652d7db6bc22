"""Profiles as JSON: objects with the names of the classes' fields; flags that are false are left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from recollect.errors import ProfileFormatError
from recollect.fields import Field, read_document
from recollect.profile.check_log import check_log
from recollect.profile.graph import OpRecord, Profile, StepLog, UnitCall, UnitGraph, ValueRecord

__all__ = ["decode_profile", "encode_profile"]

_FORMAT = "recollect.profile"
_VERSION = 1
_VALUE_FLAGS = ("must_keep", "saved", "is_output", "mutated_later")
_OP_FLAGS = ("mutates",)
_OP_BYTES = ("state_bytes", "working_bytes")
_CALL_FLAGS = ("repeated", "chained")
_TEXTS = ("device", "device_name", "torch_version", "model_class", "batch")
_Built = TypeVar("_Built")


def encode_profile(profile: Profile) -> str:
    """Return a profile as JSON text."""
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        **{name: getattr(profile, name) for name in _TEXTS},
        "fake": profile.fake,
        "step_s": profile.step_s,
        "persistent": dict(profile.persistent),
        "calibration_bytes": profile.calibration_bytes,
        "loss_chunks": profile.loss_chunks,
        "device_memory_bytes": profile.device_memory_bytes,
        "calls": [
            {
                "path": call.path,
                "graph": call.graph,
                **_encode_flags(call, _CALL_FLAGS),
                **({"origins": call.origins} if call.origins else {}),
                **({"outside": call.outside} if call.outside else {}),
            }
            for call in profile.calls
        ],
        "graphs": [
            {
                "values": [
                    {"name": v.name, "nbytes": v.nbytes, "producer": v.producer, **_encode_flags(v, _VALUE_FLAGS)}
                    for v in graph.values
                ],
                "ops": [
                    {
                        "name": op.name,
                        "inputs": op.inputs,
                        "outputs": op.outputs,
                        "time_s": op.time_s,
                        **_encode_flags(op, _OP_FLAGS),
                        **{name: getattr(op, name) for name in _OP_BYTES if getattr(op, name)},
                    }
                    for op in graph.ops
                ],
                **({"tape_s": graph.tape_s} if graph.tape_s else {}),
                **({"module_tape_s": dict(graph.module_tape_s)} if graph.module_tape_s else {}),
            }
            for graph in profile.graphs
        ],
        "log": {"blocks": profile.log.blocks, "sequence": profile.log.sequence},
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _encode_flags(record: ValueRecord | OpRecord | UnitCall, names: tuple[str, ...]) -> dict[str, bool]:
    return {name: True for name in names if getattr(record, name)}


def decode_profile(text: str) -> Profile:
    """Read a profile from JSON text.

    Raises:
        ProfileFormatError: no JSON, no profile, of a later version, or with numbers that cannot be; says where.
    """
    root = read_document(text, format=_FORMAT, version=_VERSION, error=ProfileFormatError)
    fake = root.find("fake")
    calibration = root.find("calibration_bytes")
    loss_chunks = root.find("loss_chunks")
    device_memory = root.find("device_memory_bytes")
    persistent = root.get("persistent")
    texts = {name: found.text() for name in _TEXTS if (found := root.find(name)) is not None}
    log = root.get("log")
    profile = _build(
        Profile,
        root,
        graphs=tuple(_decode_graph(graph) for graph in root.get("graphs").array()),
        calls=tuple(_decode_call(call) for call in root.get("calls").array()),
        log=_build(
            StepLog,
            log,
            blocks=tuple(tuple(e.integers() for e in block.array()) for block in log.get("blocks").array()),
            sequence=tuple(step.integers() for step in log.get("sequence").array()),
        ),
        step_s=root.get("step_s").number(),
        persistent={kind: persistent.get(kind).integer(least=0) for kind in persistent.keys()},
        fake=fake is not None and fake.flag(),
        calibration_bytes=0 if calibration is None else calibration.integer(),
        loss_chunks=1 if loss_chunks is None else loss_chunks.integer(least=1),
        device_memory_bytes=0 if device_memory is None else device_memory.integer(least=0),
        **texts,
    )
    _build(check_log, root, profile=profile)
    return profile


def _decode_graph(graph: Field) -> UnitGraph:
    values = tuple(_decode_value(value) for value in graph.get("values").array())
    ops = tuple(
        OpRecord(
            name=op.get("name").text(),
            inputs=op.get("inputs").integers(),
            outputs=op.get("outputs").integers(),
            time_s=op.get("time_s").number(),
            state_bytes=_decode_bytes(op, "state_bytes"),
            working_bytes=_decode_bytes(op, "working_bytes"),
            **_decode_flags(op, _OP_FLAGS),
        )
        for op in graph.get("ops").array()
    )
    tape, modules = graph.find("tape_s"), graph.find("module_tape_s")
    return _build(
        UnitGraph,
        graph,
        values=values,
        ops=ops,
        tape_s=0.0 if tape is None else tape.number(),
        module_tape_s=() if modules is None else tuple((m, modules.get(m).number()) for m in modules.keys()),
    )


def _decode_bytes(op: Field, name: str) -> int:
    nbytes = op.find(name)
    return 0 if nbytes is None else nbytes.integer(least=0)


def _decode_value(value: Field) -> ValueRecord:
    producer = value.find("producer")
    return ValueRecord(
        name=value.get("name").text(),
        nbytes=value.get("nbytes").integer(least=0),
        producer=None if producer is None else producer.integer(least=0),
        **_decode_flags(value, _VALUE_FLAGS),
    )


def _decode_call(call: Field) -> UnitCall:
    origins, outside = call.find("origins"), call.find("outside")
    return UnitCall(
        path=call.get("path").text(),
        graph=call.get("graph").integer(least=0),
        origins=() if origins is None else tuple(_decode_origin(origin) for origin in origins.array()),
        outside=() if outside is None else tuple(_decode_outside(entry) for entry in outside.array()),
        **_decode_flags(call, _CALL_FLAGS),
    )


def _decode_origin(origin: Field) -> tuple[int, int, int]:
    numbers = origin.integers()
    if len(numbers) != 3:
        raise origin.error(f"{origin.where}: got {list(numbers)}, expected [value, call, value of that call]")
    return numbers[0], numbers[1], numbers[2]


def _decode_outside(entry: Field) -> tuple[int, int]:
    numbers = entry.integers()
    if len(numbers) != 2:
        raise entry.error(f"{entry.where}: got {list(numbers)}, expected [value, storage]")
    return numbers[0], numbers[1]


def _decode_flags(record: Field, names: tuple[str, ...]) -> dict[str, bool]:
    return {name: found.flag() for name in names if (found := record.find(name)) is not None}


def _build(kind: Callable[..., _Built], place: Field, **arguments: Any) -> _Built:
    """Construct a checked object; what its constructor finds wrong is reported with the place in the document."""
    try:
        return kind(**arguments)
    except ValueError as problem:
        raise place.error(f"{place.where}: {problem}") from None
