"""The parts of a profile as JSON data: objects keyed by the classes' field names, with false flags left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from recollect.fields import Field
from recollect.profile.events import StepLog
from recollect.profile.graph import OpRecord, PartRecord, UnitCall, UnitGraph, ValueRecord

__all__ = ["construct", "decode_call", "decode_graph", "decode_log", "encode_call", "encode_graph", "encode_log"]

_VALUE_FLAGS = ("must_keep", "saved", "is_output", "mutated_later")
_OP_FLAGS = ("mutates",)
_OP_BYTES = ("state_bytes", "working_bytes")
_CALL_FLAGS = ("repeated", "chained")
_Built = TypeVar("_Built")


def construct(kind: Callable[..., _Built], place: Field, **arguments: Any) -> _Built:
    """Build an object that checks its arguments; report what it rejects with the place in the document."""
    try:
        return kind(**arguments)
    except ValueError as problem:
        raise place.error(f"{place.where}: {problem}") from None


def encode_graph(graph: UnitGraph) -> dict[str, Any]:
    """Return a unit's graph as JSON data."""
    return {
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
        **({"buffer_bytes": graph.buffer_bytes} if graph.buffer_bytes else {}),
        **({"tape_s": graph.tape_s} if graph.tape_s else {}),
        **({"module_tape_s": dict(graph.module_tape_s)} if graph.module_tape_s else {}),
        **(
            {"parts": [{"value": p.value, "nbytes": p.nbytes, "gather_s": p.gather_s} for p in graph.parts]}
            if graph.parts
            else {}
        ),
    }


def encode_call(call: UnitCall) -> dict[str, Any]:
    """Return a call as JSON data."""
    return {
        "path": call.path,
        "graph": call.graph,
        **_encode_flags(call, _CALL_FLAGS),
        **({"origins": call.origins} if call.origins else {}),
        **({"outside": call.outside} if call.outside else {}),
        **({"num_runs": call.num_runs} if call.num_runs > 1 else {}),
    }


def encode_log(log: StepLog) -> dict[str, Any]:
    """Return the events as JSON data."""
    return {"blocks": log.blocks, "sequence": log.sequence}


def _encode_flags(record: ValueRecord | OpRecord | UnitCall, names: tuple[str, ...]) -> dict[str, bool]:
    return {name: True for name in names if getattr(record, name)}


def decode_graph(graph: Field) -> UnitGraph:
    """Read a unit's graph; raise the document's error at what cannot be."""
    tape, modules, parts = graph.find("tape_s"), graph.find("module_tape_s"), graph.find("parts")
    return construct(
        UnitGraph,
        graph,
        values=tuple(_decode_value(value) for value in graph.get("values").array()),
        ops=tuple(_decode_op(op) for op in graph.get("ops").array()),
        tape_s=0.0 if tape is None else tape.number(),
        buffer_bytes=_decode_bytes(graph, "buffer_bytes"),
        module_tape_s=() if modules is None else tuple((m, modules.get(m).number()) for m in modules.keys()),
        parts=() if parts is None else tuple(_decode_part(part) for part in parts.array()),
    )


def _decode_part(part: Field) -> PartRecord:
    return PartRecord(
        value=part.get("value").integer(least=0),
        nbytes=part.get("nbytes").integer(least=0),
        gather_s=part.get("gather_s").number(),
    )


def _decode_op(op: Field) -> OpRecord:
    return OpRecord(
        name=op.get("name").text(),
        inputs=op.get("inputs").integers(),
        outputs=op.get("outputs").integers(),
        time_s=op.get("time_s").number(),
        state_bytes=_decode_bytes(op, "state_bytes"),
        working_bytes=_decode_bytes(op, "working_bytes"),
        **_decode_flags(op, _OP_FLAGS),
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


def decode_call(call: Field) -> UnitCall:
    """Read a call; raise the document's error at what cannot be."""
    origins, outside, num_runs = call.find("origins"), call.find("outside"), call.find("num_runs")
    return UnitCall(
        path=call.get("path").text(),
        graph=call.get("graph").integer(least=0),
        origins=() if origins is None else tuple(_decode_origin(origin) for origin in origins.array()),
        outside=() if outside is None else tuple(_decode_outside(entry) for entry in outside.array()),
        num_runs=1 if num_runs is None else num_runs.integer(least=1),
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


def decode_log(log: Field) -> StepLog:
    """Read the events; raise the document's error at what cannot be."""
    return construct(
        StepLog,
        log,
        blocks=tuple(tuple(event.integers() for event in block.array()) for block in log.get("blocks").array()),
        sequence=tuple(step.integers() for step in log.get("sequence").array()),
    )
