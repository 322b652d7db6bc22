"""What several processes run, in a group of one: over NCCL on a GPU, where tensors on the wrong device show with one rank."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from device_steps import RecordProperty

_ROOT = Path(__file__).parents[2]
_PROGRAM = _ROOT / "tests/support/one_rank.py"
CASES = ("DDP", "FSDP2", "tensor", "context", "experts", "parts", "attach DDP", "attach FSDP2", "checkpoint")


@pytest.fixture(scope="module")
def found(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one")
    paths = os.pathsep.join([str(_ROOT / "src"), str(_ROOT / "tests/support"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [sys.executable, "-W", "ignore", str(_PROGRAM), str(device), str(folder)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_a_group_of_one_process(case: str, found: dict[str, dict[str, Any]], record_property: RecordProperty) -> None:
    row = found[case]
    assert "error" not in row, row["error"]
    for name, value in row.items():
        record_property(name, value)
    assert row["equal"]
    assert row.get("planned", 1) == 1
