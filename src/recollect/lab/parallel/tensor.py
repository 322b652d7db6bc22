"""Tensor parallelism: the ranks of a mesh share each matrix, and with sequence parallelism the tensors between matrices, too.

As in Megatron (Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198, section 4.2): `linear_qkv` and
`linear_fc1` are split by rows, by heads and by channels of the MLP; `linear_proj` and `linear_fc2` by columns; embedding and LM
head along the vocabulary. Latent attention is split by heads, behind its latents;
experts and the shared expert by their channels. All by PyTorch's DTensor and its styles.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from recollect.lab.models.attention import LatentAttention, SelfAttention, UpProjection
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.linear import Linear
from recollect.lab.models.mlp import MLP, MoELayer
from recollect.lab.parallel.layout import DeviceLayout
from recollect.lab.parallel.tensor_modules import (
    OwnPartMoELayer,
    SequenceLinear,
    SplitMoELayer,
    SplitProduct,
    interleaved,
    vocabulary_parallel_loss,
    with_partial_gradient,
)


def tensor_parallel(
    model: GPTModel, mesh: DeviceMesh, *, sequence_parallel: bool = False, has_whole_experts: bool = False
) -> GPTModel:
    """Split a model's matrices over the ranks of a mesh, and its loss along the vocabulary.

    The model has the same weights on all ranks, or is on the meta device, and is changed in place. All ranks pass the same
    batch. Its output has the logits of this rank's part of the vocabulary, and the whole loss. `sequence_parallel` also splits
    the residual stream, along the sequence. With `has_whole_experts`, experts are not split: each rank sends the tokens of its
    part of a sequence to them. `expert_parallel` has to share them then, over these ranks or more.

    Limitations: ranks draw random numbers from their own generators. Seed all ranks alike: dropout of whole tensors has to be
    the same on all of them; dropout of attention's heads, and of parts of the sequence, is then equal in each part.
    """
    has_whole_experts &= model.config.num_moe_experts is not None
    DeviceLayout(
        tensor_model_parallel_size=mesh.size(),
        sequence_parallel=sequence_parallel,
        expert_tensor_parallel_size=1 if has_whole_experts else None,
        expert_model_parallel_size=mesh.size() if has_whole_experts else 1,
    ).check_model(model.config)
    between = Shard(1) if sequence_parallel else Replicate()
    for linear, sizes in _fused(model):
        for parameter in linear.parameters():
            with torch.no_grad():
                parameter.copy_(interleaved(parameter, sizes, mesh.size()))
    for layer in model.decoder.layers:
        _split_layer(layer, mesh, between, has_whole_experts=has_whole_experts)
    for depth in () if model.mtp is None else model.mtp.layers:
        layer = depth.get_submodule("transformer_layer")
        _split_layer(layer, mesh, between, has_whole_experts=has_whole_experts)
        if sequence_parallel:
            parallelize_module(
                depth, mesh, {name: SequenceParallel() for name in ("enorm", "hnorm", "final_layernorm")}
            )
            projection = depth.get_submodule("eh_proj")
            assert isinstance(projection, Linear)
            depth.eh_proj = SequenceLinear(projection, mesh)
    if sequence_parallel:
        model.sequence_ranks = mesh.size()
    _split_ends(model, mesh, between)
    model.vocabulary_group = mesh.get_group()
    model.cross_entropy = partial(vocabulary_parallel_loss, group=mesh.get_group())
    return model


def _split_layer(layer: nn.Module, mesh: DeviceMesh, between: Shard | Replicate, *, has_whole_experts: bool) -> None:
    attention, mlp = layer.get_submodule("self_attention"), layer.get_submodule("mlp")
    styles: dict[str, ParallelStyle] = {"self_attention.linear_proj": RowwiseParallel(output_layouts=between)}
    if isinstance(between, Shard):
        styles |= {"input_layernorm": SequenceParallel(), "pre_mlp_layernorm": SequenceParallel()}
    if isinstance(attention, LatentAttention):
        styles |= _split_latents(attention, mesh, between)
        _split_up_projection(attention.qkv_up_proj, mesh, between)
    else:
        assert isinstance(attention, SelfAttention)
        styles |= _split_rows("self_attention.linear_qkv", attention.linear_qkv, between)
        attention.sizes = tuple(size // mesh.size() for size in attention.sizes)
        if attention.has_norms:  # each rank of its own heads
            by_heads = SequenceParallel(sequence_dim=2, use_local_output=True)
            styles |= {f"self_attention.{name}_layernorm": by_heads for name in "qk"}
    if isinstance(mlp, MoELayer):
        layer.mlp = OwnPartMoELayer(mlp, mesh) if has_whole_experts else SplitMoELayer(mlp, mesh, between)
        if mlp.shared_experts is not None:
            # After a layer with split experts it gets whole sequences.
            before = between if has_whole_experts else Replicate()
            styles |= _mlp_styles("mlp.shared_experts", mlp.shared_experts, before, between)
    else:
        styles |= _mlp_styles("mlp", mlp, between, between)
    products = {module: module.fp8 for module in layer.modules() if isinstance(module, Linear)}
    for linear in products:
        linear.fp8 = None  # the styles take all modules below a linear layer for linear layers, too
    parallelize_module(layer, mesh, styles)
    for linear, product in products.items():
        linear.fp8 = product
        if product is not None and isinstance(linear.weight, DTensor):
            linear.fp8 = SplitProduct(product)


def _mlp_styles(
    path: str, mlp: nn.Module, before: Shard | Replicate, after: Shard | Replicate
) -> dict[str, ParallelStyle]:
    into = _split_rows(f"{path}.linear_fc1", mlp.get_submodule("linear_fc1"), before)
    return into | {f"{path}.linear_fc2": RowwiseParallel(output_layouts=after)}


def _split_rows(path: str, projection: nn.Module, before: Shard | Replicate) -> dict[str, ParallelStyle]:
    """Split a projection by rows; separate ones share one gathered input."""
    if isinstance(projection, Linear):
        return {path: ColwiseParallel(input_layouts=before)}
    whole = PrepareModuleInput(input_layouts=(before,), desired_input_layouts=(Replicate(),))
    return {path: whole, f"{path}.*": ColwiseParallel()}


def _split_latents(
    attention: LatentAttention, mesh: DeviceMesh, between: Shard | Replicate
) -> dict[str, ParallelStyle]:
    """Split the up projections by heads; the down projections and their norms run on all ranks, or on parts of the sequence."""
    styles: dict[str, ParallelStyle] = {
        f"self_attention.qkv_up_proj.{name}": ColwiseParallel(input_layouts=between)
        for name in ("linear_q_up_proj", "linear_kv_up_proj")
    }
    if isinstance(between, Shard):
        for name, norm in (("linear_q_down_proj", "q_layernorm"), ("linear_kv_down_proj", "kv_layernorm")):
            # Without query latents there are stand-ins without parameters.
            if isinstance(down := attention.get_submodule(name), Linear):
                setattr(attention, name, SequenceLinear(down, mesh))
                styles[f"self_attention.{norm}"] = SequenceParallel()
    return styles


def _split_up_projection(projection: UpProjection, mesh: DeviceMesh, between: Shard | Replicate) -> None:
    """Give this rank its heads; all of them use the rotated part of the keys."""
    projection.heads //= mesh.size()

    def share_rotated(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        q_BTQ, kv_BTL, k_BTR, rotary = args
        return q_BTQ, kv_BTL, with_partial_gradient(k_BTR, mesh, between), rotary

    projection.register_forward_pre_hook(share_rotated)


def _split_ends(model: GPTModel, mesh: DeviceMesh, between: Shard | Replicate) -> None:
    """Split the embedding and the LM head along the vocabulary."""
    ends = dict(model.named_children())  # a stage of a pipeline may lack either
    if "embedding" in ends:
        has_positions = model.embedding.position_embeddings is not None
        # Learned positions are added to whole sequences, as in Megatron.
        words = Replicate() if has_positions else between
        style = RowwiseParallel(input_layouts=Replicate(), output_layouts=words)
        parallelize_module(model.embedding, mesh, {"word_embeddings": style})
        if has_positions and isinstance(between, Shard):
            parts = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=between)
            parallelize_module(model.embedding, mesh, parts)
    if "output_layer" in ends:
        if isinstance(between, Shard):
            parallelize_module(model.decoder.final_layernorm, mesh, SequenceParallel())
        head = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1))
        parallelize_module(model.output_layer, mesh, head)
    if model.config.share_embeddings_and_output_weights and {"embedding", "output_layer"} <= ends.keys():
        model.output_layer.weight = model.embedding.word_embeddings.weight


def _fused(model: GPTModel) -> Iterator[tuple[nn.Module, Sequence[int]]]:
    """Yield the fused projections with the rows of each part in the whole model; `SplitMoELayer` has the experts'."""
    config = model.config
    query, group = (heads * config.kv_channels for heads in (config.num_attention_heads, config.num_query_groups))
    for module in model.modules():
        if isinstance(module, SelfAttention) and isinstance(module.linear_qkv, Linear):
            yield module.linear_qkv, (query, group, group)
        elif isinstance(module, MLP) and isinstance(module.linear_fc1, Linear) and config.gated_linear_unit:
            width = module.linear_fc1.weight.shape[0] // 2  # a shared expert's own projection
            yield module.linear_fc1, (width, width)


def fused_parameters(model: GPTModel) -> dict[str, tuple[Sequence[int], int]]:
    """Return the names of the parameters that `tensor_parallel` reorders.

    With each, the rows of each fused part in the whole model, and the dimension of these rows.
    """
    fused = {id(parameter): (sizes, 0) for linear, sizes in _fused(model) for parameter in linear.parameters()}
    for module in model.modules():
        if isinstance(module, SplitMoELayer) and model.config.gated_linear_unit:
            weight = module.experts.linear_fc1.weight
            fused[id(weight)] = ((weight.shape[1] // 2,) * 2, 1)
    return {name: fused[id(p)] for name, p in model.named_parameters() if id(p) in fused}
