"""`recollect explain`: its numbers are those of the plans, and what is measured; configurations as files."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import recollect
from recollect.cli import main
from recollect.cli.explain import show
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.planning.explain import explain_plan

SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "core_attention": "unfused",
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
STEP = ["--batch-size", "2", "--seq-length", "64", "--device", "cpu"]


def yaml_file(folder: Path, **sections: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(json.dumps(sections))  # JSON is YAML
    return path


def explained(path: Path, *flags: str) -> dict[str, Any]:
    out = path.parent / "explanation.json"
    assert main(["explain", *STEP, "--yaml", str(path), "--json", str(out), *flags]) == 0
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    "words",
    [FULL, {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"]}],
    ids=["full", "selective"],
)
def test_numbers_are_those_of_the_plan_and_of_the_measured_step(words: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = GPTModel(TransformerConfig(**SIZES)).train()
    tokens = torch.randint(128, (2, 64))
    batch = {"tokens": tokens, "labels": tokens}
    profile = recollect.record(model, batch)
    plan = recollect.megatron_plan(profile, recollect.RecomputeConfig(**words))
    explanation = explain_plan(profile, plan)
    given, budget = explanation.given, explanation.budget
    assert given.simulation.peak_bytes == plan.predicted_peak_bytes
    assert given.slowdown == plan.predicted_slowdown
    assert budget.simulation.peak_bytes <= given.simulation.peak_bytes
    assert budget.slowdown <= given.slowdown
    assert explanation.bound_slowdown <= budget.slowdown + 1e-9
    for part in (explanation.plain, given, budget):
        each = [(group.num_layers, group) for group in part.groups]
        assert sum(n * group.layer.kept_bytes for n, group in each) + part.outside_bytes == part.simulation.kept_bytes
        assert sum(n * group.layer.recomputed_ops for n, group in each) == part.simulation.recomputed_ops
        assert sum(n * group.layer.recompute_s for n, group in each) == pytest.approx(
            part.simulation.recompute_s, rel=1e-9, abs=1e-12
        )
        assert sum(n for n, _ in each) == len(profile.calls)
    # What is said is what happens, to the few KiB that `record` adds on purpose.
    report = recollect.verify(model, batch, plan, time=False)
    assert report.gradients_equal
    assert 0 <= given.simulation.peak_bytes - report.plan_peak_bytes < 4096
    assert 0 <= explanation.plain.simulation.peak_bytes - report.plain_peak_bytes < 4096


@pytest.mark.filterwarnings("default:.*not read")
def test_a_file_of_bridge_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = {
        "_target_": "megatron.bridge.models.GPTModelProvider",
        "activation_func": "torch.nn.functional.gelu",
        "fp8": None,
    }
    path = yaml_file(
        tmp_path,
        model={**SIZES, **FULL, **target},
        train={"micro_batch_size": 3, "global_batch_size": 64},
        dataset={"sequence_length": 32},
        optimizer={"lr": 0.001},
    )
    out = tmp_path / "explanation.json"
    assert main(["explain", "--yaml", str(path), "--fake", "--hardware", "H100", "--names", "--json", str(out)]) == 0
    output, said = capsys.readouterr()
    assert f"--yaml {path}: not read, as these are not flags of Megatron: lr, global_batch_size." in said
    assert "tokens int64[3, 32]" in output
    assert "modelled for NVIDIA H100" in output
    assert "a budget of the same peak" in output
    assert "no plan can be below" in output
    assert "self_attention.core_attention" in output
    found = json.loads(out.read_text())
    assert found["configuration"] == FULL
    layers = {" ".join(group["paths"]): group for group in found["given"]["layers"]}
    assert layers["decoder.layers.0-3"]["num_layers"] == 4
    assert found["given"]["slowdown"] > found["budget"]["slowdown"]
    assert found["plain"]["recomputed_ops"] == 0


def test_flags_replace_what_the_file_says(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, **SIZES, **FULL, seq_length=32, bf16=True)
    assert explained(path, "--fake")["given"]["note"] == "Megatron: full, uniform, 1"
    found = explained(path, "--fake", "--recompute-num-layers", "2", "--num-layers", "6")
    assert found["given"]["note"] == "Megatron: full, uniform, 2"
    assert sum(group["num_layers"] for group in found["given"]["layers"] if "layers" in group["paths"][0]) == 6


def test_a_file_without_dimensions_changes_a_named_model(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, model={"num_layers": 3, **FULL, "recompute_num_layers": 2})
    layers = {
        " ".join(group["paths"]): group for group in explained(path, "--fake", "--size", "gpt-tiny")["given"]["layers"]
    }
    assert [name for name in layers if "layers" in name] == ["decoder.layers.0", "decoder.layers.1-2"]


def test_a_pipeline_of_the_file_cuts_the_layers(tmp_path: Path) -> None:
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    path = yaml_file(tmp_path, **SIZES, **block, pipeline_model_parallel_size=2)
    layers = {" ".join(group["paths"]): group for group in explained(path, "--fake")["given"]["layers"]}
    recomputed = [name for name, group in layers.items() if group["recomputed_ops"]]
    assert recomputed == ["decoder.layers.0 decoder.layers.2"]


def test_tables_of_80_columns_cut_no_word() -> None:
    model = GPTModel(TransformerConfig(**SIZES, position_embedding_type="rope"))
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    profile = recollect.record(model, {"tokens": tokens, "labels": tokens}, fake=True)
    console = Console(width=80, force_terminal=True, file=io.StringIO(), color_system=None)
    show(explain_plan(profile, recollect.classic_plan(profile, "full")), profile, console, with_names=False)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in output
    assert all(path in output for path in ("decoder.layers.0-3 ", "decoder.final_layernorm ", "rotary_pos_emb "))
    assert max(map(len, output.splitlines())) <= 80
    assert re.search("keeps +values +recomputes +time", output), "no column is left out"


def test_without_a_configuration_it_says_what_to_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--hf-config", "none.json"]) == 2
    error = capsys.readouterr().err
    assert "got no configuration to explain, expected Megatron's flags" in error
    assert "--recompute-activations" in error and "--yaml FILE" in error and "recollect plan --memory-budget" in error


@pytest.mark.parametrize(
    ("flags", "words"), [([], "has gradients all the time"), (["--new-gradients"], "from backward to")]
)
def test_it_says_why_its_peaks_are_not_those_of_plan(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *STEP, "--fake", "--recompute-activations", *flags]) == 0
    output = capsys.readouterr().out
    assert re.search(r"\n\nMegatron: .*, per layer", output), "tables are set apart from what is above"
    assert words in output and "can differ from recollect plan's, whose loop holds both" in output


@pytest.mark.long
def test_a_plan_with_host_memory_is_beside_what_megatron_offloads(tmp_path: Path) -> None:
    """At no higher peak, with no more host memory, over the link that is there."""
    modules = {"offload_modules": ["core_attn", "mlp_norm"], "min_offloaded_tensor_size": 1000}
    path = yaml_file(tmp_path, **SIZES, fine_grained_activation_offloading=True, **modules)
    for flags in (["--fake", "--hardware", "H100"], []):
        found = explained(path, *flags)
        given, budget = found["given"], found["budget"]
        # What runs again in no time may be the better choice.
        assert budget["host_bytes"] <= given["host_bytes"] > 0 and budget["peak_bytes"] <= given["peak_bytes"]
        # The search may run one small op again, a launch of 5 us, where Megatron's choice needs none.
        launch = 6e-6 / found["step_s"]
        assert found["bound_slowdown"] <= budget["slowdown"] <= given["slowdown"] + launch
