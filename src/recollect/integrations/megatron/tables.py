"""The tables of docs/megatron.md, from the rules themselves: `python -m recollect.integrations.megatron.tables` prints them."""

from __future__ import annotations

from recollect.integrations.megatron.rules import NOT_YET, RULES
from recollect.integrations.megatron.settings import MEGATRON_OUTPUT


def _table(*rows: tuple[str, ...]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + "\n"


def rules_table() -> str:
    """Return a row for each rule: its name, what breaks it, Megatron's answer, ours, and why.

    Returns:
        Markdown.

    Example:
        >>> rules_table().splitlines()[0]
        '| rule | settings | Megatron | here | why |'
    """
    rows = [(f"`{rule.name}`", rule.words, rule.megatron, rule.ours, rule.why or rule.reason) for rule in RULES]
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
