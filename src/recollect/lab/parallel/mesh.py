"""The device mesh of a layout: the groups of ranks that share something, and how they share a model."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed import get_world_size
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from recollect._torch_parallel import flat_mesh
from recollect.lab.models.gpt import GPTModel
from recollect.lab.parallel.context import context_parallel, route_parts
from recollect.lab.parallel.expert import ExchangedExperts, balance_over, expert_parallel
from recollect.lab.parallel.layout import DeviceLayout
from recollect.lab.parallel.tensor import tensor_parallel


@dataclass(frozen=True)
class LayoutMesh:
    """One-dimensional meshes of the ranks that this rank shares something with; all are views of one."""

    pipeline: DeviceMesh
    """The layers."""
    data: DeviceMesh
    """The model, with other batches."""
    context: DeviceMesh
    """Each sequence."""
    tensor: DeviceMesh
    """Each matrix."""
    gradients: DeviceMesh
    """Parameters that are not experts: `data` and `context` together."""
    expert: DeviceMesh
    """The experts of a layer."""
    replicas: DeviceMesh
    """The same experts."""
    sequence: DeviceMesh
    """Each sequence, in the routers of layers with experts: as `context`, or with whole experts `tensor`, too."""
    tokens: DeviceMesh
    """Those that have their own tokens there: as `gradients`, or with `tensor`."""


def layout_mesh(layout: DeviceLayout, device_type: str = "cpu") -> LayoutMesh:
    """Return the meshes of a layout; all ranks have to call it."""
    layout.check_devices(get_world_size())
    data, context, expert = layout.data_parallel_size, layout.context_parallel_size, layout.expert_model_parallel_size
    if layout.has_whole_experts:
        expert //= layout.tensor_model_parallel_size
    # Experts are shared by consecutive data and context ranks: cut the row where either ends.
    begin, end = ("outer",), ("inner",)
    if expert >= context:
        sizes = (data * context // expert, expert // context, context)
        axes = {"data": (*begin, "middle"), "context": end, "expert": ("middle", *end), "replicas": begin}
    else:
        sizes = (data, context // expert, expert)
        axes = {"data": begin, "context": ("middle", *end), "expert": end, "replicas": (*begin, "middle")}
    mesh = init_device_mesh(
        device_type,
        (layout.pipeline_model_parallel_size, *sizes, layout.tensor_model_parallel_size),
        mesh_dim_names=("pipeline", "outer", "middle", "inner", "tensor"),
    )
    axes["gradients"] = ("outer", "middle", "inner")
    own = ("tensor",) if layout.has_whole_experts else ()
    axes |= {"sequence": (*axes["context"], *own), "tokens": (*axes["gradients"], *own)}
    axes["expert"] += own
    views = {name: mesh[dims[0]] if len(dims) == 1 else flat_mesh(mesh[dims]) for name, dims in axes.items()}
    return LayoutMesh(pipeline=mesh["pipeline"], tensor=mesh["tensor"], **views)


def share_model(model: GPTModel, layout: DeviceLayout, mesh: LayoutMesh, *, balanced: bool = False) -> None:
    """Leave this rank its part of each matrix, sequence and layer of experts; nothing is wrapped."""
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
        expert_parallel(model, mesh.expert, balanced=balanced)
    if layout.has_whole_experts:
        route_parts(model, mesh.sequence)
    if mesh.tokens.size() > 1:
        balance_over(model, mesh.tokens)


def data_parallel(
    model: GPTModel,
    mesh: DeviceMesh,
    *,
    expert_mesh: DeviceMesh | None = None,
    reshard_after_forward: bool = True,
    precision: MixedPrecisionPolicy | None = None,
) -> GPTModel:
    """Shard every layer, and then the rest, over the ranks of a mesh with separate batches, by FSDP2.

    The model has the same weights on all ranks, or is on the meta device, or from `tensor_parallel`; it is changed in place.
    Gradients are means over the ranks. The mesh is one-dimensional (FSDP2), or two-dimensional: replicas, each sharded (HSDP).
    Of a model from `expert_parallel`, `expert_mesh` has those of its ranks that have the same experts: with the mesh of the
    experts a different view of it. `reshard_after_forward`: whether parameters are freed after forward, and gathered again in
    backward.
    """
    policy = MixedPrecisionPolicy() if precision is None else precision
    shard = partial(fully_shard, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    sharded_over = mesh if expert_mesh is None else expert_mesh
    alone: set[nn.Parameter] = set()
    for experts in [module for module in model.modules() if isinstance(module, ExchangedExperts)]:
        if sharded_over.size() == 1:
            # FSDP2 would copy them needlessly.
            alone |= {*experts.parameters()}
            continue
        sharded = shard(experts, mesh=sharded_over)
        # They have the sum over the ranks that share them. Only NCCL divides by any number as it reduces.
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(mesh.size())
    for parameter in alone:
        parameter.register_hook(partial(torch.div, other=mesh.size()))
    for unit in [*model.decoder.layers, model]:
        shard(unit, mesh=mesh, ignored_params=alone)
    return model
