"""The tables of docs/doctor.md, from the rules themselves: `python -m pages.doctor` prints them."""

from __future__ import annotations

from recollect.doctor.rule import TOPICS

__all__ = ["rules_table"]


def rules_table() -> str:
    """Return a table for each topic, with a row for each rule.

    Returns:
        Markdown.

    Example:
        >>> rules_table().splitlines()[0]
        '### Out of memory'
    """
    parts = []
    for topic, rules in TOPICS.items():
        lines = [f"### {topic}", "", "| rule | goes by | first thing to do | known from |", "|---|---|---|---|"]
        for rule in rules:
            fix = rule.fix[0].replace("{{", "{").replace("}}", "}").replace("|", "\\|")
            lines.append(f"| `{rule.name}` | {rule.sees.replace('|', chr(92) + '|')} | {fix} | {rule.source} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(rules_table())
