"""The tables of docs/megatron.md, from the rules themselves: `python -m pages.megatron` prints them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from recollect.integrations.megatron.rule import Rule
from recollect.integrations.megatron.rules import NOT_YET, RULES
from recollect.integrations.megatron.settings import MEGATRON_OUTPUT


def _table(*rows: tuple[str, ...]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + "\n"


# How values are shown of which settings; of those of the others, the name stands before them.
_VALUES = {
    **dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_modules", "modules"), "{}"),
    **dict.fromkeys(("offload_modules", "offloaded"), "offload of {}"),
    **dict.fromkeys(("cuda_graph_modules", "captured"), "a graph of {}"),
}


def _words(rule: Rule) -> str:
    """Return the settings that break a rule, in words: those that are there with each other, without those that are not."""
    if rule.when:
        return rule.when
    said = [_condition(name, given) for name, given in rule.breaks.items()]
    first, *others = [words for words in said if not words.startswith("without ")]
    there = f"{first} with {_listed(others, 'and')}" if others else first
    return " ".join([there, *(words for words in said if words.startswith("without "))])


def _condition(name: str, given: Any) -> str:
    if isinstance(given, list):
        return _VALUES.get(name, f"`{name}` {{}}").format(_either(given))
    if isinstance(given, dict):
        is_known = given["not"] == "known"
        article = "an" if name[0] in "aeiou" else "a"
        return f"an unknown name in `{name}`" if is_known else f"{article} `{name}` other than {_either(given['not'])}"
    if given in (True, "set"):
        return f"`{name}`"
    if given in (False, "unset"):
        return f"without `{name}`"
    return f"`{name}` {given.removeprefix('at most ')}"


def _either(values: Iterable[object]) -> str:
    return _listed([f"`{value}`" for value in values], "or")


def _listed(words: Sequence[str], conjunction: str) -> str:
    *first, last = words
    return f"{', '.join(first)} {conjunction} {last}" if first else last


def rules_table() -> str:
    """Return a row for each rule: its name, what breaks it, Megatron's answer, ours, and why.

    Returns:
        Markdown.

    Example:
        >>> rules_table().splitlines()[0]
        '| rule | settings | Megatron | here | why |'
    """
    rows = [(f"`{rule.name}`", _words(rule), rule.megatron, rule.ours, rule.why or rule.reason) for rule in RULES]
    return _table(("rule", "settings", "Megatron", "here", "why"), *rows)


def not_yet_table() -> str:
    """Return a row for each thing that a setting may ask for and that is not built.

    Returns:
        Markdown.

    Example:
        >>> not_yet_table().splitlines()[0]
        '| setting | what it needs | meanwhile |'
    """
    unbuilt = [name for name in MEGATRON_OUTPUT if name.startswith(("gdn", "gdp")) or name == "mhc"]
    rows = [(" ".join(f"`{name}`" for name in missing.settings), missing.reason, missing.advice) for missing in NOT_YET]
    rows.append((f"`recompute_modules`: {', '.join(unbuilt)}", "models that have these parts", "Leave it out."))
    rows.append(("`offload_modules`: gdp_qkv", "models that have this part", "Leave it out."))
    return _table(("setting", "what it needs", "meanwhile"), *rows)


if __name__ == "__main__":
    print(rules_table(), not_yet_table(), sep="\n")
