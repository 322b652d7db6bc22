"""What an index shows of the package is true of this tree."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import recollect

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_version_is_the_first_of_the_changelog() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r'^version = "(.*)"', PROJECT, re.MULTILINE) == versions[:1] == [recollect.__version__]


def test_pythons_begin_with_the_least_one_that_installs() -> None:
    (least,) = re.findall(r'^requires-python = ">=(.*)"', PROJECT, re.MULTILINE)
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert named[0] == least and named == sorted(named, key=lambda one: int(one[2:]))


@pytest.mark.long
def test_the_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    """Built without the network; what it depends on is found where it is installed here."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")

    def output(*command: object) -> str:
        found = {} if command[0] == sys.executable else {"PYTHONPATH": ""}
        environment = {**os.environ, **found}
        done = subprocess.run(
            [*map(str, command)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    output(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("recollect-*.whl")
    venv.create(tmp_path / "environment")
    python = tmp_path / "environment" / "bin" / "python"
    output(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    (packages,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(str(Path(pytest.__file__).parents[1]))

    assert output(python, "-c", "import recollect; print(recollect.__file__)").startswith(str(packages))
    command = python.with_name("recollect")
    assert output(command, "--version").split()[-1] == recollect.__version__
    # Files that are no Python: the devices, the rules, and the page with its style and script.
    output(command, "plan", "--fake", "--hardware", "H100", "--size", "tiny", "--memory-budget", "80%")
    output(command, "frontier", "--fake", "--size", "tiny", "--html", "page.html")
    log = ROOT / "tests" / "unit" / "doctor" / "texts" / "host-out-of-memory.txt"
    assert "The host's memory is full" in output(command, "doctor", log)
