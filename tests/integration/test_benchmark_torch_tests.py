"""PyTorch's own tests run with our `checkpoint` in place, from files that people bring."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "torch_checkpoint_tests.py"
TESTS = """
import unittest
import torch
from torch.utils.checkpoint import checkpoint

class TestCheckpoint(unittest.TestCase):
    def runs(self):
        calls = []
        x = torch.ones(2, requires_grad=True)
        checkpoint(lambda x: (calls.append(1), x.sin().exp().sin())[1], x, use_reentrant=False).sum().backward()
        return len(calls)

    def test_checkpoint_trigger(self):
        self.assertEqual(self.runs(), 2)

    def test_checkpoint_of_another_name(self):
        self.assertEqual(self.runs(), 2)

    def test_checkpoint_runs(self):
        self.assertGreater(self.runs(), 0)

    def test_something_else(self):
        self.fail()
"""


def run(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_differences_are_listed_and_unexpected_ones_fail(tmp_path: Path) -> None:
    path = tmp_path / "test_theirs.py"
    path.write_text(TESTS, encoding="utf-8")
    done = run(path)
    assert done.returncode == 1, done.stderr
    assert "PyTorch's 3 passed; ours 2 failed, 1 passed" in done.stdout
    assert "test_checkpoint_trigger: counts the runs of the function" in done.stdout
    assert "test_checkpoint_of_another_name: AssertionError: 1 != 2" in done.stdout


def test_files_that_are_not_there_are_no_failure(tmp_path: Path) -> None:
    done = run(tmp_path / "test_autograd.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert "it is in PyTorch's repository, in the folder test. Nothing was run." in done.stdout
