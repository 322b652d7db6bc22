"""`Rule`: a problem that can be recognised, and `Finding`: one that was; `RULES`: all, as texts in the folder `rules`.

`Passage`: a line of a text with its context. Texts are read line by line, so logs may have any size.
"""

import dataclasses
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from recollect.integrations.megatron.rule import read_table

BEFORE = 150  # lines: a traceback through a trainer has 60 to 120
AFTER = 16
_WITHOUT_HEAD = 12  # of a traceback that does not say where it begins
_LONGEST_SHOWN = 200  # columns of a line that is quoted
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# `torchrun` and `srun --label` put the rank before each line, and lines of several ranks may alternate.
_RANK = re.compile(r"^(?:(?:\[(?:rank|default)?\d+\]:?|\d+:|\d+(?:\.\d+){3}:|\(\w+ pid=\d+[^)]*\)) ?)+")
_TRACEBACK = "Traceback (most recent call last)"

Certainty = Literal["certain", "likely", "possible"]
"""The text or the numbers say so; they fit no other common cause; they allow it."""

CERTAINTIES: tuple[Certainty, ...] = ("certain", "likely", "possible")


@dataclass(frozen=True, slots=True)
class Passage:
    """A line, and the lines around it of the same rank."""

    place: str
    """File and line number, such as "train.log:120"."""
    line: str
    """The line, without a rank prefix."""
    before: tuple[str, ...] = ()
    """Up to 150 lines before it."""
    after: list[str] = field(default_factory=list)
    """Up to 16 lines after it."""

    @property
    def text(self) -> str:
        return "\n".join((*self.before, self.line, *self.after))

    @property
    def traceback(self) -> tuple[str, ...]:
        """The frames that end in this line, outermost first; without a head, as of pytest and some logs, the lines before."""
        starts = [i for i, line in enumerate(self.before) if _TRACEBACK in line]
        return self.before[starts[-1] + 1 :] if starts else self.before[-_WITHOUT_HEAD:]

    def quoted(self) -> str:
        """Return the line after its place, shortened if it is long."""
        text = self.line.strip()
        shown = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]} ..."
        return f"{self.place}: {shown}"


def passages(lines: Iterable[str], name: str, is_wanted: Callable[[str], bool]) -> Iterator[Passage]:
    """Yield a passage for each wanted line, holding only the lines around it."""
    before: deque[tuple[str, str]] = deque(maxlen=BEFORE)
    waiting: deque[tuple[int, str, Passage]] = deque()
    for number, raw in enumerate(lines, start=1):
        text = raw.rstrip("\r\n")
        if "\x1b" in text:
            text = _COLOURS.sub("", text)
        rank = match[0] if (match := _RANK.match(text)) else ""
        line = text[len(rank) :]
        while waiting and waiting[0][0] + AFTER < number:
            yield waiting.popleft()[2]
        for _, its_rank, passage in waiting:
            if its_rank == rank:
                passage.after.append(line)
        if is_wanted(text):
            own = tuple(earlier for its_rank, earlier in before if its_rank == rank)
            waiting.append((number, rank, Passage(f"{name}:{number}", line, own)))
        before.append((rank, line))
    yield from (passage for _, _, passage in waiting)


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
        fatal: whether it ended the run, or will.

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
    fatal: bool = False

    def to_data(self) -> dict[str, Any]:
        """Return the finding as plain data, for JSON."""
        return {**dataclasses.asdict(self), "evidence": list(self.evidence), "fix": list(self.fix)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A problem that can be recognised: one row of the table in docs/doctor.md."""

    name: str
    """As in findings, where certainty, fix, source and fatal are explained, too."""
    sees: str
    """The evidence that the rule uses, in words; by default the pattern."""
    problem: str
    """What goes wrong. It, `cause` and `fix` may have {names} of numbers, filled in when the problem is found."""
    cause: str
    fix: tuple[str, ...]
    source: str
    certainty: Certainty = "certain"
    pattern: str = ""
    """Regular expression of a line of text that shows it; its groups fill the {names}; "" if the rule uses other
    evidence."""
    near: str = ""
    """Regular expression that must be found in the lines around that one, too; "" is none."""
    frame: str = ""
    """Regular expression of the frame of a traceback or stack in which it happens; "" if the rule uses other evidence."""
    fatal: bool = False

    def is_in(self, line: str) -> bool:
        return _compiled(self.pattern).search(line) is not None

    def is_frame(self, line: str) -> bool:
        return _compiled(self.frame).search(line) is not None

    def match(self, passage: Passage) -> dict[str, Any] | None:
        found = _compiled(self.pattern).search(passage.line)
        if found is None or (self.near and not _compiled(self.near).search(passage.text)):
            return None
        return found.groupdict()

    def finding(self, *evidence: str, certainty: Certainty | None = None, **values: object) -> Finding:
        return Finding(
            rule=self.name,
            certainty=certainty or self.certainty,
            problem=self.problem.format(**values),
            cause=self.cause.format(**values),
            evidence=evidence,
            fix=tuple(text.format(**values) for text in self.fix),
            source=self.source,
            fatal=self.fatal,
        )


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE)


def _read(name: str, **most: Any) -> tuple[Rule, ...]:
    """Return the rules of a file, with what most of them have in common."""
    return tuple(
        Rule(**{"sees": f'"{entry.get("pattern")}"', **most, **entry, "fix": tuple(entry["fix"])})
        for entry in read_table(__package__, f"rules/{name}.yaml")
    )


TOPICS: dict[str, tuple[Rule, ...]] = {
    "Out of memory": _read("out_of_memory", fatal=True),
    "Memory snapshots": _read("snapshots", certainty="likely"),
    "Checkpointing, autograd and DDP": _read("checkpointing", fatal=True),
    "transformers, FSDP, DeepSpeed, torchtitan and offload": _read("libraries"),
    "Megatron's errors": _read("megatron_errors", fatal=True),
    "Megatron's settings": _read("megatron_settings", certainty="possible"),
}
"""The rules by the headings of their tables in docs/doctor.md."""

RULES: dict[str, Rule] = {rule.name: rule for rules in TOPICS.values() for rule in rules}

_MISTAKES = read_table(__package__, "rules/one_mistake.yaml")
ONE_SPEAKS, TOGETHER = (tuple(map(tuple, _MISTAKES[key])) for key in ("one_speaks", "together"))
"""Names of findings that one mistake gives: the first speaks for the others, alone, or with their advice."""
