"""`TextRule`: a problem that one line of a log or traceback gives away."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from recollect.doctor.finding import Rule
from recollect.doctor.passage import Passage

__all__ = ["TextRule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRule(Rule):
    """A rule that looks for a text.

    Attributes:
        pattern: regular expression of the line; its groups fill the {names} of the rule's texts.
        near: regular expression that must be found in the lines around it, too; "" is none.
    """

    pattern: str
    near: str = ""

    def is_in(self, line: str) -> bool:
        """Return whether the pattern is found in a line."""
        return _compiled(self.pattern).search(line) is not None

    def match(self, passage: Passage) -> dict[str, Any] | None:
        """Return the groups of the pattern if the passage fits, else None."""
        found = _compiled(self.pattern).search(passage.line)
        if found is None or (self.near and not _compiled(self.near).search(passage.text)):
            return None
        return found.groupdict()


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE)
