"""Spread the model of a run over its processes: who has which part of it and its weights, and what wraps it in training.

The model is built and spread on the meta device, where it takes no memory. What a process then has is drawn into place.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.seed_weights import SeedWeights
from recollect.lab.parallel.context import context_parallel, route_parts
from recollect.lab.parallel.data import data_parallel
from recollect.lab.parallel.expert import balance_over, expert_parallel
from recollect.lab.parallel.tensor import fused_parameters, tensor_parallel
from recollect.lab.train.processes import Processes
from recollect.lab.train.stored_state import Fused, parts_of

__all__ = ["OwnWeights", "shard", "share", "spread"]


class OwnWeights:
    """The weights of this process.

    Args:
        weights: those of the whole model, and the device where they go.
        tensor_ranks: those of tensor parallelism, which reorders rows.
    """

    def __init__(self, weights: SeedWeights, tensor_ranks: int) -> None:
        self._weights, self._tensor_ranks = weights, tensor_ranks

    @torch.no_grad()
    def draw(self, model: GPTModel) -> None:
        """Put weights in the place of parameters on the meta device, and zeros in that of buffers.

        They are new objects, with the hooks of the old ones, which whoever holds them still has.

        Args:
            model: with the names of the whole model; spread or not. Changed in place.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        fused = fused_parameters(model) if self._tensor_ranks > 1 else {}
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for place, parameter in [*module.named_parameters(recurse=False)]:
                if id(parameter) not in made:
                    name = names[id(parameter)]
                    made[id(parameter)] = self._drawn(parameter, name, fused.get(name))
                setattr(module, place, made[id(parameter)])
            for place, buffer in [*module.named_buffers(recurse=False)]:
                setattr(module, place, torch.zeros_like(buffer, device=self._weights.device))

    def _drawn(self, empty: nn.Parameter, name: str, fused: Fused | None) -> nn.Parameter:
        tensor = torch.empty_like(empty, device=self._weights.device)
        for chunk, part in parts_of(tensor, fused, self._tensor_ranks):
            self._weights.write(name, part, chunk.offsets)
        drawn = nn.Parameter(tensor, requires_grad=empty.requires_grad)
        for hook in (getattr(empty, "_backward_hooks", None) or {}).values():
            drawn.register_hook(hook)
        return drawn


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
