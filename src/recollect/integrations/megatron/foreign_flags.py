"""Flags of Megatron's `pretrain_gpt` without a setting in recollect: why they have no effect, or what they would need.

Imports no torch. `docs/megatron_flags.md` has the table; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import yaml

Arity = Literal[0, 1, "any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFlag:
    """A flag that is removed from the command line before recollect reads its own.

    Attributes:
        name: with dashes.
        arity: number of values that follow it.
        allowed: values without effect here, if it `needs` something for others.
        why: why it has no effect.
        needs: what recollect would need for other values; empty: every value is allowed.
        advice: what to do meanwhile.
    """

    name: str
    arity: Arity = 0
    allowed: tuple[str, ...] = ()
    why: str = ""
    needs: str = ""
    advice: str = "Leave it out."


def _read() -> Iterator[ForeignFlag]:
    text = (resources.files(__package__) / "foreign_flags.yaml").read_text(encoding="utf-8")
    for entry in yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        allowed = tuple(entry.pop("allowed", ()))
        for word in entry.pop("flags").split():
            name, takes, several = word.partition("=")
            arity: Arity = "any" if several else 1 if takes else 0
            yield ForeignFlag(name=name, arity=arity, allowed=allowed, **entry)


FOREIGN_FLAGS: dict[str, ForeignFlag] = {flag.name: flag for flag in _read()}
