"""Record the stages of a pipeline, each as this process runs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import recollect
from recollect.lab.parallel.pipeline_rank import LossStage, PipelineRank
from recollect.lab.parallel.pipeline_step import received
from recollect.lab.train.optim import build_optimizer
from recollect.lab.train.session import Session
from recollect.profile.profile import Profile

__all__ = ["record_own_stages"]


def record_own_stages(
    session: Session, rank: PipelineRank, *, loss_chunks: int = 1, only_last: bool = False
) -> dict[int, Profile]:
    """Record the stages of this process, each on one micro-batch, by number. Processes with the same stages do so together.

    Args:
        session: the run; its model does not change.
        rank: the stages.
        loss_chunks: parts in which the last stage computes the loss.
        only_last: record only the last stage of the pipeline, if it is here.
    """
    tokens, labels = next(session.batches(0))
    found = {}
    for number, stage in rank.stages.items():
        if only_last and not stage.is_last:
            continue
        batch = {"x": tokens}
        if not stage.is_first:
            batch["x"] = _received(session, stage, tokens.shape)
        if stage.is_last:
            batch["labels"] = labels
            if stage.mtp is not None:
                batch["tokens"] = tokens
        # Over this process's part of the weights, which it has beside the whole ones.
        optimizer = build_optimizer(stage, session.config.optim)
        with recollect.gathered_stage(stage):
            found[number] = recollect.record(
                stage,
                batch,
                optimizer=optimizer,
                loss_fn=None if stage.is_last else torch.sum,
                units=_units(stage),
                holds_output=False,
                gradients="accumulated",
                loss_chunks=loss_chunks if stage.is_last else 1,
                # Processes with the same stages run one plan.
                collectives="replay",
                group="alone",
            )
    return found


def _received(session: Session, stage: LossStage, shape: Sequence[int]) -> Tensor:
    """Return what a stage may receive: the same on the ranks that share its matrices, unless these split sequences.

    The recording compares values of these ranks, to tell which of them they may hold as parts.
    """
    processes = session.processes
    assert processes.mesh is not None
    part = processes.mesh.tensor.get_local_rank() if processes.layout.sequence_parallel else 0
    generator = torch.Generator(session.device).manual_seed(part)
    like, device = received(stage, shape), session.device
    return torch.randn(like.shape, dtype=like.dtype, device=device, generator=generator, requires_grad=True)


def _units(stage: LossStage) -> list[str]:
    """Return the paths of the layers; where there is a single one, none is found."""
    found = [f"decoder.layers.{layer}" for layer in range(len(stage.decoder.layers))]
    if stage.mtp is not None:
        found += [f"mtp.layers.{depth}" for depth in range(len(stage.mtp.layers))]
    return found
