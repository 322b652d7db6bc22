"""Build what a run trains: the model, spread over the processes of the run, and its optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import recollect
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.seed_weights import SeedWeights
from recollect.lab.parallel.pipeline_rank import pipeline_rank
from recollect.lab.parallel.pipeline_step import PipelineStep
from recollect.lab.train.config import TrainConfig
from recollect.lab.train.exchange import Exchange, exchange_of
from recollect.lab.train.optim import build_optimizer
from recollect.lab.train.optimizer_step import resolve_device
from recollect.lab.train.pipeline_exchange import PipelineExchange
from recollect.lab.train.processes import Processes
from recollect.lab.train.spread import OwnWeights, shard, share, spread

__all__ = ["Trained", "build_trained"]


@dataclass(frozen=True, eq=False)
class Trained:
    """What a run trains.

    Attributes:
        model: the model, with this process's part of the weights.
        wrapped: what runs in training: the model, or what reduces its gradients around it.
        optimizer: over the parameters that are here.
        exchange: what the processes exchange in a step.
    """

    model: GPTModel
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    exchange: Exchange


def build_trained(dimensions: TransformerConfig, config: TrainConfig, processes: Processes) -> Trained:
    """Build the model with the weights of the seed, which are those of one process, and spread it.

    A process never has more of the weights than its own part, and a few megabytes beside it.

    Args:
        dimensions: the whole model.
        config: the run.
        processes: what to spread it over.
    """
    # What runs before the first step, such as one that is recorded, draws the same random numbers in all processes.
    torch.manual_seed(config.step.seed)
    with torch.device("meta"):
        # Weights stay fp32 even with bf16 activations and matrix products, because AdamW's updates are smaller than the spacing
        # of bf16 numbers near the weights and would be lost.
        model = GPTModel(dimensions, compute_dtype=torch.bfloat16 if config.step.precision == "bf16" else None)
    weights = SeedWeights(model, config.step.seed, resolve_device(config.step.device))
    own = OwnWeights(weights, processes.layout.tensor_model_parallel_size)
    if processes.layout.pipeline_model_parallel_size > 1:
        return _pipeline(model, own, config, processes)
    wrapped = spread(model, processes, own)
    if config.holds_parts and processes.mesh is not None:
        recollect.distribute_saved_activations(wrapped, processes.mesh.tensor.get_group())
    return Trained(model, wrapped, build_optimizer(model, config.optim), exchange_of(processes, wrapped))


def _pipeline(model: GPTModel, own: OwnWeights, config: TrainConfig, processes: Processes) -> Trained:
    mesh = processes.mesh
    assert mesh is not None
    layers = processes.layout.layers_of_stages(model.config.num_layers)

    def spread_stage(stage: GPTModel) -> None:
        share(stage, processes)
        if config.holds_parts:
            recollect.distribute_saved_activations(stage, mesh.tensor.get_group())
        shard(stage, processes)

    rank = pipeline_rank(
        model, layers, rank=mesh.pipeline.get_local_rank(), ranks=mesh.pipeline.size(), spread=spread_stage
    )
    own.draw(rank)
    step = PipelineStep(
        rank,
        mesh.pipeline,
        num_stages=len(layers),
        num_micro_batches=config.optim.num_micro_batches // processes.data_ranks,
        batch_size=config.optim.batch_size,
        seq_length=config.data.seq_length,
        device=resolve_device(config.step.device),
    )
    return Trained(rank, rank, build_optimizer(rank, config.optim), PipelineExchange(processes, mesh, rank, step))
