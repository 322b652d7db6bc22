"""Compile the blocks of a model as its user may do, in each of three ways."""

from typing import Any

import torch


def each_block(model: Any) -> Any:
    """Wrap each block."""
    for number, block in enumerate(list(model.blocks)):
        model.blocks[number] = torch.compile(block)
    return model


def each_block_in_place(model: Any) -> Any:
    """Compile each block under its own name."""
    for block in model.blocks:
        block.compile()
    return model


def each_block_forward(model: Any) -> Any:
    """Compile the forward of each block."""
    for block in model.blocks:
        block.forward = torch.compile(block.forward)
    return model
