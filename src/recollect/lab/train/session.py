"""Open a run, new or from a checkpoint: data, model, optimizer, and the step to continue from."""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recollect.errors import CheckpointError
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.lab.train import checkpoint
from recollect.lab.train.config import TrainConfig
from recollect.lab.train.corpus import Corpus, load_corpus
from recollect.lab.train.files import read_object, remove_partial, write_text
from recollect.lab.train.optimizer_step import resolve_device
from recollect.lab.train.processes import ONE_PROCESS, Processes
from recollect.lab.train.sharded_checkpoint import Checkpoints, StoredState, read_random_states, read_tensors
from recollect.lab.train.trained import Trained, build_trained
from recollect.lab.train.windows import Windows, batch_at
from recollect.ranks.group import Place
from recollect.warning import warn_user

# Files that a start remakes for other settings.
_PLAN_FILES = ("plan.json", "pipeline_plans.json", "baseline.json")
# The distance between the seeds of two steps: more than the number of ranks.
_SEEDS_APART = 1_000_003


@dataclass(eq=False)
class Session:
    """The state of a run between two steps."""

    config: TrainConfig
    folder: Path
    device: torch.device
    corpus: Corpus
    trained: Trained
    processes: Processes
    checkpoints: Checkpoints
    rng: dict[str, Any] | None = None
    """Random number states to start from; None: derived from the seed and the step."""
    step: int = 0
    changes: tuple[str, ...] = ()
    """Settings that differ from those of the interrupted run, in words."""

    @property
    def model(self) -> GPTModel:
        return self.trained.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.trained.optimizer

    @property
    def identity(self) -> dict[str, Any]:
        return {**self.config.identity(), "data.fingerprint": self.corpus.fingerprint}

    def batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this process's micro-batches of `step` (from 0), on the device; the ranks of data parallelism take turns."""
        count, ranks = self.config.optim.num_micro_batches, self.processes.data_ranks
        for position in range(step * count + self.processes.data_rank, (step + 1) * count, ranks):
            yield self._batch(self.corpus.training, position)

    def validation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this process's validation batches, the same each time; none if validation is off.

        Every process has as many, since they run together; where they do not divide, the last one is repeated.
        """
        if self.corpus.validation is not None:
            count, ranks = self.config.num_validation_batches, self.processes.data_ranks
            for first in range(0, count, ranks):
                position = min(first + self.processes.data_rank, count - 1)
                yield self._batch(self.corpus.validation, position)

    def seed(self) -> None:
        """Set all random number generators to their states at this point of the run, whatever ran before.

        Ranks with their own tokens or layers draw different numbers; those that share matrices draw the same ones. After a
        resume on a different layout they draw different numbers than a whole run.
        """
        torch.manual_seed(self.config.step.seed + self.processes.random_rank + self.step * _SEEDS_APART)
        if self.rng is not None:
            checkpoint.set_rng_state(self.rng, self.device)

    def stored_state(self) -> StoredState:
        return StoredState(self.model, self.optimizer, self.processes.layout.tensor_model_parallel_size)

    def save(self) -> int:
        """Write a checkpoint and return its step; several processes go on while it is written, until `checkpoints.finish`."""
        manifest = checkpoint.Manifest(self.step, self.identity, checkpoint.environment(), self.processes.spread, {})
        self.checkpoints.start(self.stored_state(), manifest, checkpoint.rng_state(self.device))
        return self.step

    def _batch(self, windows: Windows, position: int) -> tuple[Tensor, Tensor]:
        tokens, labels = batch_at(position, windows, self.config.optim.batch_size)
        return tokens.to(self.device), labels.to(self.device)


def open_session(config: TrainConfig, processes: Processes = ONE_PROCESS) -> Session:
    """Build a run, or load it from its newest checkpoint if `config.run.resume`; call `seed` before its next step."""

    def read() -> tuple[Path, Path | None, Corpus, TransformerConfig]:
        folder, newest = _find_start(config)
        corpus = load_corpus(config.data, seed=config.step.seed, vocab_size=config.model.vocab_size)
        dimensions = config.model.dimensions(corpus.vocab_size, seq_length=config.data.seq_length)
        processes.check(config, dimensions)
        return folder, newest, corpus, dimensions

    ranks = processes.ranks
    folder, newest, corpus, dimensions = ranks.together(read, Place.START)
    newest = ranks.gather(newest, Place.START)[0]
    session = Session(
        config=config,
        folder=folder,
        device=resolve_device(config.step.device),
        corpus=corpus,
        trained=build_trained(dimensions, config, processes),
        processes=processes,
        checkpoints=Checkpoints(
            folder / "checkpoints",
            keep=config.run.keep_checkpoints,
            processes=processes,
            timeout=timedelta(minutes=config.parallel.distributed_timeout_minutes),
        ),
    )
    problem = None
    if newest is not None:
        # Each looks for damage in its share of the files.
        own = checkpoint.find_damage(newest, share=processes.rank, shares=len(ranks.ranks))
        problem = next((found for found in ranks.gather(own, Place.START) if found is not None), None)

    def start() -> None:
        if processes.is_first:
            remove_partial(folder / "checkpoints")
        if newest is not None:
            _resume(session, newest, problem)
        elif processes.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / "config.json", _config_text(session))
            for name in _PLAN_FILES:  # left by a start that was killed before its first checkpoint
                (folder / name).unlink(missing_ok=True)

    ranks.together(start, Place.START)
    return session


def _find_start(config: TrainConfig) -> tuple[Path, Path | None]:
    folder = config.run.run_dir
    assert folder is not None
    checkpoints = checkpoint.list_checkpoints(folder / "checkpoints")
    if config.run.resume or (config.run.load is not None and checkpoints):
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"run folder {folder}: got --resume but it holds no run, expected the --run-dir of an earlier run. "
                f"Correct --run-dir or remove --resume."
            )
        return folder, checkpoints[-1] if checkpoints else None
    metrics = folder / "metrics.jsonl"
    if checkpoints or (metrics.is_file() and metrics.stat().st_size):
        raise CheckpointError(
            f"run folder {folder}: already holds a run ({len(checkpoints)} checkpoints), "
            f"expected a new or empty folder. Add --resume to continue it, or choose a different --run-dir."
        )
    return folder, None


def _config_text(session: Session) -> str:
    settings = {**dataclasses.asdict(session.config), "layout": session.processes.spread}
    return json.dumps(settings, indent=2, default=str) + "\n"


def _resume(session: Session, path: Path, problem: str | None) -> None:
    checkpoint.refuse_damage(path, problem)
    found = checkpoint.read_manifest(path)
    if isinstance(found, str):
        raise CheckpointError(f"checkpoint {path}: got {found}, expected an intact checkpoint. Resume again.")
    current = json.loads(json.dumps(session.identity, default=str))  # as it was written
    checkpoint.check_identity(path, found.identity, current)
    steps = session.config.optim.steps
    if steps < found.step:
        raise CheckpointError(
            f"checkpoint {path}: was written after step {found.step}, this run has {steps} steps, expected at least as many. "
            "Raise --steps."
        )
    if session.processes.is_first:
        _take_changes(session, found.identity, current)
    read_tensors(path, session.stored_state())
    session.rng = read_random_states(path, found, session.processes.spread, session.processes.rank)
    session.step = found.step
    _warn_of_changes(path, found.environment)


def _take_changes(session: Session, stored: dict[str, Any], current: dict[str, Any]) -> None:
    """Note the resumed run's changes, and remake the plan if they affect recompute."""
    path = session.folder / "config.json"
    before = read_object(path, keys=["step"], advice="Begin again with a different --run-dir.")
    text = _config_text(session)
    now = json.loads(text)
    layout = before.get("layout", ONE_PROCESS.spread)
    # From the folder, not from the checkpoint: a run that was killed before its next checkpoint has its plan here.
    if layout != now["layout"] or any(
        before["step"].get(name) != now["step"][name]
        for name in ("memory_budget", "host_budget", "recompute", "distribute_saved_activations")
    ):
        for name in _PLAN_FILES:
            (session.folder / name).unlink(missing_ok=True)
    # After the plan is gone: a process killed in between leaves no plan of different settings.
    write_text(path, text)
    session.changes = tuple(
        f"{name.partition('.')[2]} {current[name]} (before: {stored.get(name)})"
        for name in checkpoint.CHANGEABLE
        if stored.get(name) != current[name]
    )
    if layout != now["layout"]:
        session.changes += ("another layout",)


def _warn_of_changes(path: Path, stored: dict[str, Any]) -> None:
    changes = [
        f"{name} {stored.get(name)} -> {now}"
        for name, now in checkpoint.environment().items()
        if stored.get(name) != now
    ]
    if changes:
        warn_user(
            f"checkpoint {path}: was written elsewhere ({', '.join(changes)}); losses may differ in their last bits.",
        )
