"""Out of memory on the device: fragmentation or capacity, by the numbers of the message, and where, by the traceback."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from recollect.byte_format import format_bytes
from recollect.doctor.rule import RULES, TOPICS, Certainty, Finding, Passage, Rule

_SIZES_MATTER = 0.05  # of the device; less in other processes is their CUDA context
# Innermost frames first. A step with a closure runs forward and backward inside the optimizer's, so the search ends there.
_PLACES = [rule for rule in TOPICS["Out of memory"] if rule.frame]
_END = re.compile(r"closure|training_step|train_step")
_LAYER = re.compile(r"modeling_\w+\.py(?:\", line |:)\d+,? in (?:\w+\.)?forward")
_CHECKPOINT = re.compile(r"checkpoint\w*\.py\"|_gradient_checkpointing_func|_checkpointed_forward")
_FRAME = re.compile(r"^\s*File \"")
_AMOUNT = r"(\d+(?:\.\d+)?) (GiB|MiB|KiB|bytes)"
_SCALES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# 2.x ("capacty" in 2.1), then 1.x.
_TRIED = re.compile(rf"Tried to allocate {_AMOUNT}")
_CAPACITY = re.compile(rf"total capaci?ty of {_AMOUNT}|{_AMOUNT} total capacity")
_FREE = re.compile(rf"of which {_AMOUNT} is free|{_AMOUNT} free;")
_ALLOCATED = re.compile(rf"{_AMOUNT} is allocated by PyTorch|{_AMOUNT} already allocated")
_UNALLOCATED = re.compile(rf"{_AMOUNT} is reserved by PyTorch but unallocated")
_RESERVED = re.compile(rf"{_AMOUNT} reserved in total by PyTorch")
_PROCESS = re.compile(rf"Process (\d+) has {_AMOUNT} memory in use")
_THIS = re.compile(rf"this process has {_AMOUNT} memory in use")


@dataclass(frozen=True, slots=True)
class MemoryMessage:
    """The numbers in PyTorch's out-of-memory message (1.x to 2.13), in bytes; None where it has none."""

    tried_bytes: int
    capacity_bytes: int | None
    """Of the device."""
    free_bytes: int | None
    """On the device, belonging to no process."""
    allocated_bytes: int | None
    unallocated_bytes: int | None
    """Held by this process's allocator, in no tensor."""
    other_processes: dict[int, int]
    """Bytes that other processes hold, by process id."""

    @classmethod
    def of(cls, line: str) -> MemoryMessage | None:
        amounts = (_TRIED, _CAPACITY, _FREE, _ALLOCATED, _UNALLOCATED, _RESERVED)
        tried, capacity, free, allocated, unallocated, reserved = (_bytes(amount, line) for amount in amounts)
        if tried is None:
            return None
        if unallocated is None and reserved is not None and allocated is not None:
            unallocated = max(reserved - allocated, 0)
        others = _others(line, allocated, unallocated, capacity)
        return cls(tried, capacity, free, allocated, unallocated, others)

    @property
    def room_bytes(self) -> int | None:
        if self.free_bytes is None or self.unallocated_bytes is None:
            return None
        return self.free_bytes + self.unallocated_bytes

    @property
    def would_fit_alone(self) -> bool:
        return self.tried_bytes <= (self.room_bytes or 0) + sum(self.other_processes.values())


def is_out_of_memory(line: str) -> bool:
    """Return whether a line is the message of the CUDA allocator (or HIP's, or XPU's)."""
    return "Tried to allocate" in line and ("out of memory" in line or "OutOfMemoryError" in line)


def findings(
    passage: Passage, *, length: object = 4096, is_checkpointing: bool = False, expandable: str = ""
) -> Iterator[Finding]:
    message = MemoryMessage.of(passage.line)
    if message is None:
        return
    budget = "80%" if message.capacity_bytes is None else _budget(message.capacity_bytes)
    values: dict[str, Any] = {"tried": format_bytes(message.tried_bytes), "budget": budget, "length": length}
    place, frame = _place(passage.traceback)
    evidence = (passage.quoted(), *([frame] if frame else []))
    reason = _reason(message, (*evidence, *([expandable] if expandable else [])), values, is_sure=not expandable)
    if (others := _of_others(message, evidence)) is not None:
        yield others
        if message.would_fit_alone and (reason is None or reason.rule != "memory-fragmented"):
            return
    if reason is not None and reason.rule != "memory-full" and reason.certainty != "possible":
        yield reason
    elif place is not None:
        yield place.finding(*evidence, **values)
    elif is_checkpointing and (layer := _layer_without_checkpoint(passage.traceback)):
        yield RULES["checkpointing-without-effect"].finding(passage.quoted(), f"in {layer}")
    elif reason is not None:
        yield reason


def _of_others(message: MemoryMessage, evidence: tuple[str, ...]) -> Finding | None:
    """Return the advice about memory that other processes hold on the device, if it is much."""
    others = sum(message.other_processes.values())
    if message.capacity_bytes is None or others <= _SIZES_MATTER * message.capacity_bytes:
        return None
    names = ", ".join(f"process {pid} ({format_bytes(n)})" for pid, n in message.other_processes.items())
    capacity = format_bytes(message.capacity_bytes)
    return RULES["memory-of-others"].finding(*evidence, others=format_bytes(others), capacity=capacity, names=names)


def _layer_without_checkpoint(traceback: tuple[str, ...]) -> str:
    """Return the innermost frame of a layer if none is of a checkpoint; "" if there is none."""
    layers = [line for line in traceback if _LAYER.search(line)]
    if not layers or any(_CHECKPOINT.search(line) for line in traceback):
        return ""
    return layers[-1].strip().removeprefix("File ")


def _budget(capacity: int) -> str:
    """Return 90 % of a device, as people write it: the rest is for the CUDA context and gaps."""
    return f"{capacity * 0.9 / 2**30:.0f}GiB" if capacity >= 10 * 2**30 else f"{capacity * 0.9 / 2**20:.0f}MiB"


def _reason(
    message: MemoryMessage, evidence: tuple[str, ...], values: dict[str, Any], *, is_sure: bool
) -> Finding | None:
    room = message.room_bytes
    if message.free_bytes is None or room is None or message.unallocated_bytes is None:
        return None
    numbers = {
        **values,
        "free": format_bytes(message.free_bytes),
        "room": format_bytes(room),
        "unallocated": format_bytes(message.unallocated_bytes),
        "allocated": "Most" if message.allocated_bytes is None else format_bytes(message.allocated_bytes),
        "short": format_bytes(max(message.tried_bytes - room, 0)),
    }
    if message.free_bytes >= message.tried_bytes:
        return RULES["memory-limited"].finding(*evidence, **numbers)
    if room >= message.tried_bytes:
        certainty: Certainty = "likely" if is_sure else "possible"
        return RULES["memory-fragmented"].finding(*evidence, certainty=certainty, **numbers)
    return RULES["memory-full"].finding(evidence[0], **numbers)


def _place(traceback: tuple[str, ...]) -> tuple[Rule | None, str]:
    for i in range(len(traceback) - 1, -1, -1):
        line = traceback[i]
        if (place := next((rule for rule in _PLACES if rule.is_frame(line)), None)) is not None:
            return place, _frame_at(traceback, i)
        if _FRAME.match(line) and _END.search(line):
            break
    return None, ""


def _frame_at(traceback: tuple[str, ...], i: int) -> str:
    """Return "in FILE, line N, in FUNCTION: CODE" for a line of either kind."""
    start = i if _FRAME.match(traceback[i]) or i == 0 or not _FRAME.match(traceback[i - 1]) else i - 1
    lines = [traceback[start].strip()]
    if _FRAME.match(traceback[start]) and start + 1 < len(traceback) and not _FRAME.match(traceback[start + 1]):
        lines.append(traceback[start + 1].strip())
    return f"in {': '.join(lines).removeprefix('File ')}"


def _bytes(pattern: re.Pattern[str], line: str) -> int | None:
    found = pattern.search(line)
    if found is None:
        return None
    number, unit = (group for group in found.groups() if group is not None)
    return round(float(number) * _SCALES[unit])


def _others(line: str, allocated: int | None, unallocated: int | None, capacity: int | None) -> dict[int, int]:
    named = {int(m[1]): round(float(m[2]) * _SCALES[m[3]]) for m in _PROCESS.finditer(line)}
    if capacity is not None:
        named = {pid: size for pid, size in named.items() if size <= capacity}
    if not _THIS.search(line) and allocated is not None:
        # In a container this process has a number, too: it is the one that holds at least what PyTorch holds.
        held = allocated + (unallocated or 0)
        mine = [pid for pid, size in named.items() if size >= held * 0.99]
        if mine:
            del named[min(mine, key=lambda pid: named[pid])]
    return named
