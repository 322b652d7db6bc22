"""The examples run as they are, and keep to their budgets."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from forked_processes import run_forked
from tiers import long_but

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS: dict[str, tuple[str, ...]] = {
    "deepspeed_loop": ("deepspeed", "transformers"),
    "accelerate_loop": ("accelerate", "transformers"),
    "diffusers_loop": ("accelerate", "diffusers"),
    "hugging_face_loop": ("transformers",),
    "hugging_face_trainer": ("accelerate", "peft", "transformers"),
    "lightning_trainer": ("lightning", "transformers"),
    "torch_checkpoint": (),
    "torchtitan_policy": ("torchtitan", "triton"),
}
PLANNED = "planned for 4 x 128 in"
ACCUMULATED = "planned for 2 calls of 4 x 128 in"
REPORTED = " budget, 8 steps, 1 of them recorded"
SAYS = {
    "deepspeed_loop": (ACCUMULATED, REPORTED),
    "accelerate_loop": ("planned for 4 x 64 in", REPORTED),
    "diffusers_loop": ("planned for 4 x 4 x 32 x 32 in", REPORTED),
    "hugging_face_loop": (PLANNED, REPORTED),
    "hugging_face_trainer": (ACCUMULATED, REPORTED),
    "lightning_trainer": (ACCUMULATED, REPORTED),
    "torch_checkpoint": ("layers, but products saved", "the same as a plan, predicted"),
    "torchtitan_policy": ("predicted peak", "no plan can be below"),
}
# As users start it: the only one that imports little.
STARTED = "torch_checkpoint"
# What the others show, quick tests of their libraries do, too.
QUICK = (STARTED, "torchtitan_policy")


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NEEDS)


@pytest.mark.parametrize("name", long_but(QUICK, NEEDS))
def test_example(name: str, tmp_path: Path) -> None:
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    path = EXAMPLES / f"{name}.py"
    if name == STARTED:
        done = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, check=False)
    else:
        done = run_forked(path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in SAYS[name]:
        assert text in done.stdout + done.stderr
