"""Checkpoints and other files of a run: damage and other settings are found, whole or not there, of one run at a time."""

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

from recollect.errors import CheckpointError, MissingFileError, PlanFormatError
from recollect.lab.train.checkpoint import (
    Manifest,
    check_identity,
    checksum_of,
    find_damage,
    keep_newest,
    list_checkpoints,
    refuse_damage,
    rng_state,
    set_rng_state,
    write_manifest,
)
from recollect.lab.train.files import only_run_in, write_atomically, write_text
from recollect.lab.train.pipeline_plans import PipelinePlans
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan

SETTINGS = {"model.hidden_size": 64, "data.seq_length": 32, "optim.steps": 6, "step.memory_budget": None}


def write_folder(path: Path) -> Path:
    """Write a checkpoint; return its file with tensors."""
    path.mkdir()
    tensors = path / "rank_0.bin"
    tensors.write_bytes(bytes(range(100)))
    write_manifest(path, Manifest(3, SETTINGS, {}, {}, {tensors.name: checksum_of(tensors)}))
    return tensors


def flipped(folder: Path) -> None:
    content = bytearray((folder / "rank_0.bin").read_bytes())
    content[50] ^= 1
    (folder / "rank_0.bin").write_bytes(content)


def of_another_step(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    assert text.count(r"\"step\": 3") == 1
    (folder / "manifest.json").write_text(text.replace(r"\"step\": 3", r"\"step\": 4"))


def cut_off(folder: Path) -> None:
    (folder / "manifest.json").write_text((folder / "manifest.json").read_text()[:-20])


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (flipped, "changed bytes in its file rank_0.bin"),
        (
            lambda folder: (folder / "rank_0.bin").write_bytes(b"too short"),
            "9 bytes instead of 100 in its file rank_0.bin",
        ),
        (lambda folder: (folder / "rank_0.bin").unlink(), "a folder without its file rank_0.bin"),
        (of_another_step, "a changed manifest.json"),
        (cut_off, "a changed manifest.json"),
        (lambda folder: (folder / "manifest.json").unlink(), "a folder without manifest.json"),
    ],
)
def test_damage_is_found(damage: Callable[[Path], object], found: str, tmp_path: Path) -> None:
    folder = tmp_path / "step_00000003"
    write_folder(folder)
    assert find_damage(folder) is None
    damage(folder)
    assert find_damage(folder) == found


def test_a_damaged_checkpoint_is_refused_with_the_newest_that_is_intact(tmp_path: Path) -> None:
    write_folder(tmp_path / "step_00000001")
    write_folder(tmp_path / "step_00000002").unlink()
    write_folder(tmp_path / "step_00000003").write_bytes(b"too short")
    newest = tmp_path / "step_00000003"
    with pytest.raises(CheckpointError, match=r"got 9 bytes instead of 100 .* from the older step_00000001\."):
        refuse_damage(newest, find_damage(newest))


def test_a_file_as_one_process_wrote_it_before_is_refused_not_overlooked(tmp_path: Path) -> None:
    (tmp_path / "step_00000003.pt").write_bytes(b"weights")
    (path,) = list_checkpoints(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"got an unreadable manifest\.json \(Not a directory\), expected an intact"
    ):
        refuse_damage(path, find_damage(path))


@pytest.mark.parametrize(("name", "now"), [("model.hidden_size", 128), ("data.seq_length", 64), ("data.seed", 1)])
def test_other_settings_than_a_checkpoint_was_written_with_are_refused(name: str, now: int) -> None:
    message = rf"was written with {name} = {SETTINGS.get(name)!r}, this run has {now}, expected the same"
    with pytest.raises(CheckpointError, match=message):
        check_identity(Path("step_00000003"), SETTINGS, {**SETTINGS, name: now})


def test_a_setting_that_is_there_no_more_is_refused() -> None:
    current = {name: value for name, value in SETTINGS.items() if name != "data.seq_length"}
    with pytest.raises(CheckpointError, match=r"was written with data.seq_length = 32, this run has None"):
        check_identity(Path("step_00000003"), SETTINGS, current)


def test_more_steps_and_another_budget_are_no_other_settings() -> None:
    check_identity(Path("step_00000003"), SETTINGS, {**SETTINGS, "optim.steps": 9, "step.memory_budget": "60%"})


def test_all_generators_go_on_where_they_were() -> None:
    def draw() -> list[Any]:
        return [torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()]  # noqa: NPY002

    cpu = torch.device("cpu")
    state = rng_state(cpu)
    drawn, next_ones = draw(), draw()
    set_rng_state(state, cpu)
    assert draw() == drawn
    assert draw() == next_ones


def test_as_many_checkpoints_are_kept_as_were_asked_for(tmp_path: Path) -> None:
    for step in range(1, 5):
        write_folder(tmp_path / f"step_{step:08d}")
    (tmp_path / "step_00000005.partial").mkdir()
    keep_newest(tmp_path, 2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000003", "step_00000004"]


def test_a_second_run_in_a_folder_is_refused_with_the_first_ones_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with only_run_in(folder):
        with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on .* is already training") as caught:
            with only_run_in(folder):
                pass
        assert str(folder) in str(caught.value)
    with only_run_in(folder):
        pass


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    def write_half(file: BinaryIO) -> None:
        file.write(b"half of")
        raise OSError("no space left")

    path = tmp_path / "plan.json"
    path.write_text("the old one")
    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, write_half)
    assert path.read_text() == "the old one"
    assert [found.name for found in tmp_path.iterdir()] == ["plan.json"]


LEAN = Plan(units={"decoder.layers.0": UnitPlan(actions={"mlp.mm": Action.RECOMPUTE})})
PLANS = PipelinePlans(
    stages=((LEAN,), (LEAN, Plan(units={}))),
    budget_bytes=4096,
    predicted_peak_bytes=4000,
    predicted_slowdown=0.125,
    plain_peak_bytes=8192,
    table="rank 0",
)


def test_plans_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "pipeline_plans.json"
    path.write_text(PLANS.to_json())
    assert PipelinePlans.load(path) == PLANS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": None}, "stages: got null, expected an array"),
        ({"stages": [[{"format": "recollect.plan"}]]}, "stages[0][0]: document: the key 'version' is missing"),
        ({"table": 3}, "table: got 3, expected a string"),
        ({"budget_bytes": -1}, "budget_bytes: got -1, expected an integer, 0 or more"),
        ({"format": "recollect.plan"}, "format: got \"recollect.plan\", expected 'recollect.pipeline_plans'"),
        ({"extra": 1}, "extra: unknown key, expected one of format, version, stages,"),
    ],
)
def test_a_damaged_file_is_named_and_where(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "pipeline_plans.json"
    path.write_text(json.dumps(json.loads(PLANS.to_json()) | changes))
    with pytest.raises(PlanFormatError, match=re.escape(f"{path}: {message}")):
        PipelinePlans.load(path)


def test_what_is_no_file_of_plans_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pipeline_plans.json"
    with pytest.raises(MissingFileError, match="no such file, expected the plans of a pipeline"):
        PipelinePlans.load(path)
    path.write_text("{")
    with pytest.raises(PlanFormatError, match=rf"{re.escape(str(path))}: line 1, column 2: not JSON"):
        PipelinePlans.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanFormatError, match="can't decode"):
        PipelinePlans.load(path)


def test_only_files_are_replaced(tmp_path: Path) -> None:
    pipe, file, link = tmp_path / "pipe", tmp_path / "file", tmp_path / "link"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "plan")
    assert os.read(reader, 8) == b"plan" and pipe.is_fifo()
    os.close(reader)
    link.symlink_to(file)
    write_text(link, "plan")
    assert link.is_symlink() and file.read_text() == "plan"
