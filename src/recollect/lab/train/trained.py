"""Build the model of a run, spread over the processes, and its optimizer.

The model is built and spread on the meta device, where it takes no memory. A process's own part is drawn into place.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import recollect
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.fp8_casts import DelayedScaling
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.seed_weights import SeedWeights
from recollect.lab.parallel.mesh import data_parallel, share_model
from recollect.lab.parallel.pipeline_step import PipelineStep
from recollect.lab.parallel.stages import LossStage, PipelineRank
from recollect.lab.parallel.tensor import fused_parameters
from recollect.lab.train.config import TrainConfig
from recollect.lab.train.exchange import Exchange, PipelineExchange, RanksExchange
from recollect.lab.train.optimizer_step import SMALLER, build_optimizer, check_memory, resolve_device
from recollect.lab.train.processes import Processes
from recollect.lab.train.sharded_checkpoint import parts_of


@dataclass(frozen=True, eq=False)
class Trained:
    """The model and optimizer that a run trains."""

    model: GPTModel
    """The model, with this process's part of the weights."""
    wrapped: nn.Module
    """The module to train: the model, or the wrapper that reduces its gradients."""
    optimizer: torch.optim.Optimizer
    exchange: Exchange

    def step(self, batches: Sequence[tuple[Tensor, Tensor]], *, clip_norm: float) -> tuple[float, float]:
        """Run one optimizer step over the micro-batches of this process: tokens and labels, each int64 [B, T].

        Return the mean loss, and the norm of the gradient before it is clipped (nan if `clip_norm` is 0, and it is not); of all
        processes. Gradients are None afterwards.
        """
        loss = self.exchange.accumulate(self.wrapped, batches, len(batches))
        self.exchange.reduce_gradients(self.model.parameters())
        norm = self.exchange.clip(self.model.parameters(), clip_norm) if clip_norm else math.nan
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # frees their memory for the next forward
        self.model.update_expert_bias()
        return self.exchange.mean([loss]), norm

    @torch.no_grad()
    def validation_loss(self, batches: Iterable[tuple[Tensor, Tensor]], total: int | None = None) -> float:
        """Return the mean loss over batches of equal size, without dropout and for the next token only.

        Of the batches of all processes the first `total` count: the last ones of some may be repeats, for all to run alike.
        """
        was_training = self.wrapped.training
        self.wrapped.eval()
        losses = self.exchange.losses(self.wrapped, batches)
        self.wrapped.train(was_training)
        return self.exchange.mean(losses, total)


def build_trained(dimensions: TransformerConfig, config: TrainConfig, processes: Processes) -> Trained:
    """Build the model with the seed's weights, the same as in one process, and spread it.

    A process never holds more of the weights than its own part and a few megabytes.
    """
    # Code before the first step, such as a recorded step, draws the same random numbers in all processes.
    torch.manual_seed(config.step.seed)
    with torch.device("meta"):
        # Weights stay fp32 even with bf16 activations and matrix products, because AdamW's updates are smaller than the spacing
        # of bf16 numbers near the weights and would be lost.
        model = GPTModel(dimensions, compute_dtype=torch.bfloat16 if config.step.precision == "bf16" else None)
    device = resolve_device(config.step.device)
    if processes.mesh is None:
        sizes = {"batch_size": config.optim.batch_size, "seq_length": config.data.seq_length}
        check_memory(model, 8 * sizes["batch_size"] * sizes["seq_length"], device, sizes, SMALLER)
    weights = SeedWeights(model, config.step.seed, device)
    if processes.layout.pipeline_model_parallel_size > 1:
        return _pipeline(model, weights, config, processes)
    mesh, layout = processes.mesh, processes.layout
    is_sharded = _spread(model, config, processes)
    _draw(weights, model, layout.tensor_model_parallel_size)
    wrapped: nn.Module = model
    # DDP takes no DTensors either: their gradients are reduced after backward.
    has_dtensors = is_sharded or layout.tensor_model_parallel_size > 1 or layout.expert_model_parallel_size > 1
    if mesh is not None and mesh.gradients.size() > 1 and not has_dtensors:
        group = mesh.gradients.get_group()
        wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    exchange = Exchange() if mesh is None else RanksExchange(processes, mesh, wrapped)
    return Trained(model, wrapped, build_optimizer(model, config.optim), exchange)


def _pipeline(model: GPTModel, weights: SeedWeights, config: TrainConfig, processes: Processes) -> Trained:
    mesh = processes.mesh
    assert mesh is not None
    layers = processes.layout.layers_of_stages(model.config.num_layers)
    stages: dict[int, LossStage] = {}
    for number in range(mesh.pipeline.get_local_rank(), len(layers), mesh.pipeline.size()):
        with torch.device("meta"):
            stage = stages[number] = LossStage(model.config, layers[number])
        stage.compute_dtype = model.compute_dtype
        _spread(stage, config, processes)
    rank = PipelineRank(model.config, stages, layers)
    _draw(weights, rank, processes.layout.tensor_model_parallel_size)
    num_micro_batches = config.optim.num_micro_batches // processes.data_ranks
    shape = config.optim.batch_size, config.data.seq_length
    step = PipelineStep(rank, mesh.pipeline, len(layers), num_micro_batches, shape)
    return Trained(rank, rank, build_optimizer(rank, config.optim), PipelineExchange(processes, mesh, rank, step))


@torch.no_grad()
def _draw(weights: SeedWeights, model: GPTModel, tensor_ranks: int) -> None:
    """Replace parameters on the meta device by weights, and buffers by their initial values.

    They are new objects with the hooks of the old ones; references to the old ones remain valid.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    fused = fused_parameters(model) if tensor_ranks > 1 else {}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for place, parameter in [*module.named_parameters(recurse=False)]:
            if id(parameter) not in made:
                name = names[id(parameter)]
                tensor = torch.empty_like(parameter, device=weights.device)
                for chunk, part in parts_of(tensor, fused.get(name), tensor_ranks):
                    weights.write(name, part, chunk.offsets)
                made[id(parameter)] = drawn = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
                for hook in (getattr(parameter, "_backward_hooks", None) or {}).values():
                    drawn.register_hook(hook)
            setattr(module, place, made[id(parameter)])
        for place, buffer in [*module.named_buffers(recurse=False)]:
            first = 1.0 if isinstance(module, DelayedScaling) and place == "multiplier" else 0.0
            setattr(module, place, torch.full_like(buffer, first, device=weights.device))


def _spread(model: GPTModel, config: TrainConfig, processes: Processes) -> bool:
    """Leave this process its part of a model; return whether the run also shares parameters, gradients or optimizer state.

    ZeRO-1 is FSDP2 that frees weights only after backward. `ZeroRedundancyOptimizer` takes no DTensors, which excludes
    tensor parallelism.
    """
    mesh = processes.mesh
    if mesh is None:
        return False
    share_model(model, processes.layout, mesh)
    if config.holds_parts:
        recollect.distribute_saved_activations(model, mesh.tensor.get_group())
    if processes.sharding == "none" or mesh.gradients.size() == 1:
        return False
    data_parallel(model, mesh.gradients, expert_mesh=mesh.replicas, reshard_after_forward=processes.sharding == "all")
    return True
