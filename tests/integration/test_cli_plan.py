"""`recollect plan` and `recollect frontier`: what they print and write, for one device, for many, for the largest batch."""

import json
import pickle
import re
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


def test_a_plan_that_no_setting_of_another_tool_comes_near_is_written(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", *STEP, "--fake", "--memory-budget", "43%", "--write", "megatron", "--out", str(out)]) == 2
    assert recollect.Plan.load(out).budget_bytes


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


@pytest.mark.parametrize(
    ("model", "most"),
    [
        ("--size gpt-tiny --multiple-of 128", 256),
        ("--hf-config {config} --multiple-of 32", 96),
        ("--num-layers 2 --hidden-size 64 --max-size 512 --multiple-of 256", 512),
    ],
)
def test_no_more_tokens_than_positions(
    model: str, most: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model of Megatron's flags there are some for every length."""
    config = tmp_path / "config.json"
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 96, "vocab_size": 100}
    config.write_text(json.dumps({"model_type": "gpt2", **sizes}))
    line = f"plan {model} --memory-budget 1GiB --largest seq-length --out {tmp_path}/plan.json"
    assert main(line.format(config=config).split()) == 0
    assert rows(capsys.readouterr().out)["with a plan"][0] == f"at least {most}"


CLUSTER_STEP = ["--size", "llama-tiny", "--seq-length", "256", "--dtype", "bf16", "--hardware", "H100"]
PLAN = ["plan", *CLUSTER_STEP, "--fake"]
TENSOR = ["--tensor-model-parallel-size", "2"]


def test_memory_and_time_by_rank_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    more = ["--sequence-parallel", "--data-parallel-size", "2", "--use-torch-fsdp2", "--adapters-per-node", "4"]
    more += ["--out", str(out)]
    assert main([*PLAN, *TENSOR, *more, "--memory-budget", "80%"]) == 0
    output = capsys.readouterr().out
    assert "4 x NVIDIA H100 SXM: peak " in output
    said = "assumed: 8 devices a node; NVLink 4 within, InfiniBand NDR between: 370 and 20 GB/s a device."
    assert said in " ".join(output.split())
    plan = recollect.Plan.load(out)
    assert str(plan) in output


def test_each_stage_has_a_plan_and_all_of_them_the_nearest_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    more = ["--pipeline-model-parallel-size", "2", "--write", "megatron", "--out", str(out)]
    assert main([*PLAN, *more, "--memory-budget", "85%"]) == 0
    plans = [recollect.Plan.load(out.with_suffix(f".{stage}.json")) for stage in range(2)]
    assert all(path.startswith("decoder.") for plan in plans for path in plan.units)
    output = capsys.readouterr().out
    assert re.search(r"nearest of Megatron, in all stages alike: peak .*iB, step \+.*%, \d+ ms longer\n", output)
    assert "--recompute-granularity" in output
    assert "its fused kernels keep less" in output and "it gathers beside products" not in output


def test_megatron_is_assumed_to_gather_beside_products(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--sequence-parallel", "--write", "megatron", "--out", str(tmp_path / "plan.json")]
    assert main([*PLAN, *TENSOR, *more, "--memory-budget", "85%"]) == 0
    said = "assumed of Megatron: What it gathers again in backward, it gathers beside products."
    assert said in capsys.readouterr().out.splitlines()


@pytest.mark.long
def test_layers_are_divided_with_the_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--pipeline-model-parallel-size", "2", "--write", "megatron", "--out", str(tmp_path / "plan.json")]
    assert main([*PLAN, *more, "--pipeline-split", "auto", "--memory-budget", "90%"]) == 0
    output = capsys.readouterr().out
    sizes = output.partition("layers by stage: ")[2].partition(" (as many in each")[0].split(", ")
    assert len(sizes) == 2 and sum(map(int, sizes)) == 4
    flags = output.partition("its split of the layers:\n")[2].splitlines()[0]
    even = "no flags: as many layers in each stage"
    uneven = f"--decoder-first-pipeline-num-layers {sizes[0]} --decoder-last-pipeline-num-layers {sizes[1]}"
    assert flags == (even if sizes[0] == sizes[1] else uneven)
