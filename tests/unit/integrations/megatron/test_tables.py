"""The tables of docs/megatron.md are those of the code. `python -m pages.megatron` prints them."""

import sys
from pathlib import Path

import pytest

from recollect.integrations.megatron.settings import MODULES, OFFLOAD_MODULES

ROOT = Path(__file__).parents[4]
sys.path.append(str(ROOT))

from pages.megatron import not_yet_table, rules_table  # noqa: E402

PAGE = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("table", [rules_table(), not_yet_table()], ids=["rules", "not yet"])
def test_the_page_has_the_table(table: str) -> None:
    assert table in PAGE


def test_the_page_says_which_paths_each_part_has() -> None:
    rows = {line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `")}
    found_nowhere = {name for name in MODULES if name.startswith(("gdn", "gdp"))} | {"mhc"}
    assert {*MODULES, *OFFLOAD_MODULES} - found_nowhere - {"gdp_qkv"} <= rows
