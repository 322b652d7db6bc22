"""The tables of foreign flags in docs/megatron_flags.md: `PYTHONPATH=src:tests/support python -m flag_table` prints them."""

from itertools import groupby

from recollect.integrations.megatron.arguments import FOREIGN_FLAGS, ForeignFlag


def foreign_table() -> str:
    rows = ["| flag | here |", "|---|---|"]
    flags = sorted(FOREIGN_FLAGS.values(), key=_meaning)
    for (_, meaning), group in groupby(flags, key=_meaning):
        names = ", ".join(f"`{flag.name}{_values(flag)}`" for flag in group)
        rows.append(f"| {names} | {meaning} |")
    return "\n".join(rows)


def _meaning(flag: ForeignFlag) -> tuple[int, str]:
    if not flag.needs:
        return 0, f"nothing to do: {flag.why}"
    if flag.allowed:
        return 1, f"nothing to do: {flag.why}; other values not yet: {flag.needs}. {flag.advice}"
    return 2, f"not yet: {flag.needs}. {flag.advice}"


def _values(flag: ForeignFlag) -> str:
    return f" {' or '.join(flag.allowed)}" if flag.allowed else ""


if __name__ == "__main__":
    print(foreign_table())
