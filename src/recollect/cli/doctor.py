"""`recollect doctor`: name the problems of a training run from the files that it left behind."""

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console

from recollect.cli.commands import Doctor
from recollect.doctor.diagnose import Case
from recollect.doctor.rule import RULES, Finding
from recollect.errors import DiagnosisError
from recollect.integrations.megatron.rules import RULES as CLASHES
from recollect.printing import columns_of, print_line

_COLUMNS = 80
_LABEL = 10
_NOTHING_FOUND = 1
_INPUT = "standard input"
_COMMAND = re.compile(r"(.*:) (recollect \w+ --.+)", re.DOTALL)
_WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}


def run_doctor(command: Doctor, console: Console) -> int:
    case = Case()
    for path in command.files or (Path("-"),):
        if str(path) == "-":
            case.add_stream(_standard_input(), _INPUT)
        else:
            case.add_file(path)
    found = case.findings()
    if command.json:
        data = {"read": case.read, "findings": [finding.to_data() for finding in found]}
        console.out(json.dumps(data, indent=2), highlight=False)
    else:
        print_line(console, report(found, columns_of(console)) if found else nothing_found(case.read))
    return 0 if found else _NOTHING_FOUND


def _standard_input() -> BinaryIO:
    if sys.stdin is None or sys.stdin.isatty():
        raise DiagnosisError(
            "doctor: got no file, expected a log, a configuration or a memory snapshot: recollect doctor train.log, "
            "or pipe it in: python train.py 2>&1 | recollect doctor."
        )
    return sys.stdin.buffer


def report(found: Sequence[Finding], columns: int = _COLUMNS) -> str:
    """Return findings as text, in lines of at most `columns` unless a word is longer."""
    parts = []
    for number, finding in enumerate(found, start=1):
        lines = [
            *_part(f"{number}.", finding.problem, columns, indent=3),
            *_part("   cause", finding.cause, columns),
        ]
        for i, text in enumerate(finding.evidence):
            lines += _part("   seen" if i == 0 else "", text, columns)
        for i, text in enumerate(finding.fix):
            lines += _advice("   do" if i == 0 else "", text, columns)
        lines += _part(
            "",
            f"[{finding.certainty}{', ends the run' if finding.fatal else ''}; rule {finding.rule}; {finding.source}]",
            columns,
        )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _advice(label: str, text: str, columns: int) -> list[str]:
    """Return a text like `_part`; a command at its end starts a line, and continues over lines as in a shell."""
    said, command = found.groups() if (found := _COMMAND.match(text)) else (text, "")
    indent = " " * _LABEL
    parts = textwrap.wrap(command, columns - 2, initial_indent=indent, subsequent_indent=f"{indent}  ", **_WHOLE_WORDS)
    return [*_part(label, said, columns), *(f"{part} \\" for part in parts[:-1]), *parts[-1:]]


def _part(label: str, text: str, columns: int, *, indent: int = _LABEL) -> list[str]:
    """Return a text wrapped next to its label. Words longer than a line (paths) stay whole, to be copied."""
    return textwrap.wrap(
        text,
        width=columns,
        initial_indent=label.ljust(indent),
        subsequent_indent=" " * indent,
        **_WHOLE_WORDS,
    )


def nothing_found(read: Sequence[str]) -> str:
    """Return the message about the sources read, the problems looked for, and the arguments to pass."""
    number = len(RULES) + sum(rule.is_checked for rule in CLASHES)
    text = (
        f"Looked for {number} problems of memory and recompute: errors of PyTorch, Megatron, transformers, FSDP and "
        "DeepSpeed, settings that clash or save nothing, NaN with FP8, and what fills a memory snapshot. docs/doctor.md lists "
        "them."
    )
    advice = (
        "Pass the whole log, with the traceback and the lines before it; the configuration or the launch script beside it "
        "(recollect doctor train.log config.yaml); or a snapshot: torch.cuda.memory._record_memory_history() before the steps, "
        'torch.cuda.memory._dump_snapshot("snapshot.pickle") after.'
    )
    lines = ["Nothing recognised.", *(f"  {line}" for line in read)]
    return "\n".join([*lines, *textwrap.wrap(text, _COLUMNS), *textwrap.wrap(advice, _COLUMNS, break_on_hyphens=False)])
