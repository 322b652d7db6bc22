"""What a repeated unit takes inside torch.compile, as recorded, against what is alive there; and what cannot be recorded."""

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from compiled_blocks import few_variants, stack_of
from recollect.engine.compiled.compiled_engine import compile_forward
from recollect.errors import NotYetError, RecordError
from recollect.planning.compiled_menu import Keeps, compiled_menu
from recollect.plans.action import Action
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.ranks.group import ALONE, Place, Ranks
from recollect.recording.engines import _DEFAULT, _in_all
from recollect.recording.unit_runs import UnitRuns
from recollect.recording.variants import with_variants

ROWS, WIDTH = 16, 32
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def recorded(block: type[nn.Module] = Block, **settings: Any) -> Profile:
    torch.manual_seed(0)
    return recollect.record(stack_of(block, WIDTH), torch.randn(ROWS, WIDTH), loss_fn=torch.sum, **settings)


@pytest.fixture(scope="module")
def plain() -> Profile:
    return recorded()


@pytest.fixture(scope="module")
def compiled() -> Profile:
    with few_variants():
        return recorded(engine="compile")


def unit_graph(profile: Profile) -> UnitGraph:
    return next(profile.graph_of(call) for call in profile.calls if call.path == "blocks.0")


def names(keeps: Keeps, graph: UnitGraph) -> set[str]:
    outputs = {value.name for value in graph.values if value.is_output}
    return {name for name, action in keeps.items() if action == Action.KEEP} - outputs


def live_bytes(graph: UnitGraph, kept: tuple[int, ...] | None) -> int:
    """Bytes that a compiled block holds between forward and backward, besides its input, output and parameters."""
    block, x = Block(), torch.randn(ROWS, WIDTH, requires_grad=True)
    keeps = (
        None
        if kept is None
        else {
            value.name: Action.KEEP if index in kept or value.is_output else Action.RECOMPUTE
            for index, value in enumerate(graph.values)
            if value.producer is not None
        }
    )
    output = compile_forward(block.forward, keeps)(x)
    node = output.grad_fn
    assert node is not None
    saved = (*node.saved_tensors, *getattr(node, "_tensors_no_vc_check", ()))  # type: ignore[attr-defined]
    others = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), x, output)}
    alive = {
        t.untyped_storage().data_ptr(): (weakref.ref(t.untyped_storage()), t.untyped_storage().nbytes()) for t in saved
    }
    del saved, output
    return sum(
        nbytes for address, (storage, nbytes) in alive.items() if address not in others and storage() is not None
    )


def test_every_repeated_unit_has_pytorchs_choice_first_and_entries_of_the_menu(compiled: Profile) -> None:
    graph = unit_graph(compiled)
    menu = [names(keeps, graph) for keeps in compiled_menu(graph)]
    assert len(graph.variants) >= 2
    for variant in graph.variants[1:]:
        kept = {graph.values[index].name for index in variant.kept}
        # What backward does not need is not kept, though the entry says so.
        assert any(kept <= entry for entry in menu)
    assert all(bool(compiled.graph_of(call).variants) == call.repeated for call in compiled.calls)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="nodes of an older PyTorch do not show all that they save")
def test_own_bytes_are_those_of_the_tensors_that_are_alive(compiled: Profile) -> None:
    graph = unit_graph(compiled)
    default, *others = graph.variants
    assert live_bytes(graph, None) == default.own_bytes > 0
    assert [live_bytes(graph, variant.kept) for variant in others] == [variant.own_bytes for variant in others]
    assert all(variant.own_bytes == sum(graph.values[i].nbytes for i in variant.kept) for variant in others)


def test_the_input_is_held_and_let_go_in_backward(compiled: Profile) -> None:
    graph = unit_graph(compiled)
    (x,) = [index for index, value in enumerate(graph.values) if value.producer is None]
    weights = sum(parameter.nbytes for parameter in Block().parameters())
    for variant in graph.variants:
        assert variant.held == (x,)
        assert [value for *_, value in variant.backward].count(x) == 1
        # What is kept and the gradient of the output go; gradients of the parameters and of the input come.
        assert sum(change for _, change, _ in variant.backward) == weights - variant.own_bytes


class Beside(Ranks):
    """This process, and one that measured less."""

    is_alone = False

    def __init__(self, lacks: Any) -> None:
        self.lacks = lacks

    def gather(self, value: Any, place: Place) -> list[Any]:
        return [value, {key for key in value if not self.lacks(*key)}]


def test_what_another_process_did_not_measure_is_not_planned(compiled: Profile) -> None:
    whole = unit_graph(compiled)
    last = frozenset(whole.values[index].name for index in whole.variants[-1].kept)

    def left(lacks: Any) -> UnitGraph:
        return unit_graph(_in_all(compiled, Beside(lacks), Place.START))

    assert _in_all(compiled, ALONE, Place.START) == compiled
    fewer = left(lambda path, key: key == last)
    assert fewer.variants == whole.variants[:-1]
    # Without PyTorch's own choice in all, the step cannot be the compiled one.
    none = left(lambda path, key: key == _DEFAULT)
    assert (none.variants, none.eager_s) == ((), 0.0)


class Breaks(Block):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x * 2
        return super().forward(x)


class Locked(Block):
    def __init__(self) -> None:
        super().__init__()
        self.stream = (line for line in "ab")  # cannot be copied


def test_units_with_graph_breaks_get_no_variants_and_are_named() -> None:
    message = (
        r"unit 'blocks\.0' and 1 more cannot run inside torch\.compile: Unsupported: .* leave them outside the compiler"
    )
    with pytest.warns(UserWarning, match=message):
        profile = recorded(Breaks, engine="compile")
    assert not any(graph.variants for graph in profile.graphs)


def test_units_that_cannot_be_copied_get_no_variants_and_are_named() -> None:
    with pytest.warns(
        UserWarning, match=r"cannot run inside torch\.compile: a copy of it cannot be made \(TypeError: "
    ):
        recorded(Locked, engine="compile")


def test_units_without_a_sample_get_no_variants_and_are_named(plain: Profile) -> None:
    with pytest.warns(UserWarning, match="'blocks.0' and 1 more cannot run .*: a copy of it cannot run by itself"):
        found = with_variants(plain, {}, UnitRuns(CPU))
    assert found == plain


def test_another_engine_is_an_error() -> None:
    with pytest.raises(RecordError, match="engine: got 'region', expected 'tape', 'auto', 'graph', 'compile'"):
        recorded(engine="region")


def test_steps_that_cannot_be_measured_are_refused() -> None:
    with pytest.raises(NotYetError, match="engine='compile', split_backward=True: not yet: .* the two halves"):
        recorded(engine="compile", split_backward=True)


@pytest.mark.parametrize("setting", ["retain_graph", "create_graph"])
def test_a_backward_that_keeps_its_graph_is_refused(setting: str) -> None:
    model, x = stack_of(Block, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True)

    def step() -> None:
        loss = model(x).sum()
        loss = loss + torch.autograd.grad(loss, x, **{setting: True})[0].sum()
        loss.backward()

    with pytest.raises(NotYetError, match=f"{setting}=True: not yet: compiled code that runs backward twice"):
        recollect.record(model, step=step, engine="compile")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", r"ignore:The \.grad attribute of a Tensor that is not a leaf")
def test_blocks_that_their_user_wrapped_keep_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.compile(block)` puts a wrapper around the block, whose name all names of values then begin with."""

    def one_value(graph: UnitGraph) -> list[Keeps]:
        return [{value.name: Action("keep" if "up.mm" in value.name else "recompute") for value in graph.values}]

    monkeypatch.setattr("recollect.recording.engines.with_variants", partial(with_variants, menu=one_value))
    model = stack_of(Block, WIDTH)
    for index, block in enumerate(list(model.blocks)):
        model.blocks[index] = torch.compile(block)  # type: ignore[call-overload]
    graph = unit_graph(recollect.record(model, torch.randn(ROWS, WIDTH), loss_fn=torch.sum, engine="compile"))
    kept = [{graph.values[value].name for value in variant.kept} for variant in graph.variants[1:]]
    assert kept == [{"_orig_mod.up.mm"}]
