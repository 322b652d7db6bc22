"""The gradients of models that are split over ranks, put together again."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from recollect.lab.models.gpt import GPTModel
from recollect.lab.parallel.tensor import fused_parameters


def whole_gradients(model: GPTModel, ranks: int) -> dict[str, Tensor]:
    """The gradients of a parallel model as those of the whole one, by name; all ranks have to call it.

    `ranks` of tensor parallelism; the model may be sharded by FSDP2, too.
    """
    sizes_of = fused_parameters(model)
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        if name in sizes_of:
            sizes, dim = sizes_of[name]
            parts = [share.split([size // ranks for size in sizes], dim) for share in whole.chunk(ranks, dim)]
            whole = torch.cat([parts[rank][matrix] for matrix in range(len(sizes)) for rank in range(ranks)], dim)
        found[name] = whole
    return found
