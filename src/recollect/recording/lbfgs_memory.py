"""What L-BFGS holds and makes: its step runs the model itself, so a step of it cannot be tried out."""

from __future__ import annotations

import torch

from recollect.profile import events
from recollect.profile.allocator_blocks import block_bytes
from recollect.recording.optimizer_twin import local_part

# In vectors as long as all parameters together. Of the state: the last direction and gradient.
_LAST = 2
# While it runs the model: the gradient before; in a line search also the parameters where it began, and the gradients
# there and at both ends of the bracket.
_HELD, _HELD_IN_SEARCH = 1, 5
# Between runs: the gradient, its change, that of the parameters, and what the two loops over the history make.
_MADE = 5


def lbfgs_memory(optimizer: torch.optim.LBFGS, device: torch.device) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Return the bytes that it holds while the model runs, with its history full, and the events of an update."""
    (group,) = optimizer.param_groups
    parts = [local_part(parameter) for parameter in group["params"] if parameter.requires_grad]
    vector_bytes = sum(part.numel() for part in parts) * max(part.element_size() for part in parts)
    block = block_bytes(vector_bytes, device.type)
    held = _HELD_IN_SEARCH if group["line_search_fn"] else _HELD
    made = [
        (code, number, *size) for code, size in ((events.ALLOC, (block,)), (events.FREE, ())) for number in range(_MADE)
    ]
    return (_LAST + 2 * group["history_size"] + held) * block, tuple(made)
