"""Processes for tests that start with their imports done: they end as others do, and have imported what they should."""

from __future__ import annotations

from pathlib import Path

import pytest

from forked_processes import run_forked

pytestmark = pytest.mark.integration


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_script_runs_as_if_it_had_been_started(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'beside'", encoding="utf-8")
    program = script(
        tmp_path,
        "import os, sys, beside\n"
        "print(__name__, sys.argv[1:], os.getcwd(), os.environ['OWN'], beside.WORD)\n"
        "print('torch' in sys.modules, 'recollect.lab.train.loop' in sys.modules, file=sys.stderr)\n"
        "sys.exit(3)\n",
    )
    done = run_forked(program, 1, "two", cwd=tmp_path, OWN="set")
    assert done.stdout == f"__main__ ['1', 'two'] {tmp_path} set beside\n"
    assert (done.returncode, done.stderr) == (3, "True True\n")
