"""Build what a run trains: the model, spread over the processes of the run, and its optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.lab.parallel.data import data_parallel
from recollect.lab.parallel.tensor import tensor_parallel
from recollect.lab.train.config import TrainConfig
from recollect.lab.train.exchange import Exchange, exchange_of
from recollect.lab.train.optim import build_optimizer
from recollect.lab.train.optimizer_step import build_model
from recollect.lab.train.processes import Processes

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

    Args:
        dimensions: the whole model.
        config: the run.
        processes: what to spread it over.
    """
    model = build_model(dimensions, config.step)
    wrapped = _spread(model, processes)
    return Trained(model, wrapped, build_optimizer(model, config.optim), exchange_of(processes, wrapped))


def _spread(model: GPTModel, processes: Processes) -> nn.Module:
    mesh, layout = processes.mesh, processes.layout
    if mesh is None:
        return model
    if layout.tensor_model_parallel_size > 1:
        tensor_parallel(model, mesh["tensor"], sequence_parallel=layout.sequence_parallel)
    if layout.data_parallel_size > 1 and processes.sharding != "none":
        # ZeRO-1 is FSDP2 that frees weights only after backward. ZeroRedundancyOptimizer takes no DTensors, and so would go
        # with no tensor parallelism.
        return data_parallel(model, mesh["data"], reshard_after_forward=processes.sharding == "all")
    if layout.data_parallel_size > 1 and layout.tensor_model_parallel_size == 1:
        has_experts = model.config.num_moe_experts is not None
        return DistributedDataParallel(
            model,
            process_group=processes.data_group,
            gradient_as_bucket_view=True,
            # An expert to which no token goes has no gradient.
            find_unused_parameters=has_experts,
        )
    # DDP takes no DTensors either: their gradients are reduced after backward.
    return model
