"""Data parallelism: ranks have batches of their own, and share parameters, gradients and optimizer state by FSDP2."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from recollect.lab.models.gpt import GPTModel

__all__ = ["data_parallel"]


def data_parallel(
    model: GPTModel,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool = True,
    precision: MixedPrecisionPolicy | None = None,
) -> GPTModel:
    """Shard every layer, and then the rest, over the ranks of a mesh.

    Args:
        model: with the same weights on all ranks, or on the meta device; from `tensor_parallel`, if both are wanted. Changed in
            place.
        mesh: one-dimensional (FSDP2), or two-dimensional: replicas, each sharded (HSDP).
        reshard_after_forward: whether parameters are freed after forward, and gathered again in backward.
        precision: dtypes of parameters and reductions; None: those of the parameters.

    Returns:
        The model. Gradients are means over the ranks.
    """
    policy = MixedPrecisionPolicy() if precision is None else precision
    units: list[nn.Module] = [*model.decoder.layers, model]
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    return model
