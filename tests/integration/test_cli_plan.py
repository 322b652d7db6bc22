"""`recollect plan` and `recollect frontier`: what they print and write."""

import json
import pickle
from pathlib import Path

import pytest

import recollect
from recollect.byte_format import format_bytes
from recollect.cli import main
from recollect.cli.commands import ModelStep
from recollect.lab.train.config import TrainConfig
from recollect.lab.train.model_flags import ModelFlags

STEP = ["--size", "tiny", "--num-layers", "4", "--batch-size", "4", "--seq-length", "128", "--device", "cpu"]


@pytest.mark.parametrize("more", [[], ["--fake"], ["--fake", "--hardware", "L40S"], ["--dtype", "bf16"]])
def test_plan_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", *STEP, *more, "--memory-budget", "70%", "--out", str(out)]) == 0
    plan = recollect.Plan.load(out)
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    output = capsys.readouterr().out
    assert str(plan) in output
    assert "without recompute" in output
    assert f"Written to {out}." in output


@pytest.mark.parametrize(
    ("tool", "written"),
    [
        ("megatron", "--recompute-granularity "),
        ("bridge", "cfg.model.recompute_granularity = '"),
        ("torchtitan", "activation-checkpoint:"),
    ],
)
def test_nearest_settings_of_another_tool_are_printed(
    tool: str, written: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "plan.json")
    assert main(["plan", *STEP, "--fake", "--memory-budget", "85%", "--write", tool, "--out", out]) == 0
    plan, other, lost, settings, *_ = capsys.readouterr().out.split("\nthe plan ")[1].splitlines()
    assert "peak" in plan and "peak" in other and lost.startswith("lost: ") and settings.startswith(written)


def test_default_batch_is_that_of_train_for_the_default_model_only() -> None:
    assert ModelStep().num_sequences == TrainConfig().optim.batch_size == 8
    assert (
        ModelStep(model=ModelFlags(size="8b")).num_sequences
        == ModelStep(hf_config=Path("config.json")).num_sequences
        == 1
    )
    assert ModelStep(batch_size=3).num_sequences == 3


def test_hugging_face_config_is_planned(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128, "num_attention_heads": 4}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "mistral", "num_key_value_heads": 2, "vocab_size": 100, **sizes}))
    out = tmp_path / "plan.json"
    args = ["plan", "--hf-config", str(config), "--batch-size", "4", "--seq-length", "64", "--memory-budget", "80%"]
    assert main([*args, "--device", "cpu", "--out", str(out)]) == 0
    assert "model.layers.0" in recollect.Plan.load(out).units


def test_frontier_is_a_table_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("plotly")
    png, html = tmp_path / "frontier.png", tmp_path / "frontier.html"
    assert main(["frontier", *STEP, "--png", str(png), "--html", str(html)]) == 0
    output = capsys.readouterr().out
    for name in ("keep all", "full", "sqrt", "every 2", "no plan below", f"Drawn to {png}.", f"written to {html}."):
        assert name in output
    assert png.read_bytes().startswith(b"\x89PNG")
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_timeline_is_printed_and_written_for_other_viewers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, trace, snapshot = (tmp_path / name for name in ("plan.json", "step.json", "step.pickle"))
    assert main(["plan", *STEP, "--fake", "--memory-budget", "80%", "--out", str(plan)]) == 0
    peak = f"{format_bytes(recollect.Plan.load(plan).predicted_peak_bytes or 0)} alive at the peak"
    capsys.readouterr()
    files = ["--trace", str(trace), "--snapshot", str(snapshot)]
    assert main(["timeline", *STEP, "--fake", "--plan", str(plan), *files]) == 0
    output = capsys.readouterr().out
    assert f"Trace written to {trace}: open it on ui.perfetto.dev." in output
    assert f"Snapshot written to {snapshot}: open it on pytorch.org/memory_viz." in output
    assert peak in output and "recomputed values" in trace.read_text()
    assert pickle.loads(snapshot.read_bytes())["device_traces"][0]
    # The same plan by its budget; and none.
    assert main(["timeline", *STEP, "--fake", "--memory-budget", "80%"]) == 0
    assert peak in capsys.readouterr().out
    assert main(["timeline", *STEP, "--fake"]) == 0
    assert peak not in capsys.readouterr().out
