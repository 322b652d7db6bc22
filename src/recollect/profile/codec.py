"""The parts of a profile as JSON data: objects keyed by the classes' field names, without those that have their default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from recollect.fields import Field
from recollect.profile.events import StepLog
from recollect.profile.graph import OpRecord, PartRecord, UnitCall, UnitGraph, ValueRecord

__all__ = ["construct", "decode_call", "decode_graph", "decode_log", "encode_call", "encode_graph", "encode_log"]

_Built = TypeVar("_Built")


def construct(kind: Callable[..., _Built], place: Field, **arguments: Any) -> _Built:
    """Build an object that checks its arguments; report what it rejects with the place in the document."""
    try:
        return kind(**arguments)
    except ValueError as problem:
        raise place.error(f"{place.where}: {problem}") from None


def encode_graph(graph: UnitGraph) -> dict[str, Any]:
    """Return a unit's graph as JSON data."""
    data = _encode(graph)
    for name in ("values", "ops", "parts"):
        if name in data:
            data[name] = [_encode(record) for record in data[name]]
    return {**data, "module_tape_s": dict(graph.module_tape_s)} if graph.module_tape_s else data


def encode_call(call: UnitCall) -> dict[str, Any]:
    """Return a call as JSON data."""
    return _encode(call)


def encode_log(log: StepLog) -> dict[str, Any]:
    """Return the events as JSON data."""
    return {"blocks": log.blocks, "sequence": log.sequence}


def _encode(record: UnitGraph | ValueRecord | OpRecord | PartRecord | UnitCall) -> dict[str, Any]:
    return {f.name: value for f in fields(record) if (value := getattr(record, f.name)) != f.default}


def decode_graph(graph: Field) -> UnitGraph:
    """Read a unit's graph; raise the document's error at what cannot be."""
    modules, parts = graph.find("module_tape_s"), graph.find("parts")
    return construct(
        UnitGraph,
        graph,
        values=tuple(ValueRecord(**value.arguments(ValueRecord)) for value in graph.get("values").array()),
        ops=tuple(OpRecord(**op.arguments(OpRecord)) for op in graph.get("ops").array()),
        module_tape_s=() if modules is None else tuple((m, modules.get(m).number()) for m in modules.keys()),
        parts=() if parts is None else tuple(PartRecord(**part.arguments(PartRecord)) for part in parts.array()),
        **graph.arguments(UnitGraph),
    )


def decode_call(call: Field) -> UnitCall:
    """Read a call; raise the document's error at what cannot be."""
    origins, outside = call.find("origins"), call.find("outside")
    return UnitCall(
        **call.arguments(UnitCall, least={"num_runs": 1}),
        origins=() if origins is None else tuple(_decode_origin(origin) for origin in origins.array()),
        outside=() if outside is None else tuple(_decode_outside(entry) for entry in outside.array()),
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


def decode_log(log: Field) -> StepLog:
    """Read the events; raise the document's error at what cannot be."""
    return construct(
        StepLog,
        log,
        blocks=tuple(tuple(event.integers() for event in block.array()) for block in log.get("blocks").array()),
        sequence=tuple(step.integers() for step in log.get("sequence").array()),
    )
