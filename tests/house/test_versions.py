"""The versions that are tested are the same wherever they are named."""

import re
import sys
from pathlib import Path

from recollect._torch_private import NEWEST_TESTED, OLDEST_TESTED

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from pages.versions import ROWS, table  # noqa: E402


def versions_of_torch() -> list[str]:
    return [row.name.removeprefix("torch ") for row in ROWS if row.is_whole]


def test_the_table_has_the_oldest_and_the_newest_torch() -> None:
    assert versions_of_torch()[0] == OLDEST_TESTED and versions_of_torch()[-1] == NEWEST_TESTED


def test_the_readme_and_the_requirements_name_them() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"torch {', '.join(versions_of_torch()[:-1])} and {NEWEST_TESTED}" in readme
    requirements = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={OLDEST_TESTED.rpartition(".")[0]}"' in requirements
    assert f"# torch: tested with {', '.join(versions_of_torch())}" in requirements


def test_ci_runs_the_newest() -> None:
    newest = ROOT / "tests" / "requirements-newest.txt"
    assert f"torch=={NEWEST_TESTED}" in newest.read_text(encoding="utf-8").splitlines()
    assert newest.name in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_no_row_failed() -> None:
    assert set(re.findall(r"\| [\d,]+ \| ([\d,]+) \| [\d,]+ \|$", table(), re.MULTILINE)) == {"0"}
