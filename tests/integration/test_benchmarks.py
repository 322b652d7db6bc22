"""The benchmarks run: on sizes so small that their times mean nothing, but all else has to be right."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from forked_processes import run_forked

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.integration

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
        ("predicted_step_time", "measured_step_time", "predicted_slowdown", "measured_slowdown"),
        "in the median",
    ),
    "claims": ("--parts modelled --models 'Llama 7B at 2048, fused'", ("saved",), ""),
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


@pytest.mark.filterwarnings("ignore")
def test_a_peer_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from comparison import Comparison
    from peers import Peer
    from subject import Step, StepFlags
    from tables import peak_numbers, report

    def out_of_memory(step: Step) -> None:
        raise MemoryError("no room")

    flags = StepFlags(hidden_size=32, num_layers=2, vocab_size=64, seq_length=16, threads=1)
    found = Comparison(flags, "dense", lambda text: None)
    found.prepare(peers=[Peer("broken", "", out_of_memory)], num_budgets=1)
    assert [number.value for number in peak_numbers(found) if number.metric == "failed"] == ["MemoryError: no room"]
    assert "| broken | MemoryError: no room |" in report(found)
    assert "below the least possible peak" in report(found)


def test_a_race_that_is_interrupted_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from contest import Contestant, Race
    from recompute import Nothing
    from subject import Step, StepFlags

    class Interrupted(Nothing):
        def on(self) -> Any:
            raise KeyboardInterrupt

    step = Step(StepFlags(hidden_size=32, num_layers=2, vocab_size=64, seq_length=16, threads=1))
    race = Race(step, lambda text: None)
    quick, late = Contestant(name="quick", recompute=Nothing()), Contestant(name="late", recompute=Interrupted())
    race.run([[quick]], seconds=0, least_rounds=2)
    race.run([[late]], seconds=0, least_rounds=2)
    race.run([[quick]], seconds=0, least_rounds=2)
    assert race.is_interrupted
    assert len(quick.ratios) == 2
    assert not late.ratios


def test_discarded_output_is_empty_until_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from discarded import Discarded

    x = torch.arange(1.0, 5.0, requires_grad=True)
    run = Discarded(torch.square, x * 1)
    y = run.output.square()  # reads its input again in backward
    run.discard(y)
    assert run.output.untyped_storage().nbytes() == 0
    taken = [torch.zeros(4) for _ in range(8)]  # what was freed is somebody else's now
    y.sum().backward()
    assert torch.equal(x.grad, 4 * x.detach() ** 3)
    assert not any(tensor.any() for tensor in taken)


def test_every_tool_of_the_table_has_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import tool_loops
    import tools

    assert set(tools.NAMES) == set(tool_loops.TOOLS)
    row = {
        "tool": "a",
        "version": "1",
        "plain_bytes": 3 * 2**20,
        "own_bytes": 2**20,
        "ours_bytes": 2**20,
        "steps_over": 0,
    }
    row |= {"own_slowdown": 0.3, "ours_slowdown": 0.1, "ours_to_own": 0.85, "weights_equal": 1}
    row |= {"ours_to_own_least": 0.85, "ours_to_own_most": 0.85}
    assert tools._line(row) == "| a | 1 | 3.0 MiB | 1.0 MiB | +30.0% | 1.0 MiB | +10.0% | -15.0% | 0 | equal |"
    assert "| -15.0% (-20.0% to -15.0%) |" in tools._line({**row, "ours_to_own_least": 0.8})


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


def test_the_last_rows_of_a_configuration_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from results_csv import COLUMNS, Number, read_last

    path = tmp_path / "some.csv"
    kept = [(1, "peak", 10), (2, "slowdown", 0.5), (3, "peak", 11), (4, "slowdown", 0.6), (5, "peak", 12)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for day, metric, value in kept:
            config = json.dumps({"seed": day == 4})
            writer.writerow((metric, "1", "full", value, config, "a machine", "2.13", f"2026-01-0{day}", "abc"))
    assert read_last(path, {"seed": False}, "peak") == ([Number("peak", "1", "full", "12")], ("a machine", "2.13"))
    assert read_last(path, {"seed": False}, "slowdown")[0] == [Number("slowdown", "1", "full", "0.5")]
    assert read_last(path, {"seed": False}, "rounds") == ([], None)
