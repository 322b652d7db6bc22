"""`recollect plan --largest`: the tables it prints at 80 columns, the plan it writes, and its errors."""

import json
from pathlib import Path

import pytest

import recollect
from recollect.cli import main

LLAMA = ["plan", "--size", "llama-tiny", "--num-layers", "2"]
WORDS = (
    "peak",
    "slowdown",
    "tokens/s",
    "without recompute",
    "full recompute",
    "with a plan",
    "most tokens/s",
    "tokens",
)


def rows(output: str) -> dict[str, list[str]]:
    """The cells of the tables by the first one."""
    cells = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if line.startswith("│")
    ]
    return {first: rest for first, *rest in cells}


@pytest.mark.parametrize(
    ("along", "other"),
    [("micro-batch", "--seq-length"), pytest.param("seq-length", "--batch-size", marks=pytest.mark.long)],
)
def test_tables_and_plan(along: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    args = [*LLAMA, other, "256" if along == "micro-batch" else "3", "--memory-budget", "10MiB", "--out", str(out)]
    assert main([*args, "--largest", along, "--hardware", "L40S"]) == 0
    output = capsys.readouterr().out
    assert f"Largest {along} within 10.0 MiB" in output
    assert "times modelled for NVIDIA L40S" in output
    assert all(word in output for word in WORDS)
    assert "…" not in output
    tables = output[: output.index("Forward and backward")]
    assert max(len(line) for line in tables.splitlines()) <= 80
    found = rows(tables)
    answers = [found[name][0] for name in ("without recompute", "full recompute", "with a plan")]
    largest = int(answers[-1])
    assert int(answers[0]) < largest
    tokens = 256 if along == "micro-batch" else 3
    assert found[answers[-1]][0] == f"{largest * tokens:,}"
    step = 1 if along == "micro-batch" else 64
    assert found[str(largest + step)][3:] == ["no plan", "-"]
    assert f"Written to {out}, for {along} {largest}." in output
    plan = recollect.Plan.load(out)
    assert plan.predicted_peak_bytes <= 10 * 2**20


def test_no_more_tokens_than_learned_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", "--size", "gpt-tiny", "--memory-budget", "1GiB", "--largest", "seq-length", "--multiple-of", "128"]
    assert main([*args, "--out", str(tmp_path / "plan.json")]) == 0
    assert rows(capsys.readouterr().out)["with a plan"][0] == "at least 256"


def test_no_more_tokens_than_positions_of_a_hugging_face_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 96, "vocab_size": 100}
    config.write_text(json.dumps({"model_type": "gpt2", **sizes}))
    args = ["plan", "--hf-config", str(config), "--memory-budget", "1GiB", "--largest", "seq-length"]
    assert main([*args, "--out", str(tmp_path / "plan.json"), "--multiple-of", "32"]) == 0
    assert rows(capsys.readouterr().out)["with a plan"][0] == "at least 96"


def test_a_model_of_megatrons_flags_gets_positions_for_every_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["plan", "--num-layers", "2", "--hidden-size", "64", "--memory-budget", "1GiB", "--largest", "seq-length"]
    assert main([*args, "--max-size", "512", "--multiple-of", "256", "--out", str(tmp_path / "plan.json")]) == 0
    assert rows(capsys.readouterr().out)["with a plan"][0] == "at least 512"
