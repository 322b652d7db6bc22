"""`TextScan`: everything that the rules take from one text, in one pass over its lines."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from recollect.doctor import metadata_mismatch, out_of_memory
from recollect.doctor.finding import Finding
from recollect.doctor.passage import Passage, TextRule, passages
from recollect.doctor.rules_checkpoint import CHECKPOINT_RULES
from recollect.doctor.rules_libraries import LIBRARY_RULES
from recollect.doctor.rules_megatron import MEGATRON_TEXT_RULES
from recollect.doctor.settings import Settings
from recollect.doctor.settings_in_text import SettingsInText
from recollect.doctor.training_log import LogNumbers

__all__ = ["TEXT_RULES", "TextScan"]

TEXT_RULES: tuple[TextRule, ...] = (*CHECKPOINT_RULES, *LIBRARY_RULES, *MEGATRON_TEXT_RULES)

_PORTION = 256  # lines
_ENOUGH = 20  # passages kept for each rule: thousands of ranks print the same, and the first say it all
# One of these is in each line that a rule looks for: most lines of a log have none, and are passed over quickly.
_STEMS = (
    *("heckpoint", "Tried to allocate", "allocate memory", "require grad", "requires_grad", "reentrant", "only once"),
    *("ecompute", "ffloading", "inplace", "HostAlloc", "AllGather", "accelerator device", "pin_memory", "IndexError"),
    *("to backward", "during backward", "keyword arguments", "CPU_OFFLOAD", "memory_budget", "istribute_saved"),
    *("memory pool", "modeling_layers", "different metadata", "rng_state", "device state", "torch.compile("),
)


class TextScan:
    """The findings and settings of one text.

    Args:
        lines: of the text.
        name: of the text, for the evidence.
    """

    def __init__(self, lines: Iterable[str], name: str) -> None:
        self.name = name
        self.numbers = LogNumbers()
        self.out_of_memory: list[Passage] = []
        self._in_text = SettingsInText()
        self._mismatches: list[Passage] = []
        self._found: dict[TextRule, list[tuple[Passage, dict[str, Any]]]] = {}
        self._counts: dict[TextRule, int] = {}
        self._number = 0
        self._is_promising = False
        for passage in passages(self._in_portions(lines), name, self._is_wanted):
            self._take(passage)

    @property
    def num_lines(self) -> int:
        """Lines that were read."""
        return self._number

    def settings(self) -> list[Settings]:
        """Return the settings that the text mentions."""
        return self._in_text.settings(self.name)

    def findings(self) -> Iterator[Finding]:
        """Yield what the text shows by itself; what it says about memory is in `out_of_memory`."""
        for rule, found in self._found.items():
            passage, values = found[0]
            more = self._counts[rule] - 1
            evidence = [passage.quoted()]
            if more:
                evidence.append(f"and {more} more line{'' if more == 1 else 's'} like it")
            yield rule.finding(*evidence, **values)
        for passage in self._mismatches:
            yield from metadata_mismatch.findings(passage)
        yield from self.numbers.findings()

    def _in_portions(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the lines, after one look at each portion for what all messages have: far faster than a look at each line."""
        remaining = iter(lines)
        while portion := list(itertools.islice(remaining, _PORTION)):
            text = "\n".join(portion)
            self._is_promising = any(stem in text for stem in _STEMS)
            yield from portion

    def _is_wanted(self, line: str) -> bool:
        self._number += 1
        if self._is_promising and any(stem in line for stem in _STEMS) and self._is_message(line):
            return True
        self._in_text.look(line, self._number)
        self.numbers.look(line, f"{self.name}:{self._number}")
        return False

    def _is_message(self, line: str) -> bool:
        if out_of_memory.is_out_of_memory(line):
            return len(self.out_of_memory) < _ENOUGH
        if metadata_mismatch.is_mismatch(line):  # before the rules, since its first line is all that they would see
            return len(self._mismatches) < _ENOUGH
        return any(rule.is_in(line) for rule in TEXT_RULES)

    def _take(self, passage: Passage) -> None:
        if out_of_memory.is_out_of_memory(passage.line):
            self.out_of_memory.append(passage)
        elif metadata_mismatch.is_mismatch(passage.line):
            self._mismatches.append(passage)
        for rule in TEXT_RULES:
            values = rule.match(passage)
            if values is not None:
                self._counts[rule] = self._counts.get(rule, 0) + 1
                if len(self._found.setdefault(rule, [])) < 1:
                    self._found[rule].append((passage, values))
