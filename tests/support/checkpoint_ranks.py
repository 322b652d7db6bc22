"""What each process does in `test_sharded_checkpoints.py`, as a program that serves cases.

torchrun checkpoint_ranks.py FOLDER
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import recollect
import training_runs
from case_server import serve
from recollect._torch_dtensor import local_part
from recollect.lab.train.config import ProcessFlags, TrainConfig
from recollect.lab.train.loop import train
from recollect.lab.train.processes import ONE_PROCESS, joined_processes
from recollect.lab.train.session import open_session
from recollect.lab.train.sharded_checkpoint import StoredState, parts_of
from recollect.lab.train.trained import build_trained

TENSOR = {"tensor_model_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "FSDP2": {"use_torch_fsdp2": True},
    "TP": TENSOR,
    "TP SP FSDP2": {**TENSOR, "sequence_parallel": True, "use_torch_fsdp2": True},
    "PP": {**PIPELINE, "num_layers_per_virtual_pipeline_stage": 1},
    "PP TP": {**PIPELINE, **TENSOR},
    "PP ZeRO": {**PIPELINE, "num_layers_per_virtual_pipeline_stage": 1, "use_distributed_optimizer": True},
}
FIRST = "TP SP FSDP2"
# Of a model with experts.
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "EP": {"expert_model_parallel_size": 2},
    "EP FSDP2": {"expert_model_parallel_size": 2, "use_torch_fsdp2": True},
    "EP CP": {"expert_model_parallel_size": 4, "context_parallel_size": 2},
    "EP PP ZeRO": {"expert_model_parallel_size": 2, **PIPELINE, "use_distributed_optimizer": True},
    "EP TP": {"expert_model_parallel_size": 2, **TENSOR},
}
EVERY, STEPS = 2, 4
OLDER = f"step_{EVERY:08d}"


def settings(folder: Path, name: str, layout: str | None = None, **changes: Any) -> TrainConfig:
    """Return the settings of a run in a folder of its own; with gated projections, whose rows are fused."""
    sizes = {"steps": STEPS, "accumulation": 4, "batch_size": 1, "seq_length": 16, "checkpoint_every": EVERY}
    model = (
        {"size": "deepseek-v3-tiny", "num_layers": 2}
        if "experts" in name
        else {"num_layers": 4, "tie_embeddings": True}
    )
    flags = {**sizes, "validation_batches": 1, "validate_every": 0, **model, **changes}
    config = training_runs.config(folder, run_dir=folder / name.replace(" ", "_"), **flags)
    parallel = {**LAYOUTS, **EXPERT_LAYOUTS}[layout] if layout else {}
    return TrainConfig(**{**vars(config), "parallel": ProcessFlags(**parallel)})


def copy_of(folder: Path, source: str, name: str, *, newest: int = EVERY) -> None:
    """Copy a run, as it was after one of its checkpoints."""
    target = folder / name.replace(" ", "_")
    shutil.copytree(folder / source.replace(" ", "_"), target)
    for path in (target / "checkpoints").iterdir():
        if int(path.name[5:13]) > newest:
            shutil.rmtree(path)


def losses_of(config: TrainConfig) -> dict[str, Any]:
    return {"losses": [record.loss for record in train(config, console=training_runs.QUIET).records]}


def resumed(folder: Path, layout: str, source: str, **changes: Any) -> dict[str, Any]:
    """Go on after the older checkpoint of a run."""
    name = f"{source} as {layout}"
    if dist.get_rank() == 0:
        copy_of(folder, source, name)
        # Of a process that was killed while it wrote.
        (folder / name.replace(" ", "_") / "checkpoints" / f"step_{EVERY + 1:08d}.partial").mkdir()
    dist.barrier()
    return losses_of(settings(folder, name, layout, resume=True, **changes))


def rewritten(folder: Path, kind: str, number: int) -> dict[str, Any]:
    """Read the checkpoint that one process wrote, or the layout before, and write it as another layout does, a step later."""
    layout, step = list(EXPERT_LAYOUTS if kind else LAYOUTS)[number], EVERY + number
    source = f"rewritten{kind} {number - 1}" if number else f"alone{kind}"
    if dist.get_rank() == 0:
        copy_of(folder, source, f"rewritten{kind} {number}", newest=step)
    dist.barrier()
    config = settings(folder, f"rewritten{kind} {number}", layout, resume=True, steps=20)
    with joined_processes(config) as processes:
        session = open_session(config, processes)
        assert session.step == step
        session.seed()
        session.step += 1
        session.save()
        session.checkpoints.finish()
    return {}


def built(folder: Path, kind: str, layout: str) -> dict[str, Any]:
    """Build a run, and return which weights are others than those of one process, and the most bytes at a time."""
    config = settings(folder, f"built{kind}", layout)
    dimensions = config.model.dimensions(256, seq_length=config.data.seq_length)
    whole = build_trained(dimensions, config, ONE_PROCESS).model
    with joined_processes(config) as processes:
        measured = recollect.measure_peak(
            lambda: build_trained(dimensions, config, processes), device="cpu", baseline_bytes=0
        )
        trained = measured.result
        stored = StoredState(trained.model, trained.optimizer, processes.layout.tensor_model_parallel_size)
        names = [name.removeprefix("model.") for name in stored.tensors if name.startswith("model.")]
        own_bytes = sum(local_part(parameter).nbytes for parameter in trained.model.parameters())
    return {
        "names": names,
        "differing": [name for name in names if not has_part_of(stored, f"model.{name}", whole.state_dict()[name])],
        "own_bytes": own_bytes,
        "whole_bytes": sum(parameter.nbytes for parameter in whole.parameters()),
        "largest_bytes": max(parameter.nbytes for parameter in whole.parameters()),
        "peak_bytes": measured.peak_bytes,
    }


def has_part_of(stored: StoredState, name: str, whole: torch.Tensor) -> bool:
    return all(
        torch.equal(part, whole[tuple(slice(o, o + size) for o, size in zip(chunk.offsets, chunk.sizes, strict=True))])
        for chunk, part in parts_of(stored.tensors[name], stored.fused.get(name), stored.tensor_ranks)
    )


def damaged(folder: Path) -> dict[str, Any]:
    """Go on from a checkpoint of which another process verifies the file that is damaged."""
    if dist.get_rank() == 0:
        copy_of(folder, "plain", "damaged", newest=STEPS)
        with (folder / "damaged" / "checkpoints" / f"step_{STEPS:08d}" / "random_3.pt").open("ab") as file:
            file.write(b"more")
    dist.barrier()
    return losses_of(settings(folder, "damaged", FIRST, resume=True))


def full_disk(folder: Path) -> dict[str, Any]:
    (folder / "full").mkdir(exist_ok=True)
    (folder / "full" / "checkpoints").write_text("no folder")
    return losses_of(settings(folder, "full", "replicas", steps=EVERY))


def run(case: str, folder: Path) -> dict[str, Any]:
    action, _, what = case.partition(": ")
    if action == "trained":
        layout = "PP ZeRO" if what == "pipeline" else FIRST
        return losses_of(settings(folder, what, layout, **({} if what == "plain" else {"hidden_dropout": 0.1})))
    if action == "resumed":
        return resumed(folder, FIRST, "dropout", hidden_dropout=0.1)
    if action == "resumed pipeline":
        return resumed(folder, "PP ZeRO", "pipeline", hidden_dropout=0.1)
    if action == "resumed as":
        return resumed(folder, what, "plain")
    if action == "from one as":
        return resumed(folder, what, "alone")
    if action.startswith("rewritten"):
        return rewritten(folder, action.removeprefix("rewritten"), int(what))
    if action.startswith("built"):
        return built(folder, action.removeprefix("built"), what)
    if action == "damaged":
        return damaged(folder)
    return full_disk(folder)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    the_folder = Path(sys.argv[1])
    serve(lambda case: run(case, the_folder))
