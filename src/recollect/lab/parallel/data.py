"""Data parallelism: ranks have batches of their own, and share parameters, gradients and optimizer state by FSDP2."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from recollect.lab.models.gpt import GPTModel
from recollect.lab.parallel.expert import ExchangedExperts

__all__ = ["data_parallel"]


def data_parallel(
    model: GPTModel,
    mesh: DeviceMesh,
    *,
    expert_mesh: DeviceMesh | None = None,
    reshard_after_forward: bool = True,
    precision: MixedPrecisionPolicy | None = None,
) -> GPTModel:
    """Shard every layer, and then the rest, over the ranks of a mesh.

    Args:
        model: with the same weights on all ranks, or on the meta device; from `tensor_parallel`, if both are wanted. Changed in
            place.
        mesh: one-dimensional (FSDP2), or two-dimensional: replicas, each sharded (HSDP).
        expert_mesh: for a model from `expert_parallel`, those ranks of `mesh` that have the same experts: with the mesh of
            the experts another view of `mesh`.
        reshard_after_forward: whether parameters are freed after forward, and gathered again in backward.
        precision: dtypes of parameters and reductions; None: those of the parameters.

    Returns:
        The model. Gradients are means over the ranks.
    """
    policy = MixedPrecisionPolicy() if precision is None else precision
    units: list[nn.Module] = [*model.decoder.layers, model]
    sharded_over = mesh if expert_mesh is None else expert_mesh
    alone: set[nn.Parameter] = set()
    for experts in [module for module in model.modules() if isinstance(module, ExchangedExperts)]:
        if sharded_over.size() == 1:
            # FSDP2 would copy them for nothing.
            alone |= {*experts.parameters()}
            continue
        sharded = fully_shard(experts, mesh=sharded_over, reshard_after_forward=reshard_after_forward, mp_policy=policy)
        # They have the sum over the ranks that share them. Only NCCL divides by any number as it reduces.
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(mesh.size())
    for parameter in alone:
        parameter.register_hook(partial(torch.div, other=mesh.size()))
    for unit in units:
        fully_shard(
            unit, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy, ignored_params=alone
        )
    return model
