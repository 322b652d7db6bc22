"""Compile the blocks of a model as its user may do, in each of three ways, or as a plan does."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from blocks import Stack
from recollect.engine.compiled.compiled_engine import compile_forward
from recollect.planning.compiled_menu import compiled_menu
from recollect.recording.variants import with_variants

# Dynamo looks at `.grad` of whatever it meets.
IGNORED = pytest.mark.filterwarnings(
    r"ignore:The \.grad attribute of a Tensor that is not a leaf", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
BY_INDUCTOR = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++"),
    pytest.mark.usefixtures("fresh_compiler"),
    IGNORED,
]


Gradients = list[Tensor]


def same(found: Gradients, expected: Gradients) -> bool:
    return len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


def whole(model: Any, **how: Any) -> Any:
    return torch.compile(model, **how)


def in_place(model: Any) -> Any:
    model.compile()
    return model


def stack_of(block: Callable[[], nn.Module], width: int) -> Stack:
    """Two of a block, between a stem and a head."""
    stack = Stack(width)
    stack.blocks = nn.ModuleList(block() for _ in range(2))
    return stack


def each_block(model: Any, **how: Any) -> Any:
    for number, block in enumerate(list(model.blocks)):
        model.blocks[number] = torch.compile(block, **how)
    return model


def each_block_in_place(model: Any, **how: Any) -> Any:
    for block in model.blocks:
        block.compile(**how)
    return model


def each_block_in_one_graph(model: Any) -> Any:
    return each_block(model, fullgraph=True)


def each_block_in_place_in_one_graph(model: Any) -> Any:
    return each_block_in_place(model, fullgraph=True)


def each_block_forward(model: Any) -> Any:
    for block in model.blocks:
        block.forward = torch.compile(block.forward)
    return model


@contextmanager
def compiled_without_plan(model: nn.Module, paths: Iterable[str]) -> Iterator[None]:
    """Run units inside the compiler as plans do, but leave it to PyTorch what they keep."""
    units = [model.get_submodule(path) for path in paths]
    for unit in units:
        unit.forward = compile_forward(unit.forward, None)  # type: ignore[method-assign]
    yield
    for unit in units:
        del unit.forward


@contextmanager
def few_variants() -> Iterator[None]:
    """Record of each unit one set of values, beside PyTorch's own choice: each takes a second to compile."""
    few = partial(with_variants, menu=lambda graph: compiled_menu(graph)[:1])
    with mock.patch("recollect.recording.engines.with_variants", few):
        yield
