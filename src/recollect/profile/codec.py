"""The parts of a profile as JSON data: objects keyed by the classes' field names, without those that have their default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from recollect.fields import Field
from recollect.profile.events import StepLog
from recollect.profile.graph import OpRecord, PartRecord, UnitCall, UnitGraph, ValueRecord

__all__ = ["construct", "decode_call", "decode_graph", "decode_log", "encode", "encode_graph"]

_Built = TypeVar("_Built")


def construct(kind: Callable[..., _Built], place: Field, **arguments: Any) -> _Built:
    """Build an object that checks its arguments; report what it rejects with the place in the document."""
    try:
        return kind(**arguments)
    except ValueError as problem:
        raise place.error(f"{place.where}: {problem}") from None


def encode(record: UnitGraph | ValueRecord | OpRecord | PartRecord | UnitCall) -> dict[str, Any]:
    """Return a record of plain numbers, texts and tuples as JSON data."""
    return {f.name: value for f in fields(record) if (value := getattr(record, f.name)) != f.default}


def encode_graph(graph: UnitGraph) -> dict[str, Any]:
    """Return a unit's graph as JSON data."""
    data = encode(graph)
    for name in ("values", "ops", "parts"):
        if name in data:
            data[name] = [encode(record) for record in data[name]]
    if graph.module_tape_s:
        data["module_tape_s"] = dict(graph.module_tape_s)
    return data


def decode_graph(graph: Field) -> UnitGraph:
    """Read a unit's graph; raise the document's error at what cannot be."""
    modules = graph.find("module_tape_s")
    return construct(
        UnitGraph,
        graph,
        values=tuple(ValueRecord(**value.arguments(ValueRecord)) for value in graph.get("values").array()),
        ops=tuple(OpRecord(**op.arguments(OpRecord)) for op in graph.get("ops").array()),
        module_tape_s=() if modules is None else tuple((m, modules.get(m).number()) for m in modules.keys()),
        parts=tuple(PartRecord(**part.arguments(PartRecord)) for part in graph.items("parts")),
        **graph.arguments(UnitGraph),
    )


def decode_call(call: Field) -> UnitCall:
    """Read a call; raise the document's error at what cannot be."""
    return UnitCall(
        **call.arguments(UnitCall, least={"num_runs": 1}),
        origins=tuple(_numbers(entry, "value", "call", "value of that call") for entry in call.items("origins")),
        outside=tuple(_numbers(entry, "value", "storage") for entry in call.items("outside")),
    )


def _numbers(place: Field, *expected: str) -> tuple[Any, ...]:
    """Return as many integers as are expected."""
    numbers = place.integers()
    if len(numbers) != len(expected):
        raise place.error(f"{place.where}: got {list(numbers)}, expected [{', '.join(expected)}]")
    return numbers


def decode_log(log: Field) -> StepLog:
    """Read the events; raise the document's error at what cannot be."""
    return construct(
        StepLog,
        log,
        blocks=tuple(tuple(event.integers() for event in block.array()) for block in log.get("blocks").array()),
        sequence=tuple(step.integers() for step in log.get("sequence").array()),
    )
