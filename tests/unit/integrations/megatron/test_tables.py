"""The tables of docs/megatron.md are those of the code. `python -m pages.megatron` prints them."""

import sys
from pathlib import Path

import pytest

from recollect.integrations.megatron import module_values

ROOT = Path(__file__).parents[4]
sys.path.append(str(ROOT))

from pages.megatron import not_yet_table, rules_table  # noqa: E402

PAGE = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("table", [rules_table(), not_yet_table()], ids=["rules", "not yet"])
def test_the_page_has_the_table(table: str) -> None:
    assert table in PAGE


def test_the_page_says_which_paths_each_part_has() -> None:
    rows = [line.partition(" | ")[2] for line in (module_values.__doc__ or "").splitlines() if line.startswith("| ")]
    assert len(rows) == 14
    assert all(row in PAGE for row in rows)
