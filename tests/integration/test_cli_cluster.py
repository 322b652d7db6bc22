"""`recollect plan` for many devices, none of which is here."""

import re
from pathlib import Path

import pytest

import recollect
from recollect.cli import main

STEP = ["--size", "llama-tiny", "--seq-length", "256", "--dtype", "bf16", "--hardware", "H100"]
PLAN = ["plan", *STEP, "--fake"]
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
