"""`recollect train` in several processes that torchrun starts: in each layout the same run, in each process the same errors."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from asked_cases import AskedCases, Row, asked_cases
from rank_processes import start_ranks, start_torchrun
from recollect.lab.parallel.layout import DeviceLayout
from recollect.lab.train.checkpoint import find_damage, list_checkpoints
from recollect.lab.train.config import TrainConfig
from recollect.lab.train.processes import ONE_PROCESS, Processes
from tiers import long_but
from training_ranks import LAYOUTS, MODELS, ON_TWO, model_of, settings, trained
from training_runs import wait_for_steps, write_text

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs PyTorch with the gloo backend")

# Each dimension of a layout once, in pairs, with what other tests go on from; the others are parts of these, and other pairs.
QUICK = ("DP2", "PP2 tied", "PP2 fp8", "TP2 SP DP2 FSDP2", "PP2 interleaved CP2 tied", "PP2 EP2 ZeRO experts")
every_layout = pytest.mark.parametrize("name", long_but(QUICK, LAYOUTS))


def asked(num_processes: int, folder: Path) -> AbstractContextManager[AskedCases]:
    """Ask for cases of `training_ranks.py` in one launch."""
    write_text(folder)
    return asked_cases(start_ranks(num_processes, ROOT / "tests/support/training_ranks.py", folder, has_input=True))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AskedCases]:
    with asked(2, tmp_path_factory.mktemp("two")) as found:
        yield found


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AskedCases]:
    with asked(4, tmp_path_factory.mktemp("four")) as found:
        yield found


@pytest.fixture
def rows(name: str, request: pytest.FixtureRequest) -> list[Row]:
    cases: AskedCases = request.getfixturevalue("two" if name in ON_TWO else "four")
    return cases[name]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one")
    write_text(folder)
    return cache(lambda name: trained(settings(folder, name, **MODELS[name])))


@every_layout
def test_a_layout_trains_as_one_process(name: str, rows: list[Row], alone: Callable[[str], dict[str, Any]]) -> None:
    """Losses are sums in another order: each of them is rounded in its last bit or two (1.2e-7), and steps add to it.

    Cast to 8 bits, a number that differs in its last bit may become the next one, a sixteenth away; and a pipeline divides
    gradients by the number of micro-batches only after it has cast them, at first with a scale of 1: norms differ by 1.1e-3.
    """
    expected = alone(model_of(name))
    tolerance = 2e-3 if "fp8" in name else 2e-6
    for row in rows:
        for number in ("loss", "grad_norm", "validation_loss"):
            assert row["plain"][number] == pytest.approx(expected[number], rel=tolerance), number


@every_layout
def test_a_plan_changes_no_bit(name: str, rows: list[Row]) -> None:
    plans = {row["planned"]["plan"] for row in rows}
    assert len(plans) == 1 and plans != {""}
    for row in rows:
        for number in ("loss", "grad_norm", "validation_loss"):
            assert row["planned"][number] == row["plain"][number] == rows[0]["plain"][number]


@every_layout
def test_the_peak_is_as_predicted(name: str, rows: list[Row]) -> None:
    """Up to a few buffers on their way, which gloo's threads hold for a moment longer.

    One is the residual stream of a micro-batch (16 KiB), or a gathered layer of FSDP2 (193 KiB). Where ranks share experts, how
    many rows come follows the routes, which move: all rows of a micro-batch make 64 KiB in a product. What the loops of a
    pipeline hold of what they sent is predicted; where ranks of a stage exchange sums or rows, gloo holds these as elsewhere.
    """
    if name in ("PP2 tied", "PP2 interleaved tied"):
        assert rows[0]["planned"]["excess"] <= 0
        return
    buffer_bytes = 193 * 1024 if "FSDP2" in name or "ZeRO" in name else 64 * 1024 if "experts" in name else 16 * 1024
    assert rows[0]["planned"]["excess"] < 8 * buffer_bytes


def test_megatrons_settings_are_the_plan_of_all(two: AskedCases) -> None:
    for row in two["Megatron"]:
        assert row["plan"] and row["plan"] == two["Megatron"][0]["plan"]
        assert row["loss"] == two["DP2"][0]["plain"]["loss"]


@pytest.mark.long
def test_parts_of_values_in_stages_change_no_bit(four: AskedCases) -> None:
    first = four["held parts of stages"][0]
    for row in four["held parts of stages"]:
        for case in ("full", "planned"):
            for number in ("loss", "grad_norm"):
                assert row[case][number] == first["plain"][number]
            assert row[case]["plan"] == first[case]["plan"]
            assert row[case]["excess"] < 8 * 16 * 1024
    # What comes from the stage before is no value of a unit. The last output is read by what recomputes nothing.
    with_parts = {path for path, number in first["full"]["parts"].items() if number}
    assert with_parts == {"0.embedding", "0.decoder.layers.0", "1.decoder.layers.0"}
    assert sum(first["planned"]["parts"].values())


@pytest.mark.long
def test_what_a_stage_receives_is_alike_on_ranks_that_share_matrices_unless_they_split_sequences(
    four: AskedCases,
) -> None:
    """With sequence parallelism only what is gathered is alike."""
    values = four["held parts of stages"][3]["values"]
    assert {name.split(":")[-1] for name in values["1.decoder.layers.0"]} == {
        "all_gather_into_tensor",
        "self_attention.cat",
        "mlp.cat",
    }


def test_megatrons_settings_count_in_each_stage_and_tell_micro_batches_apart(two: AskedCases) -> None:
    """The first rank runs two forwards before a backward: one recomputes a layer, the other all. The last rank runs one."""
    for row in two["Megatron pipeline"]:
        assert row["loss"] == two["PP2 tied"][0]["plain"]["loss"]
        first, last = row["plan"].split(" / ")
        assert first[:2] == first[2:] and first[0] != first[1]
        assert last == last[0] * 4


def test_chunks_of_the_loss_are_chosen_with_the_plans_of_stages_and_used_again(two: AskedCases) -> None:
    """Without chunks no plan fits: the logits are most of what the last rank holds."""
    for row in two["chunks of stages"]:
        chunks = row["chunks"]
        assert chunks == two["chunks of stages"][0]["chunks"] > 1
        assert f", loss in {chunks} chunks\n" in row["table"] and row["is_same"]
        for number in ("loss", "grad_norm"):
            assert row["begun"][number] + row["resumed"][number] == row["plain"][number]
        assert max(row["begun"]["excess"], row["resumed"]["excess"]) < 8 * 16 * 1024


def test_each_rank_of_data_parallelism_has_one_micro_batch_unless_told(two: AskedCases) -> None:
    assert [row["accumulation"] for row in two["default batch"]] == [2, 2]


ERRORS = {
    "world size": r"ConfigError: got world_size=2, tensor_model_parallel_size=4: one model takes 4 processes\. Start",
    "micro-batches": r"ConfigError: got global_batch_size=6, .*3 micro-batches are not a multiple of 2.* multiple of 4 seq",
    "stages": r"ConfigError: got global_batch_size=6, .*: each pipeline has 3 micro-batches a step, and needs a multiple of 2 "
    r"for several stages a rank\. Choose a multiple of 4 sequences a step",
    "few": r"ConfigError: got global_batch_size=2, micro_batch_size=2, pipeline_model_parallel_size=2: each pipeline has 1 "
    r"micro-batches a step, and needs at least 2\. Choose at least 4 sequences",
    "sharded stages": r"NotYetError: got use_torch_fsdp2=True, pipeline_model_parallel_size=2: not yet: weights that the "
    r"stages of a pipeline gather for each micro-batch\. Use use_distributed_optimizer instead: gradients stay whole",
    "small stages": r"BudgetTooSmallError: .*rank 0 \(stages 0; .* Use more ranks, smaller micro-batches",
    "device": r"ConfigError: got device='cuda:1': each process has its own device\. Write cuda or cpu",
    "resume": r"CheckpointError: run folder .*: got --resume but it holds no run, expected the --run-dir of an earlier",
    "delayed scales": r"NotYetError: got fp8_recipe='delayed': not yet: histories common to the ranks that share "
    r"weights; each would have its own\. Choose a different fp8_recipe, or only pipeline parallelism",
    "parts": r"ConfigError: got distribute_saved_activations=True, tensor_model_parallel_size=1: there are no ranks to",
    "parts of parts": r"ConfigError: got distribute_saved_activations=True, sequence_parallel=True: sequence parallelism has",
    "too small": r"BudgetTooSmallError: .* is below the least possible peak",
    "two budgets": r"ConfigError: got memory_budget in rank 0='80%', memory_budget in rank 1='90%': two values .* Start all",
    "no budget": r"QuantityError: 'much': does not begin with a number",
    "no data": r"DataError: data notes/: no such folder",
    "devices": r"HardwareError: --device cuda: got 1000 processes on a machine with \d+ CUDA devices, expected one device",
    "plans of fewer stages": r"PlanError: the plans in .*: got those of 1 stages, of which each has \[1\], expected one, or "
    r"one for each of 4 micro-batches, for each of 2 stages\. Remove pipeline_plans\.json and baseline\.json there",
    "plans of fewer micro-batches": r"PlanError: the plans in .*: got those of 2 stages, of which each has \[1, 3\], expected",
    "plan of another layer": r"UnknownNameError: LossStage has no unit 'decoder\.layers\.7'\. Did you mean",
}


@pytest.mark.parametrize("name", ERRORS)
def test_all_processes_fail_alike(name: str, two: AskedCases) -> None:
    if name.startswith("plan"):
        # They change what this one has written.
        assert two["PP2 tied"]
    first, second = two[name]
    assert re.search(ERRORS[name], first["error"]), first["error"]
    assert first["error"] == second["error"]


def workers(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """Return the process ids that torchrun started, by rank."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    found = {}
    for child in map(int, children):
        for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                found[int(entry.removeprefix(b"RANK="))] = child
    return found


def command_line(folder: Path, *more: object) -> tuple[object, ...]:
    write_text(folder)
    sizes = ("--size", "tiny", "--seq-length", 32, "--batch-size", 2, "--steps", 100_000, "--device", "cpu")
    run = ("--data", folder / "text.txt", "--run-dir", folder / "run", "--log-interval", 1)
    return ("-m", "recollect", "train", *sizes, *run, "--checkpoint-every", 0, *more)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str, int]:
    """A run in which the second process got a SIGTERM: its folder, output, errors and exit status."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "more").mkdir()
    (folder / "more" / "picture.png").write_bytes(b"\x89PNG\x00")
    layout = ("--tensor-model-parallel-size", 2, "--sequence-parallel", "--memory-budget", "95%", "--tensorboard")
    warned_of = ("--overlap-grad-reduce", "--data", folder / "text.txt", folder / "more")
    started = start_ranks(2, *command_line(folder, *layout, *warned_of)[1:])
    try:
        wait_for_steps(started[0], folder / "run", 3)
        started[1].send_signal(signal.SIGTERM)
        outputs, errors = zip(*(process.communicate() for process in started), strict=True)
    finally:
        for process in started:
            process.kill()
    return folder / "run", "".join(outputs), "".join(errors), max(process.returncode or 0 for process in started)


def test_one_process_that_is_to_stop_stops_all_after_the_same_step(stopped: tuple[Path, str, str, int]) -> None:
    run, output, errors, status = stopped
    assert status == 0, errors
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert output.count(f"Stopped after step {last}") == 1
    assert output.count(f"step {last}/100000") == 1 and f"step {last + 1}/" not in output
    (written,) = list_checkpoints(run / "checkpoints")
    assert written.name == f"step_{last:08d}" and find_damage(written) is None


def test_the_first_process_writes_the_run_folder(stopped: tuple[Path, str, str, int]) -> None:
    run, output, _, _ = stopped
    names = {path.name for path in run.iterdir()}
    assert {"config.json", "metrics.jsonl", "plan.json", "baseline.json", "tensorboard"} <= names
    assert json.loads((run / "config.json").read_text())["parallel"]["tensor_model_parallel_size"] == 2
    assert output.count("Processes: 2, tensor 2, sequence parallel.") == 1
    assert len(list((run / "tensorboard").iterdir())) == 1


def test_what_all_processes_warn_of_is_said_once(stopped: tuple[Path, str, str, int]) -> None:
    errors = stopped[2]
    assert errors.count("Warning: without effect here: --overlap-grad-reduce") == 1
    assert errors.count("Warning: training data") == 1


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes in /proc")
def test_when_a_process_is_killed_the_others_say_which(tmp_path: Path) -> None:
    # Those of a pipeline wait for messages of one another, not for a collective.
    pipeline = ("--pipeline-model-parallel-size", 2, "--recompute-activations")
    alike = ("--num-microbatches-with-partial-activation-checkpoints", 1)
    with start_torchrun(2, *command_line(tmp_path, *pipeline, *alike)) as process:
        try:
            wait_for_steps(process, tmp_path / "run", 3)
            os.kill(workers(process)[1], signal.SIGKILL)
            _, errors = process.communicate(timeout=600)
        finally:
            process.kill()
    assert process.returncode != 0
    said = " ".join(errors.split())
    assert said.count("all micro-batches recompute the same") == 1
    assert "Error: rank 1 of 2 has ended without a word, so none continues: it was killed, or crashed. Look" in said


def test_what_takes_more_than_predicted_is_said() -> None:
    cpu, shared = torch.device("cpu"), Processes(DeviceLayout(data_parallel_size=2, expert_model_parallel_size=2))
    assert ONE_PROCESS.excess_reason(cpu) == ""
    assert shared.excess_reason(cpu) == (
        "ranks that share experts get more rows in some steps than in the recorded one. "
        "Give a budget that is smaller by as much"
    )


def test_a_layout_without_torchrun_is_refused(tmp_path: Path) -> None:
    config = settings(tmp_path, "alone", parallel={"tensor_model_parallel_size": 2}, data=(write_text(tmp_path),))
    assert isinstance(config, TrainConfig)
    with pytest.raises(
        ValueError, match=r"got world_size=1, tensor_model_parallel_size=2: one model takes 2 processes"
    ):
        trained(config)
