"""The tables of docs/megatron.md, from the rules themselves: `python -m pages.megatron` prints them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from recollect.integrations.megatron.rule import Rule
from recollect.integrations.megatron.rules import NOT_YET, RULES
from recollect.integrations.megatron.settings import MEGATRON_OUTPUT


def _table(*rows: tuple[str, ...]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + "\n"


def _words(rule: Rule) -> str:
    """Return the settings that break a rule, in words: those that are there with each other, without those that are not."""
    if rule.when:
        return rule.when
    said = [_condition(given, rule.known).format(name) for name, given in rule.breaks.items()]
    there = [words for words in said if not words.startswith("without ")]
    return " ".join([" with ".join(there), *(words for words in said if words not in there)])


def _condition(given: Any, known: Iterable[object]) -> str:
    """Return a condition in words, with `{}` for the setting's name."""
    if isinstance(given, list):
        return _either(given)
    if isinstance(given, dict):
        return f"without {_either((None, *known) if given['not'] == 'known' else given['not'])}"
    if given in (True, "set"):
        return "`{}`"
    if given in (False, "unset"):
        return "without `{}`"
    return f"`{{}}` {given.removeprefix('at most ')}"


def _either(values: Iterable[object]) -> str:
    return " or ".join(f"`{value}`" for value in values)


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
