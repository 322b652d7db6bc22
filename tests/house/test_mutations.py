"""The faults of `scripts/mutate` can be put into this tree, and what runs the tests of a copy tells right from wrong."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from mutations.catalogue import MUTATIONS  # noqa: E402
from mutations.mutation import Mutation, place, problems, write  # noqa: E402
from mutations.random_faults import random_faults  # noqa: E402
from mutations.run import noticed_by, own_tests  # noqa: E402


def tree(tmp_path: Path) -> Path:
    package = tmp_path / "src" / "recollect" / "engine"
    package.mkdir(parents=True)
    (package / "tape.py").write_text("def f():\n    return 1\n", encoding="utf-8")
    (package / "values.py").write_text(
        "def g():\n    return 2  # twice\n\n\ndef h():  # twice\n    pass\n", encoding="utf-8"
    )
    return tmp_path


def test_every_fault_has_its_place() -> None:
    assert problems(MUTATIONS, ROOT) == [], "mend what moved: scripts/mutate --check"


def test_every_fault_has_a_quick_test_that_notices_it() -> None:
    named = noticed_by(ROOT)
    assert named.keys() == {mutation.name for mutation in MUTATIONS}
    for fault, test in named.items():
        path, _, function = test.partition("[")[0].partition("::")
        found = re.search(rf"((?:^@.*\n|^[ )].*\n)*)^def {function}\(", (ROOT / path).read_text(encoding="utf-8"), re.M)
        assert found, f"{fault}: there is no {test}"
        assert "mark.long\n" not in found[1], f"{fault}: {test} is a long one"


def test_faults_of_every_package() -> None:
    packages = {path.name for path in (ROOT / "src" / "recollect").iterdir() if (path / "__init__.py").exists()}
    assert packages <= {mutation.area for mutation in MUTATIONS}


def test_a_fault_is_in_one_file_of_its_package(tmp_path: Path) -> None:
    root = tree(tmp_path)
    (path,) = changed = place(Mutation("one", "", "engine", (("return 1", "return 3"),)), root)
    assert path.name == "tape.py"
    write(changed)
    assert path.read_text(encoding="utf-8") == "def f():\n    return 3\n"


def test_all_faults_without_a_place_are_told_at_once(tmp_path: Path) -> None:
    faults = (
        Mutation("good", "", "engine", (("return 1", "return 3"),)),
        Mutation("gone", "", "engine", (("return 4", "return 3"),)),
        Mutation("unclear", "", "engine", (("twice", "once"),)),
        Mutation("unclear", "", "planning", (("twice", "once"),)),
        Mutation("broken", "", "engine/tape.py", (("return 1", "return ("),)),
    )
    told = problems(faults, tree(tmp_path))
    assert told[:4] == [
        "unclear: the name is used 2 times",
        "gone: expected once in src/recollect/engine, found nowhere: 'return 4'",
        "unclear: expected once in src/recollect/engine, found 2 in values.py: 'twice'",
        "unclear: there is no src/recollect/planning",
    ]
    assert told[4].startswith("broken: its code does not compile") and len(told) == 5


@pytest.mark.parametrize(
    ("where", "tests"),
    [
        ("engine", ["tests/unit/engine"]),
        ("lab", ["tests/unit/lab"]),
        ("replay.py", ["tests/unit/test_replay.py"]),
        ("byte_format.py", []),
    ],
)
def test_own_tests_are_those_of_the_package(where: str, tests: list[str]) -> None:
    assert own_tests(Mutation("one", "", where, ()), ROOT) == tests


def test_random_faults_change_what_runs_at_one_place(tmp_path: Path) -> None:
    text = """from __future__ import annotations

def f(one: int | None = None, *, number: int = 2) -> int | str:
    if one is None:
        raise ValueError(f"{number + 1} of {one}")
    g(number)
    return one + number if one > 7 else False
"""
    source = tmp_path / "src" / "recollect" / "engine" / "tape.py"
    source.parent.mkdir(parents=True)
    source.write_text(text, encoding="utf-8")
    found = random_faults(tmp_path, ["engine"], 100, seed=0)
    assert {(fault.line, fault.after) for fault in found} >= {(4, "if one is not None:"), (6, "pass")}
    assert {fault.line for fault in found} == {3, 4, 6, 7}
    assert all(": int | None" in fault.text and "-> int | str" in fault.text for fault in found)
    for fault in found:
        lines = zip(text.split("\n"), fault.text.split("\n"), strict=True)
        assert sum(before != after for before, after in lines) == 1
    assert found == random_faults(tmp_path, ["engine"], 100, seed=0)
