"""Spread the model of a run over its processes: who has which part of it, and what wraps it in training."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recollect.lab.models.gpt import GPTModel
from recollect.lab.parallel.context import context_parallel, route_parts
from recollect.lab.parallel.data import data_parallel
from recollect.lab.parallel.expert import balance_over, expert_parallel
from recollect.lab.parallel.tensor import tensor_parallel
from recollect.lab.train.own_weights import OwnWeights
from recollect.lab.train.processes import Processes

__all__ = ["shard", "share", "spread"]


def spread(model: GPTModel, processes: Processes, own: OwnWeights) -> nn.Module:
    """Leave this process its part of a model, and give it weights.

    Args:
        model: the whole model, on the meta device; changed in place.
        processes: what to spread it over.
        own: the weights.

    Returns:
        What runs in training: the model, or what reduces its gradients around it.
    """
    mesh, layout = processes.mesh, processes.layout
    if mesh is None:
        own.draw(model)
        return model
    share(model, processes)
    is_sharded = shard(model, processes)
    own.draw(model)
    if is_sharded or mesh.gradients.size() == 1:
        return model
    if layout.tensor_model_parallel_size == 1 and layout.expert_model_parallel_size == 1:
        return DistributedDataParallel(model, process_group=mesh.gradients.get_group(), gradient_as_bucket_view=True)
    # DDP takes no DTensors either: their gradients are reduced after backward.
    return model


def shard(model: GPTModel, processes: Processes) -> bool:
    """Leave this process its part of each parameter, gradient and optimizer state; return False if the run shares none.

    ZeRO-1 is FSDP2 that frees weights only after backward. `ZeroRedundancyOptimizer` takes no DTensors, and so would go with no
    tensor parallelism.

    Args:
        model: the whole model, or a stage of a pipeline; changed in place.
        processes: what to share it among.
    """
    mesh = processes.mesh
    if mesh is None or processes.sharding == "none" or mesh.gradients.size() == 1:
        return False
    data_parallel(
        model,
        mesh.gradients,
        expert_mesh=mesh.replicas if processes.layout.expert_model_parallel_size > 1 else None,
        reshard_after_forward=processes.sharding == "all",
    )
    return True


def share(model: GPTModel, processes: Processes) -> None:
    """Leave this process its part of each matrix, sequence and layer of experts; nothing is wrapped.

    Args:
        model: the whole model, or a stage of a pipeline; changed in place.
        processes: what to share it among.
    """
    mesh, layout = processes.mesh, processes.layout
    if mesh is None:
        return
    if layout.tensor_model_parallel_size > 1:
        tensor_parallel(
            model,
            mesh.tensor,
            sequence_parallel=layout.sequence_parallel,
            has_whole_experts=layout.has_whole_experts,
        )
    if layout.context_parallel_size > 1:
        context_parallel(model, mesh.context)
    if layout.expert_model_parallel_size > 1:
        expert_parallel(model, mesh.expert)
    if layout.has_whole_experts:
        route_parts(model, mesh.sequence)
    if mesh.tokens.size() > 1:
        balance_over(model, mesh.tokens)
