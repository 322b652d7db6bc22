"""Read command lines of Megatron's `pretrain_gpt`, up to recollect's own flags.

Flags with the same meaning are names of one setting, in `recollect.lab.train`. This file handles the rest: flags without
effect, flags for missing features, and settings that exclude each other.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Final, Literal

from recollect.errors import ConfigError, NotYetError
from recollect.integrations.megatron.rule import read_table

Arity = Literal[0, 1, "any"]

NO_VALUE: Final = "(no value)"
"""The value that errors show for a flag without one."""

_RECOMPUTE = (
    *("--recompute-activations", "--recompute-granularity", "--recompute-method", "--recompute-num-layers"),
    *("--recompute-modules", "--moe-layer-recompute"),
)
# Pairs of settings for the same choice, by the flags of both programs, or of one.
_EITHER_OR = (
    ("--global-batch-size", "--accumulation"),
    ("--train-samples", "--steps"),
    ("--train-samples", "--train-iters"),
    ("--min-lr", "--min-lr-fraction"),
    ("--lr-warmup-fraction", "--warmup-steps"),
    ("--lr-warmup-fraction", "--lr-warmup-iters"),
    ("--bf16", "--precision"),
    ("--eval-iters", "--validation-batches"),
    ("--data-path", "--validation-fraction"),
    ("--data-path", "--text-field"),
    ("--train-data-path", "--split"),
    *(("--memory-budget", flag) for flag in _RECOMPUTE),
)


# Of the scripts for performance in Megatron-Bridge, and what they set.
_SHORT = {
    "-rl": ("--recompute-granularity=full", "--recompute-method=block", "--recompute-num-layers"),
    **dict.fromkeys(("-ol", "--activation-offload-layers"), ("--cpu-offloading-num-layers",)),
}
# Of runs in 16 bits, weights and activations have the same bytes.
_NARROW = dict.fromkeys(("--bf16", "--fp16"), ["--dtype", "bf16"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFlag:
    """A flag that is removed from the command line before recollect reads its own."""

    name: str
    """With dashes, or a pattern with `*`."""
    arity: Arity = 0
    allowed: tuple[str, ...] = ()
    """Values without effect here, if it `needs` something for others."""
    why: str = ""
    needs: str = ""
    """What recollect would need for other values; empty: every value is allowed."""
    advice: str = "Leave it out."
    same_plan: bool = False
    """Whether the plan of a step is the same with any value, whatever a run needs."""


def _read() -> Iterator[ForeignFlag]:
    for entry in read_table(__package__, "foreign_flags.yaml"):
        allowed = tuple(entry.pop("allowed", ()))
        for word in entry.pop("flags").split():
            name, takes, several = word.partition("=")
            arity: Arity = "any" if several else 1 if takes else 0
            yield ForeignFlag(name=name, arity=arity, allowed=allowed, **entry)


FOREIGN_FLAGS: dict[str, ForeignFlag] = {flag.name: flag for flag in _read()}
"""Flags without a setting in recollect, by name. docs/megatron_flags.md has the table; a test compares the two."""


def foreign_flag(name: str) -> ForeignFlag | None:
    """Return the flag with this name, or of whose pattern it is; None if recollect has a setting for it, or Megatron not."""
    if (exact := FOREIGN_FLAGS.get(name)) is not None:
        return exact
    return next((flag for flag in FOREIGN_FLAGS.values() if "*" in flag.name and fnmatch(name, flag.name)), None)


@dataclass(frozen=True, slots=True)
class Arguments:
    """A command line without foreign flags."""

    rest: list[str]
    """recollect's own flags."""
    without_effect: dict[str, str]
    """Removed flags that change nothing, with the reason."""


def read_arguments(
    args: Sequence[str], *, own: Collection[str] = (), beside: Collection[str] = (), plans: bool = False
) -> Arguments:
    """Remove the flags from a command line that recollect has no setting for, or raise.

    The command's `own` flags stay even if others refuse them; those of other commands, `beside`, go with their values.
    `plans`: whether a step is planned, and not run.
    """
    rest: list[str] = []
    without_effect: dict[str, str] = {}
    given: dict[str, list[str]] = {}
    values: dict[str, tuple[ForeignFlag, list[str]]] = {}
    for name, words in _flags(long_flags(args)):
        given[name] = words
        if plans and name in _NARROW and name not in own:
            rest += _NARROW[name]
            continue
        foreign = None if name in own else foreign_flag(name)
        if name in beside or (plans and foreign is not None and foreign.same_plan):
            without_effect[name] = "not part of what a plan is made for"
            continue
        if foreign is None:
            rest += _own(name, words)
            continue
        found, others = _values(foreign, words)
        values[name] = foreign, found
        without_effect[name] = foreign.why
        rest += others
    for name, (flag, found) in values.items():
        if flag.needs and not any(_is_same(found, one) for one in flag.allowed):
            raise NotYetError(settings={name: _text([name, *found])}, needs=flag.needs, advice=flag.advice)
    decided = given.keys() - without_effect.keys()
    for first, second in _EITHER_OR:
        if all(name in decided and _text(given[name]) != "None" for name in (first, second)):
            raise ConfigError(
                settings={name: _text(given[name]) for name in (first, second)},
                reason="both decide the same thing, expected one of them",
                advice="Leave one out.",
            )
    return Arguments(rest, without_effect)


def long_flags(args: Sequence[str]) -> list[str]:
    """Return a command line with the flags that Bridge's short ones stand for."""
    return [part for word in args for part in _SHORT.get(word.replace("_", "-"), (word,))]


def describes_model(args: Sequence[str]) -> bool:
    """Return whether a command line describes a model as for `pretrain_gpt`: by its dimensions, not by name."""
    given = {name for name, _ in _flags(args)}
    return {"--num-layers", "--hidden-size"} <= given and not given & {"--size", "--demo"}


def _flags(args: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag, with dashes, and the words up to the next flag, beginning with the flag as it was written.

    Words before the first flag have an empty name.
    """
    words: list[str] = []
    name = ""
    for word in args:
        if word.startswith("--"):
            if words:
                yield name, words
            name, words = word.partition("=")[0].replace("_", "-"), []
        words.append(word)
    if words:
        yield name, words


def _own(name: str, words: list[str]) -> list[str]:
    # A widespread guide gives the switch a value, `--recompute-activations selective`, which is what the switch means.
    if name == "--recompute-activations" and len(words) > 1:
        if words[1:] != ["selective"]:
            raise ConfigError(
                settings={name: _text(words)},
                reason="this flag has no value: it is short for --recompute-granularity selective",
                advice=f"Write --recompute-granularity {words[1]} instead.",
            )
        return [name]
    return words


def _values(flag: ForeignFlag, words: list[str]) -> tuple[list[str], list[str]]:
    """Split the words after a flag into its values and other words."""
    inline = words[0].partition("=")[2]
    values = [*([inline] if inline else []), *words[1:]]
    count = len(values) if flag.arity == "any" else flag.arity
    if len(values) < count:
        raise ConfigError(
            settings={flag.name: _text(words)}, reason="this flag needs a value", advice="Give it one or leave it out."
        )
    return values[:count], values[count:]


def _is_same(values: list[str], allowed: str) -> bool:
    if values == [allowed]:
        return True
    try:
        return len(values) == 1 and math.isclose(float(values[0]), float(allowed))
    except ValueError:
        return False


class _Words(str):
    """Words of a command line; errors print them without quotes."""

    __slots__ = ()

    __repr__ = str.__str__


def _text(words: list[str]) -> _Words:
    inline = words[0].partition("=")[2]
    return _Words(" ".join([*([inline] if inline else []), *words[1:]]) or NO_VALUE)
