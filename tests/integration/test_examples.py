"""The README, the page for newcomers and the examples: what they quote is printed, and they keep to their budgets."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import guide_pages
from forked_processes import run_forked
from guide_pages import DOCS
from tiers import long_but

EXAMPLES = Path(__file__).parents[2] / "examples"
PLANNED = "planned for 4 x 128 in"
ACCUMULATED = "planned for 2 calls of 4 x 128 in"
REPORTED = " budget, 8 steps, 1 of them recorded"
# What each needs, and what it says.
SAYS: dict[str, tuple[str, tuple[str, str]]] = {
    "deepspeed_loop": ("deepspeed transformers", (ACCUMULATED, REPORTED)),
    "accelerate_loop": ("accelerate transformers", ("planned for 4 x 64 in", REPORTED)),
    "diffusers_loop": ("accelerate diffusers", ("planned for 4 x 4 x 32 x 32 in", REPORTED)),
    "hugging_face_loop": ("transformers", (PLANNED, REPORTED)),
    "hugging_face_trainer": ("accelerate peft transformers", (ACCUMULATED, REPORTED)),
    "lightning_trainer": ("lightning transformers", (ACCUMULATED, REPORTED)),
    "torch_checkpoint": ("", ("layers, but products saved", "the same as a plan, predicted")),
    "torchtitan_policy": ("torchtitan triton", ("predicted peak", "no plan can be below")),
}
# As users start it: the only one that imports little.
STARTED = "torch_checkpoint"
# What the others show, quick tests of their libraries do, too.
QUICK = (STARTED, "torchtitan_policy")


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", long_but(QUICK, SAYS))
def test_example(name: str, tmp_path: Path) -> None:
    needs, says = SAYS[name]
    for package in needs.split():
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    path = EXAMPLES / f"{name}.py"
    if name == STARTED:
        done = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, check=False)
    else:
        done = run_forked(path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in says:
        assert text in done.stdout + done.stderr


PAGES = ("../README.md", "get_started.md")
# What differs from run to run, as it rests on measured times; peaks, counts and shapes are the same wherever it runs.
TIMED = re.compile(
    r"-?\+?\d+(\.\d+)? ?%( \([\d.]+ to [\d.]+[^)%]*\))?|in \d rounds(: times too noisy to judge it by)?|planned .*|"
    r"(predicted )?peak \S+ MiB, step \+|predicted \S+ MiB, (measured|within) .*|peak with plan.*"
)


def quoted(page: str, beginning: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return [line.strip() for line in text.splitlines() if line.strip().startswith(beginning)]


@pytest.mark.parametrize("page", [PAGES[0], pytest.param(PAGES[1], marks=pytest.mark.long)])
def test_what_is_quoted_is_what_is_printed(page: str) -> None:
    done = run_forked(Path(guide_pages.__file__), page)
    printed = done.stdout + done.stderr
    assert "Traceback" not in printed, printed
    lines = {TIMED.sub("", line) for line in printed.splitlines()}
    for beginning in ("recollect: 1", "gradients  ", "peak without ", "peak with plan ", "slowdown  "):
        found = quoted(page, beginning)
        assert found and {TIMED.sub("", line) for line in found} <= lines, (beginning, printed)
