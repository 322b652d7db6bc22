"""`TextScan`: everything that the rules take from one text, in one pass over its lines."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from recollect.byte_format import format_bytes
from recollect.doctor import out_of_memory
from recollect.doctor.rule import RULES, Finding, Passage, Rule, passages
from recollect.doctor.settings import Settings, SettingsInText

_TEXT_RULES = tuple(rule for rule in RULES.values() if rule.pattern)

_PORTION = 256  # lines
_ENOUGH = 20  # passages kept for each rule: thousands of ranks print the same, and the first say it all
# Each line that a rule looks for has one of these: most lines of a log have none, and are skipped quickly.
_STEMS = (
    *("heckpoint", "Tried to allocate", "allocate memory", "require grad", "requires_grad", "reentrant", "only once"),
    *("ecompute", "ffloading", "inplace", "HostAlloc", "AllGather", "accelerator device", "pin_memory", "IndexError"),
    *("to backward", "during backward", "keyword arguments", "CPU_OFFLOAD", "memory_budget", "istribute_saved"),
    *("memory pool", "modeling_layers", "Watchdog caught", "different metadata", "rng_state", "device state"),
    "torch.compile(",
)
_GAP_MATTERS = 1.25  # reserved / allocated: the caching allocator's rounding stays well below
_MEMORY = re.compile(
    r"memory \(MB\) \| allocated: [\d.]+ \| max allocated: ([\d.]+) \| reserved: [\d.]+ \| max reserved: ([\d.]+)"
)
_NAN = re.compile(
    r"found NaN in local|number of nan iterations:\s+[1-9]|lm loss: nan|'(?:loss|grad_norm)': '?nan"
    r"|\b(?:loss|grad norm)[=:]\s*nan\b",
    re.IGNORECASE,
)
_EXPANDABLE = re.compile(r"ALLOC_CONF['\"\]]*\s*[=:,]\s*\S*expandable_segments:True")
_MISMATCH = "have different metadata than during the forward pass"
_METADATA = re.compile(r"(saved|recomputed) metadata: \{'shape': torch\.Size\(\[([\d, ]*)\]\), 'dtype': torch\.(\w+)")
_EXPERTS = re.compile(
    r"\bmoe|\bexpert|router|row_id_map|num_local_experts|mixtral|deepseek_?v|token_dispatch", re.IGNORECASE
)
_Tensor = tuple[tuple[int, ...], str]


class LogNumbers:
    """Reads a log's numbers, line by line: memory reserved but unused, and losses that are not numbers.

    `expandable` is the first line that sets expandable segments, after its place, and `nan` the first with a loss or gradient
    that is not a number; "" if there is none.
    """

    def __init__(self) -> None:
        self.expandable = ""
        self.nan = ""
        self._highest: tuple[float, float, str] = (0.0, 0.0, "")

    def look(self, line: str, place: str) -> None:
        if "memory (MB)" in line and (found := _MEMORY.search(line)):
            allocated, reserved = float(found[1]), float(found[2])
            if reserved > self._highest[1]:
                self._highest = allocated, reserved, f"{place}: {found[0]}"
        elif not self.nan and ("nan" in line or "NaN" in line) and _NAN.search(line):
            self.nan = f"{place}: {line.strip()[:200]}"
        elif not self.expandable and "expandable_segments" in line and _EXPANDABLE.search(line):
            self.expandable = f"{place}: {line.strip()[:200]}"

    def findings(self) -> Iterator[Finding]:
        allocated, reserved, line = self._highest
        if reserved > _GAP_MATTERS * allocated > 0:
            mib = 2**20
            yield RULES["reserved-over-allocated"].finding(
                line,
                reserved=format_bytes(round(reserved * mib)),
                allocated=format_bytes(round(allocated * mib)),
                gap=format_bytes(round((reserved - allocated) * mib)),
            )


class TextScan:
    """The findings and settings of one text."""

    def __init__(self, lines: Iterable[str], name: str) -> None:
        self.name = name
        self.numbers = LogNumbers()
        self.out_of_memory: list[Passage] = []
        self._in_text = SettingsInText()
        self._mismatches: list[Passage] = []
        self._found: dict[Rule, tuple[Passage, dict[str, Any]]] = {}
        self._counts: Counter[Rule] = Counter()
        self.num_lines = 0
        self._is_promising = False
        for passage in passages(self._in_portions(lines), name, self._is_wanted):
            self._take(passage)

    def settings(self) -> list[Settings]:
        return self._in_text.settings(self.name)

    def findings(self) -> Iterator[Finding]:
        """Yield the findings in the text itself; `out_of_memory` handles its messages about memory."""
        for rule, (passage, values) in self._found.items():
            more = self._counts[rule] - 1
            evidence = [passage.quoted()]
            if more:
                evidence.append(f"and {more} more line{'' if more == 1 else 's'} like it")
            yield rule.finding(*evidence, **values)
        for passage in self._mismatches:
            yield from _mismatch(passage)
        yield from self.numbers.findings()

    def _in_portions(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the lines, after one search of each portion for words that all messages have: faster than searching lines."""
        remaining = iter(lines)
        while portion := list(itertools.islice(remaining, _PORTION)):
            text = "\n".join(portion)
            self._is_promising = any(stem in text for stem in _STEMS)
            yield from portion

    def _is_wanted(self, line: str) -> bool:
        self.num_lines += 1
        if self._is_promising and any(stem in line for stem in _STEMS) and self._is_message(line):
            return True
        self._in_text.look(line, self.num_lines)
        self.numbers.look(line, f"{self.name}:{self.num_lines}")
        return False

    def _is_message(self, line: str) -> bool:
        if out_of_memory.is_out_of_memory(line):
            return len(self.out_of_memory) < _ENOUGH
        if _MISMATCH in line:  # before the rules, since they would see only its first line
            return len(self._mismatches) < _ENOUGH
        return any(rule.is_in(line) for rule in _TEXT_RULES)

    def _take(self, passage: Passage) -> None:
        if out_of_memory.is_out_of_memory(passage.line):
            self.out_of_memory.append(passage)
        elif _MISMATCH in passage.line:
            self._mismatches.append(passage)
        for rule in _TEXT_RULES:
            values = rule.match(passage)
            if values is not None:
                self._counts[rule] += 1
                self._found.setdefault(rule, (passage, values))


def _mismatch(passage: Passage) -> Iterator[Finding]:
    """Yield the cause of CheckpointError "have different metadata", by the shapes and types in the lines after its first."""
    pairs = _pairs(passage)
    for name in ("metadata-zero3", "metadata-dtype", "metadata-routing", "metadata-cache"):
        for saved, recomputed in pairs:
            if _fits(name, saved, recomputed, passage):
                shown: dict[str, Any] = {"saved": _text(saved), "recomputed": _text(recomputed)}
                yield RULES[name].finding(
                    passage.quoted(), f"saved {shown['saved']}, recomputed {shown['recomputed']}", **shown
                )
                return
    pair = f": saved {_text(pairs[0][0])}, recomputed {_text(pairs[0][1])}" if pairs else ""
    yield RULES["metadata-other"].finding(passage.quoted(), pair=pair)


def _pairs(passage: Passage) -> list[tuple[_Tensor, _Tensor]]:
    found: list[tuple[str, _Tensor]] = []
    for line in (passage.line, *passage.after):
        for kind, shape, dtype in _METADATA.findall(line):
            found.append((kind, (tuple(int(size) for size in shape.split(",") if size.strip()), dtype)))
    return [
        (first, second)
        for (kind, first), (next_kind, second) in zip(found, found[1:], strict=False)
        if (kind, next_kind) == ("saved", "recomputed")
    ]


def _fits(name: str, saved: _Tensor, recomputed: _Tensor, passage: Passage) -> bool:
    (old, old_dtype), (new, new_dtype) = saved, recomputed
    changed = [i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b] if len(old) == len(new) else []
    if name == "metadata-zero3":
        return new == (0,) and old != (0,)
    if name == "metadata-dtype":
        return old == new and old_dtype != new_dtype
    if name == "metadata-routing":
        # A cache grows a sequence to twice its length; tokens that move change the first dimension by little.
        is_drift = changed == [0] and 2 / 3 < (new[0] + 1) / (old[0] + 1) < 1.5
        return is_drift or (bool(changed) and bool(_EXPERTS.search(passage.text)))
    return len(changed) == 1 and new[changed[0]] > old[changed[0]]


def _text(tensor: _Tensor) -> str:
    return f"{list(tensor[0])} {tensor[1]}"
