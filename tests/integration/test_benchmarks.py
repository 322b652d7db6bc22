"""The benchmarks run: on sizes so small that their times mean nothing, but all else has to be right."""

import csv
import json
import shlex
from pathlib import Path

import pytest

from forked_processes import run_forked

pytest.importorskip("matplotlib")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *flags: str) -> str:
    done = run_forked(BENCHMARKS / script, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    columns = ["metric", "unit", "contestant", "value", "config", "machine", "torch", "date", "commit"]
    assert list(found[0]) == columns
    assert all(row[column] for row in found for column in columns)
    return found


def values(found: list[dict[str, str]], metric: str) -> dict[str, float]:
    return {
        row["contestant"]: float(row["value"]) for row in found if row["metric"] == metric and row["unit"] != "text"
    }


TINY = "--hidden-size 32 --num-layers 2 --seq-length 32 --vocab-size 64"
REAL = "--num-layers 2 --real-hidden-size 32 --real-num-layers 2 --real-seq-length 16"
# Flags of sizes at which nothing takes long, what has numbers in the file of results, and what is printed.
PROGRAMS = {
    "overhead": (
        f"{REAL} --engine-minutes 0 --tiny-minutes 0 --real-minutes 0 --least-rounds 2 --threads 1",
        (
            "engine_step_slowdown",
            "engine_layer_slowdown",
            "engine_peak",
            "tiny_added_time",
            "tiny_added_time_ratio_to_sac",
            "real_slowdown_fp32",
            "real_slowdown_bf16",
        ),
        "of the added time",
    ),
    "frontier": (
        "--quick --models dense",
        ("peak", "budget", "recollect_peak_at_equal_peak", "gradients_equal"),
        "| budget | recollect |",
    ),
    # Inductor compiles C++ for a minute; who partitions and what is kept does not hang on it.
    "compiled": (
        "--quick --only 'blocks, full' --backend aot_eager",
        ("compile_time", "gradients_largest_difference", "peak"),
        "| compiled blocks, full |",
    ),
    "cost_model": (
        f"{TINY} --calibration-s 0 --recordings 1 --budgets 0.5",
        ("step_ratio", "op_error_median", "op_error_90", "slowdown_50", "promised_slowdown_50", "regret_50"),
        "regret",
    ),
    "planner": (
        "--profiles 'Mixtral, 4 layers' --parts 0.5 --large tiny --large-num-budgets 2",
        ("gap_worst", "plan_worst", "plan_all_budgets", "record"),
        "tiny: recorded on fake tensors in",
    ),
    "step_times": (
        f"{TINY} --threads 1 --least-rounds 1 --models gpt2",
        ("predicted_slowdown", "measured_slowdown"),
        "in the median",
    ),
    "claims": ("--parts modelled --models 'Llama 7B at 2048, fused'", ("saved",), ""),
    "training_losses": (
        "--models deepseek-v3-tiny --num-steps 3",
        ("equal_losses", "equal_weights"),
        "| deepseek-v3-tiny | budget | 3 of 3 | equal |",
    ),
    "loss_chunks": (
        "--vocab-sizes 2048 --hidden-size 32 --seq-length 64 --threads 1 --minutes 0 --least-rounds 1",
        ("peak", "gradients_off_by", "time_over_one_piece", "loss_logits_time"),
        "gradients off by",
    ),
}


@pytest.mark.long
def test_covered_layers() -> None:
    pytest.importorskip("deepspeed")
    assert run("covered_layers.py").count("| equal |") == 15


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    flags, metrics, said = PROGRAMS[name]
    output = run(f"{name}.py", *shlex.split(flags), "--out", str(tmp_path))
    found = rows(tmp_path / f"{name}.csv")
    assert [metric for metric in metrics if not values(found, metric)] == []
    assert said in output and "OVER BUDGET" not in output


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["dense", "moe", "mla"])
def test_peers_compute_the_same_gradients(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from megatron_peers import megatron_peers
    from peers import layer_peers
    from subject import Step, StepFlags, largest_difference

    step = Step(StepFlags(hidden_size=32, num_layers=4, vocab_size=64, seq_length=16, threads=1), model)
    expected, plain_bytes = step.gradients(), step.peak_bytes()
    peers = [*layer_peers(step), *megatron_peers(step)]
    for peer in peers:
        if model == "moe" and peer.name == "torchtitan SAC":
            continue  # Mixtral's router writes into what its topk returned, which this list saves
        with peer.recompute(step).on():
            # Sums of three gradients in another order: a few roundings of fp32 (1.2e-7 each).
            assert largest_difference(expected, step.gradients()) < 5e-6, peer.name
            # Nothing is freed by a region of all layers, nor by attention that recomputes itself anyway.
            is_idle = peer.name in ("uniform 4", "Megatron core_attn")
            assert step.peak_bytes() < (1.03 if is_idle else 1) * plain_bytes, peer.name
    assert largest_difference(expected, step.gradients()) == 0
    assert step.peak_bytes() == plain_bytes


def test_results_are_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import results_csv

    path = tmp_path / "results" / "some.csv"
    numbers = [results_csv.Number("peak", "bytes", "full", 12)]
    for seed in (1, 2):
        results_csv.append(path, numbers, {"device": "cpu", "seed": seed})
    found = rows(path)
    assert values(found, "peak") == {"full": 12.0}
    assert [json.loads(row["config"])["seed"] for row in found] == [1, 2]
    path.write_text("metric,value\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"some.csv: got the columns \('metric', 'value'\), expected"):
        results_csv.append(path, numbers, {"device": "cpu"})
