"""`scripts/test` leaves out nothing but what is marked long, `--all` not even that; no test asks how busy the machine is."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The script in a folder where Python writes its arguments."""
    for name in ("scripts", "tests", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "scripts/test", tmp_path / "scripts/test")
    shutil.copy(ROOT / "tests/core.txt", tmp_path / "tests/core.txt")
    for path, text in (("scripts/setup", ""), (".venv/bin/python", 'printf "%s\\n" "$@"\n')):
        (tmp_path / path).write_text(f"#!/usr/bin/env bash\n{text}", encoding="utf-8")
        (tmp_path / path).chmod(0o755)
    return tmp_path


def arguments(tree: Path, *given: str) -> list[str]:
    # Without the environment of a row of versions, in which this test itself may run.
    own = {name: value for name, value in os.environ.items() if not name.startswith("RECOLLECT_")}
    done = subprocess.run([tree / "scripts/test", *given], capture_output=True, text=True, check=True, env=own)
    return done.stdout.splitlines()


def folders(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("tests/")}


def test_both_tiers_run_every_file_of_tests(tree: Path) -> None:
    of_tier = [folders(arguments(tree, *given)) for given in ((), ("--all",))]
    assert of_tier[0] == of_tier[1]
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert any(path.is_relative_to(ROOT / folder) for folder in of_tier[0]), path


def test_only_what_is_marked_long_is_left_out(tree: Path) -> None:
    quick, whole = arguments(tree, "-x"), arguments(tree, "--all", "-x")
    assert quick[quick.index("-m", 2) + 1] == "not long"
    assert [word for word in quick if word not in whole] == ["not long"]
    assert not {"-k", "--deselect", "--ignore"} & {word.partition("=")[0] for word in quick}


def test_of_paths_that_are_given_all_tests_run(tree: Path) -> None:
    (tree / "tests/unit").mkdir()
    assert arguments(tree, "tests/unit", "-x") == ["-m", "pytest", "tests/unit", "-x"]


def test_the_core_is_there(tree: Path) -> None:
    core = (ROOT / "tests/core.txt").read_text(encoding="utf-8").split()
    assert folders(arguments(tree, "--core")) == {*core}
    assert all((ROOT / name).exists() for name in core)


def test_no_test_reads_a_clock() -> None:
    clock = re.compile(r"\b(perf_counter|monotonic|process_time|thread_time|time\.time)\(\)")
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if clock.search(path.read_text(encoding="utf-8"))]
    # It waits for threads that end by themselves.
    assert [path.name for path in paths] == ["test_offload_faults.py"]
