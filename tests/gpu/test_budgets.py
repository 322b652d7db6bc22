"""A budget holds in a user's own training loop, by the counters of the device's allocator."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from device_steps import RecordProperty
from training_peaks import Trial, train_under_budget

ROOT = Path(__file__).parents[2]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "default": torch.optim.AdamW,  # for all parameters at once (`foreach`) on CUDA
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "sgd": torch.optim.SGD,
}


def _check(trial: Trial, record_property: RecordProperty) -> None:
    for name, nbytes in asdict(trial).items():
        record_property(name, nbytes)
    holds = {
        "the prediction is within the budget": trial.predicted_bytes <= trial.budget_bytes,
        "what was asked for is within the prediction": trial.requested_bytes
        <= trial.predicted_bytes + trial.held_bytes,
        "what was allocated is within the budget": trial.allocated_bytes <= trial.budget_bytes + trial.held_bytes,
    }
    assert all(holds.values()), f"{holds}, {trial}"


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_in_this_process(
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    fraction: float,
    device: torch.device,
    record_property: RecordProperty,
) -> None:
    if device.type == "cpu" and (fraction != 0.3 or make_optimizer is not torch.optim.AdamW):
        pytest.skip("once is enough to try the test; tests/integration/test_prediction.py has more")
    _check(train_under_budget(device, fraction, make_optimizer, holds_output=False), record_property)


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_of_a_loop_that_holds_the_output(
    fraction: float, device: torch.device, record_property: RecordProperty
) -> None:
    """`out = model(**batch); out.loss.backward()` keeps the logits and the cache, and the budget counts them."""
    if device.type == "cpu" and fraction == 0.0:
        pytest.skip("once is enough to try the test")
    trial = train_under_budget(device, fraction, OPTIMIZERS["sgd"], holds_output=True)
    _check(trial, record_property)


def _run(device: torch.device, **environment: str) -> Trial:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    program = ROOT / "tests" / "support" / "training_peaks.py"
    done = subprocess.run(
        [sys.executable, str(program), device.type, "0.3"],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Trial(**json.loads(done.stdout.splitlines()[-1]))


def test_in_a_process_of_its_own(cuda: torch.device, record_property: RecordProperty) -> None:
    """Where the libraries' workspaces are made while the step is recorded, and count."""
    _check(_run(cuda), record_property)


def test_with_expandable_segments(cuda: torch.device, record_property: RecordProperty) -> None:
    """No block is larger than what was asked for, rounded up to 512 bytes."""
    setting = "expandable_segments:True"
    trial = _run(cuda, PYTORCH_ALLOC_CONF=setting, PYTORCH_CUDA_ALLOC_CONF=setting)
    _check(trial, record_property)
