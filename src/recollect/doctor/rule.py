"""`Rule`: a problem that can be recognised, and `Finding`: one that was; `RULES`: all, as texts in the folder `rules`."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml

from recollect.doctor.passage import Passage

Certainty = Literal["certain", "likely", "possible"]
"""The text or the numbers say so; they fit no other common cause; they allow it."""

CERTAINTIES: tuple[Certainty, ...] = ("certain", "likely", "possible")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem that `recollect.diagnose` recognised.

    Attributes:
        rule: its name in docs/doctor.md.
        certainty: "certain", "likely" or "possible".
        problem: what goes wrong.
        cause: why.
        evidence: the lines, settings or numbers that show it, each after the place where it was seen.
        fix: what to do, the best first.
        source: where the problem was reported or documented.

    Example:
        >>> finding = Finding(
        ...     rule="r", certainty="likely", problem="p", cause="c", evidence=("log:3: x",), fix=("f",), source="s"
        ... )
        >>> finding.to_data()["evidence"]
        ['log:3: x']
    """

    rule: str
    certainty: Certainty
    problem: str
    cause: str
    evidence: tuple[str, ...]
    fix: tuple[str, ...]
    source: str

    def to_data(self) -> dict[str, Any]:
        """Return the finding as plain data, for JSON."""
        return {**dataclasses.asdict(self), "evidence": list(self.evidence), "fix": list(self.fix)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A problem that can be recognised: one row of the table in docs/doctor.md.

    Attributes:
        name: as in findings.
        sees: what the rule goes by, in words.
        problem: what goes wrong. It, `cause` and `fix` may have {names} of numbers, filled in when the problem is found.
        cause: why.
        fix: what to do, the best first.
        source: where it was reported or documented.
        certainty: how much what it sees says.
        pattern: regular expression of a line of a text that shows it, whose groups fill the {names}; "" if the rule goes by
            other things.
        near: regular expression that must be found in the lines around that one, too; "" is none.
        frame: regular expression of the frame of a traceback or stack in which it happens; "" if the rule goes by other things.
    """

    name: str
    sees: str
    problem: str
    cause: str
    fix: tuple[str, ...]
    source: str
    certainty: Certainty = "certain"
    pattern: str = ""
    near: str = ""
    frame: str = ""

    def is_in(self, line: str) -> bool:
        """Return whether the pattern is found in a line."""
        return _compiled(self.pattern).search(line) is not None

    def is_frame(self, line: str) -> bool:
        """Return whether the frame's pattern is found in a line."""
        return _compiled(self.frame).search(line) is not None

    def match(self, passage: Passage) -> dict[str, Any] | None:
        """Return the groups of the pattern if the passage fits, else None."""
        found = _compiled(self.pattern).search(passage.line)
        if found is None or (self.near and not _compiled(self.near).search(passage.text)):
            return None
        return found.groupdict()

    def finding(self, *evidence: str, certainty: Certainty | None = None, **values: object) -> Finding:
        """Return what this rule says where it was met.

        Args:
            *evidence: what was seen, and where.
            certainty: if other than the rule's.
            **values: for the {names} in the texts.
        """
        return Finding(
            rule=self.name,
            certainty=certainty or self.certainty,
            problem=self.problem.format(**values),
            cause=self.cause.format(**values),
            evidence=evidence,
            fix=tuple(text.format(**values) for text in self.fix),
            source=self.source,
        )


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE)


def _read(name: str) -> tuple[Rule, ...]:
    text = (resources.files("recollect.doctor") / "rules" / f"{name}.yaml").read_text(encoding="utf-8")
    # In C if PyYAML has that, which takes 3 ms for all rules; else 50.
    entries = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tuple(Rule(**{**entry, "fix": tuple(entry["fix"])}) for entry in entries)


TOPICS: dict[str, tuple[Rule, ...]] = {
    "Out of memory": _read("out_of_memory"),
    "Memory snapshots": _read("snapshots"),
    "Checkpointing, autograd and DDP": _read("checkpointing"),
    "transformers, FSDP, DeepSpeed, torchtitan and offload": _read("libraries"),
    "Megatron's errors": _read("megatron_errors"),
    "Megatron's settings": _read("megatron_settings"),
}
"""The rules by the headings of their tables in docs/doctor.md."""

RULES: dict[str, Rule] = {rule.name: rule for rules in TOPICS.values() for rule in rules}
