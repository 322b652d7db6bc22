"""`SettingsInText`: the settings that a log, a script or a command line mentions."""

from __future__ import annotations

import ast
import re
from typing import Any

from recollect.doctor.settings import ALIASES, KNOWN, Settings, renamed

_MOST_SCOPES = 20  # a log that names more settings than so many runs can have is prose
_FLAG = re.compile(r"^--([A-Za-z][\w.-]*)(?:=(.*))?$", re.DOTALL)
_FLAG_IN_LINE = re.compile(r"--([A-Za-z][\w-]*)")
_WORD = re.compile(r"\"[^\"]*\"|'[^']*'|\S+")
_QUOTES = "\"'`"
_PLAIN_WORD = re.compile(r"[\w.,\[\]'+-]+")
_ARGUMENT = re.compile(r"(?:^|\s)(\w+) \.{3,} ?(.*)$")  # of Megatron's list of arguments
_ASSIGNED = re.compile(
    r"(?<![\w-])([a-z_0-9]+)\s*=\s*(\"[^\"]*\"|'[^']*'|\[[^\]]*\]|\([^)]*\)|\{[^}]*\}|[\w+-]+(?:\.\d+)?)"  # of Python
)
_COMMENT = re.compile(r"(?:^|\s)#.*$")
# Without quotes, other names have numbers and truth values only: `=1Mi` in a sentence is none.
_NAMES_WITH_WORDS = frozenset(
    (
        *("recompute_granularity", "recompute_method", "recompute_modules", "offload_modules", "transformer_impl"),
        *("attention_backend", "fp8", "fp8_format", "fp8_recipe", "cuda_graph_impl", "cuda_graph_scope", "fsdp"),
        *("cuda_graph_modules", "moe_token_dispatcher_type", "finetuning_type", "adapter", "distributed_type"),
    )
)
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


class SettingsInText:
    """Collects settings from the lines of a text: flags, Megatron's list of arguments, and assignments in Python.

    What comes together is one scope. A command that gives another value than before begins a new one, so that the runs of a
    sweep are not mixed.

    Example:
        >>> seen = SettingsInText()
        >>> seen.look("python pretrain_gpt.py --recompute-granularity full --num-layers 32", 1)
        >>> seen.look("python pretrain_gpt.py --recompute-granularity selective", 2)
        >>> [scope.values for scope in seen.settings("run.sh")]
        [{'recompute_granularity': 'full', 'num_layers': 32}, {'recompute_granularity': 'selective'}]
    """

    def __init__(self) -> None:
        self._scopes: list[dict[str, tuple[Any, int]]] = [{}]
        self._command: dict[str, tuple[Any, int]] = {}
        self._open: tuple[str, int, list[str]] | None = None  # a flag whose values may go on in the next line

    def look(self, line: str, number: int) -> None:
        """Take the settings of a line."""
        if self._open is not None or "--" in line:
            self._look_for_flags(line, number)
        elif " ..." in line:
            if (found := _ARGUMENT.search(line)) and found[1] in KNOWN:
                self._end({found[1]: (_value(found[2].strip()), number)})
        elif "=" in line:
            given = _ASSIGNED.findall(_COMMENT.sub("", line))
            known = {name: (_value(text), number) for name, text in given if name in KNOWN and _is_value(name, text)}
            self._end(known)

    def _look_for_flags(self, line: str, number: int) -> None:
        """Take the flags of a line of a command; one whose last word is a backslash goes on in the next line."""
        if self._open is None and not any(_name(found[1]) in KNOWN for found in _FLAG_IN_LINE.finditer(line)):
            return
        text = _COMMENT.sub("", line).rstrip()
        goes_on = text.endswith("\\") or (self._open is not None and not text)  # a comment between two lines
        for word in _WORD.findall(text.rstrip("\\")):
            flag = _FLAG.match(word.strip(_QUOTES))
            if flag is not None:
                self._close()
                self._open = _name(flag[1]), number, [] if flag[2] is None else [flag[2].strip(_QUOTES)]
            elif self._open is not None:
                self._open[2].append(word.strip(_QUOTES))
        if not goes_on:
            self._close()
            self._end(self._command)
            self._command = {}

    def _close(self) -> None:
        """Take the flag whose values have ended."""
        if self._open is not None:
            name, number, words = self._open
            if name in KNOWN and not any("$" in word for word in words):  # a variable of the shell
                self._command.setdefault(name, (_flag_value(name, words), number))
        self._open = None

    def _end(self, command: dict[str, tuple[Any, int]]) -> None:
        """Add what was given together to the scope, or to a new one if it contradicts it."""
        scope = self._scopes[-1]
        is_other = any(name in scope and scope[name][0] != value for name, (value, _) in command.items())
        if is_other and len(self._scopes) < _MOST_SCOPES:
            self._scopes.append(dict(command))
        elif not is_other:
            self._scopes[-1] = {**command, **scope}

    def settings(self, place: str) -> list[Settings]:
        """Return what was collected, a scope for each run that is told apart."""
        self._close()
        self._end(self._command)
        self._command = {}
        return [
            Settings(
                place,
                renamed({name: value for name, (value, _) in scope.items()}),
                {ALIASES.get(name, name): number for name, (_, number) in scope.items()},
            )
            for scope in self._scopes
            if scope
        ]


def _name(flag: str) -> str:
    return flag.replace("-", "_")


def _is_value(name: str, text: str) -> bool:
    return name in _NAMES_WITH_WORDS or not isinstance(_value(text), str) or text[:1] in ("'", '"')


def _flag_value(name: str, words: list[str]) -> Any:
    if not name.endswith(("_modules", "_scope")):
        return _value(words[0]) if words else True
    parts: list[str] = []
    for word in words:
        if not _PLAIN_WORD.fullmatch(word):  # what comes after the command: a pipe, or prose
            break
        parts += (part for part in word.strip("[]").replace("'", "").split(",") if part)
    return tuple(parts)


def _value(text: str) -> Any:
    """Return a literal of Python, or of YAML where they differ, or the text itself."""
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
