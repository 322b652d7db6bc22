"""What compiled units would take, estimated on fake tensors, against what they take."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import recollect
from compiled_blocks import few_variants, stack_of
from recollect.costs.op_work import work_of
from recollect.engine.facts import facts_of
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile

ROWS, WIDTH, HEADS = 16, 32, 2
COMPOSITE = functional.scaled_dot_product_attention


class Block(nn.Module):
    """Attention, whose random state compiled code saves, and an MLP with biases and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.norm(x).unflatten(-1, (HEADS, -1)).transpose(0, 1)[None]
        x = x + functional.scaled_dot_product_attention(heads, heads, heads)[0].transpose(0, 1).flatten(-2)
        return x + self.dropout(self.down(functional.silu(self.up(x))))


# What each thread of the CPU's attention works in, forward and backward, on these shapes; it is not in the code.
WORKSPACE_BYTES = 4160


def bytes_by_kept(profile: Profile) -> dict[Any, Any]:
    graph = next(graph for graph in profile.graphs if graph.variants)

    def named(graph: UnitGraph, values: tuple[int, ...]) -> frozenset[str]:
        return frozenset(graph.values[value].name for value in values)

    return {
        one.is_default or named(graph, one.kept): (
            (one.own_bytes, named(graph, one.held), [stretch[1:] for stretch in one.backward]),
            [one.forward_bytes, *(most_bytes for most_bytes, _, _ in one.backward)],
        )
        for one in graph.variants
    }


@pytest.fixture(scope="module", autouse=True)
def short_menu() -> Iterator[None]:
    with few_variants():
        yield


@pytest.fixture(scope="module")
def estimated() -> Profile:
    with torch.device("meta"):
        model, x = stack_of(Block, WIDTH), torch.randn(ROWS, WIDTH)
    return recollect.record(model, x, loss_fn=torch.sum, fake=True, hardware="H100", engine="compile")


def test_bytes_are_the_measured_ones(estimated: Profile) -> None:
    torch.manual_seed(0)
    found = bytes_by_kept(estimated)
    x = torch.randn(ROWS, WIDTH)
    expected = bytes_by_kept(recollect.record(stack_of(Block, WIDTH), x, loss_fn=torch.sum, engine="compile"))
    both = found.keys() & expected.keys()
    assert len(both) >= 2  # Times decide which of several stay.
    room_bytes = WORKSPACE_BYTES * torch.get_num_threads()
    for kept in both:
        (alive, most), (alive_there, most_there) = found[kept], expected[kept]
        assert alive == alive_there
        assert all(0 <= there - here <= room_bytes for here, there in zip(most, most_there, strict=True))


def test_variants_and_plans_say_that_nothing_ran(estimated: Profile) -> None:
    variants = [variant for graph in estimated.graphs for variant in graph.variants]
    assert variants and all(variant.is_estimated and variant.step_s > 0 for variant in variants)
    plan = recollect.plan(estimated, "100%")
    assert "bytes and times of compiled units are estimates" in str(plan)
    assert all(0 < variant.step_s < graph.eager_s for graph in estimated.graphs for variant in graph.variants)


def test_nothing_stays_of_an_estimate(estimated: Profile) -> None:
    """Kernels of compiled functions run again, attention is PyTorch's own."""
    assert functional.scaled_dot_product_attention is COMPOSITE
    block, x = Block().eval(), torch.randn(ROWS, WIDTH)
    torch.testing.assert_close(torch.compile(block)(x), block(x))


def test_attention_with_dropout_has_the_kernel_of_the_hardware() -> None:
    class Attends(Block):
        def forward(self, x: Tensor) -> Tensor:
            heads = self.norm(x).unflatten(-1, (HEADS, -1)).transpose(0, 1)[None]
            mixed = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
            return x + self.down(self.up(mixed[0].transpose(0, 1).flatten(-2)))

    with torch.device("meta"):
        model, x = stack_of(Attends, WIDTH), torch.randn(ROWS, WIDTH)
    profile = recollect.record(model, x, loss_fn=torch.sum, fake=True, hardware="H100", engine="compile")
    graph = next(graph for graph in profile.graphs if graph.variants)
    kept = {graph.values[value].name for variant in graph.variants for value in variant.kept}
    assert "_scaled_dot_product_flash_attention.0" in kept


def test_a_result_given_as_an_argument_is_not_read() -> None:
    x, y = torch.ones(4, 8), torch.ones(8, 16)
    plain, out = torch.ops.aten.mm.default, torch.ops.aten.mm.out
    expected = work_of(plain, facts_of(plain), (x, y), {}, x @ y)
    result = torch.empty(4, 16)
    assert work_of(out, facts_of(out), (x, y), {"out": result}, result) == expected
