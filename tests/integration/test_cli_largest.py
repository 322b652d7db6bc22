"""`recollect plan --largest`: the tables it prints at 80 columns, the plan it writes, and its errors."""

import json
from pathlib import Path

import pytest

import recollect
from recollect.cli import main

LLAMA = ["plan", "--size", "llama-tiny"]
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
    args = [*LLAMA, other, "256" if along == "micro-batch" else "3", "--memory-budget", "14MiB", "--out", str(out)]
    assert main([*args, "--largest", along, "--hardware", "L40S"]) == 0
    output = capsys.readouterr().out
    assert f"Largest {along} within 14.0 MiB" in output
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
    assert plan.predicted_peak_bytes <= 14 * 2**20


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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--memory-budget", "1KiB"], "No smaller micro-batch than 1 is allowed. What lives through the whole step"),
        (["--memory-budget", "60%"], "'60%': a percentage of the peak without recompute, which differs"),
        (["--memory-budget", "1GiB", "--out", "{folder}/none/p.json"], "--out {folder}/none/p.json: cannot be written"),
        (["--memory-budget", "1GiB", "--max-size", "0"], "--max-size 0: not a whole number, 1 or more"),
        (
            ["--memory-budget", "1GiB", "--multiple-of", "8", "--max-size", "4"],
            "--multiple-of 8, --max-size 4: no size is a multiple within the limit",
        ),
    ],
)
def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    given = [arg.format(folder=tmp_path) for arg in args]
    out = [] if "--out" in args else ["--out", str(tmp_path / "plan.json")]
    assert main([*LLAMA, "--largest", "micro-batch", *given, *out]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ")
    assert message.format(folder=tmp_path) in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-size", "8"], "max-size: got 8 without --largest, expected both or neither."),
        (["--multiple-of", "8"], "multiple-of: got 8 without --largest, expected both or neither."),
        (["--largest", "micro-batch", "--png", "a.png"], "png: got a.png with --largest, expected none: draw the size"),
        (["--largest", "micro-batch", "--html", "a.html"], "html: got a.html with --largest, expected none"),
        (
            ["--largest", "micro-batch", "--write", "megatron"],
            "write: got megatron with --largest, expected none: plan",
        ),
        (
            ["--largest", "micro-batch", "--loss-chunks", "auto"],
            "loss-chunks: got auto with --largest, expected a number.",
        ),
    ],
)
def test_flags_that_clash(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    assert main([*LLAMA, "--memory-budget", "1GiB", *args]) == 2
    assert f"Error: --{message}" in capsys.readouterr().err
