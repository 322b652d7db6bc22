"""Recording a step: what a profile says, that everything is left as it was, and each refusal."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

import hugging_face_flag
import recollect
from blocks import Computes, Stack, adds_in_place, mean_square
from contract_units import UNITS
from gradients import step_of
from recollect.engine.content import has_same_bits
from recollect.errors import (
    AlreadyAppliedError,
    BudgetTooSmallError,
    RecordError,
)
from recollect.profile import events
from recollect.profile.events import SAVE
from recollect.profile.graph import UnitGraph, ValueRecord
from recollect.profile.profile import Profile
from recorded_once import recorded_once
from small_llama import batch_of, graph_at, llama
from tiers import long
from zoo import ZOO

GENERATOR_BYTES = torch.get_rng_state().nbytes


def value(graph: UnitGraph, name: str) -> ValueRecord:
    found = [value for value in graph.values if value.name == name and value.producer is not None]
    assert len(found) == 1, f"{name} among {[value.name for value in graph.values]}"
    return found[0]


@pytest.mark.parametrize("name", ["llama", "t5", "resnet", "mixtral"])
@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_everything_is_left_as_it_was(name: str, fake: bool) -> None:
    if fake and name == "mixtral":
        pytest.skip("routing depends on data")
    case = ZOO[name]
    model, batch = case.model(), case.data()
    optimizer = torch.optim.AdamW(model.parameters())
    expected = step_of(case, model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    grads = [parameter.grad for parameter in model.parameters()]
    before = {key: (id(tensor), tensor.detach().clone()) for key, tensor in _tensors(model)}
    inside = [(path, id(module), sorted(vars(module)), module.training) for path, module in model.named_modules()]
    generator = torch.get_rng_state()
    recollect.record(model, batch, optimizer=optimizer, loss_fn=case.loss_fn, fake=fake)
    assert torch.equal(generator, torch.get_rng_state())
    assert inside == [
        (path, id(module), sorted(vars(module)), module.training) for path, module in model.named_modules()
    ]
    for key, tensor in _tensors(model):
        assert id(tensor) == before[key][0] and has_same_bits(tensor, before[key][1]), key
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert parameter.grad is grad and grad is not None and bool((grad == 1).all())
        assert not hasattr(parameter.untyped_storage(), "_recollect_tracker")
    assert optimizer.state == {}
    assert step_of(case, model).keys() == expected.keys()
    assert all(has_same_bits(tensor, expected[key]) for key, tensor in step_of(case, model).items())


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def test_everything_is_left_as_it_was_after_an_exception() -> None:
    model = llama()
    inside = {path: sorted(vars(module)) for path, module in model.named_modules()}
    for batch, fake in itertools.product([{"tokens": "words"}, batch_of(length=3) | {"labels": None}], [False, True]):
        with pytest.raises(RecordError):
            recollect.record(model, batch, fake=fake)
        assert {path: sorted(vars(module)) for path, module in model.named_modules()} == inside
        assert all(parameter.grad is None and type(parameter) is nn.Parameter for parameter in model.parameters())
    recollect.record(model, batch_of())


@pytest.mark.parametrize("name", ["t5", *long(["deepseek_v3"])])
def test_profile_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    case = ZOO[name]
    model = case.model()
    profile = recollect.record(
        model, case.data(), loss_fn=case.loss_fn, optimizer=torch.optim.SGD(model.parameters(), momentum=0.9)
    )
    assert Profile.from_json(profile.to_json()) == profile
    for file in ("profile.json", "profile.json.gz"):
        profile.save(tmp_path / file)
        loaded = Profile.load(tmp_path / file)
        assert loaded == profile
    assert recollect.plan(loaded, "95%") == recollect.plan(profile, "95%")


def test_each_result_in_a_list_has_a_name_and_is_kept() -> None:
    model = UNITS["foreach"].model()
    profile = recollect.record(model, torch.ones(4, 8), loss_fn=sum, units=model.paths)
    values = [value for value in profile.graphs[-1].values if value.name.startswith("_foreach_mul")]
    assert [value.name for value in values] == ["_foreach_mul", *(f"_foreach_mul.{n}" for n in (1, 2, 3))]
    assert all(value.must_keep for value in values)


def test_what_was_recorded_in_words() -> None:
    profile = recorded_once(llama(), batch_of())
    assert (profile.model_class, profile.device, profile.device_name) == ("GPTModel", "cpu", "cpu")
    assert profile.batch == "tokens int64[4, 32], labels int64[4, 32]"
    assert profile.torch_version == torch.__version__
    assert not profile.fake and profile.step_s > 0
    assert repr(profile).startswith("Profile(GPTModel on cpu, batch tokens int64[4, 32], ")


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_repeated_layers_share_one_graph(fake: bool) -> None:
    profile = recorded_once(llama(), batch_of(), **({"fake": True} if fake else {}))
    layers = [call for call in profile.calls if call.repeated]
    assert [call.path for call in layers] == [f"decoder.layers.{i}" for i in range(4)]
    # The first layer's input is an embedding and not another layer's sum; its graph is the same all the same.
    assert len({call.graph for call in layers}) == 1
    assert [call.chained for call in profile.calls if call.repeated] == [True] * 4


def test_layer_by_hand() -> None:
    """Names, sizes and flags of a small layer, worked out by hand."""

    def layer() -> Computes:
        up, down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)
        return Computes(lambda self, x: self.down(self.up(x).sin().exp_()) + x, up=up, down=down)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), layer(), layer())
    profile = recollect.record(model, torch.randn(10, 8), loss_fn=mean_square)
    graph = graph_at(profile, "1")
    row = 10 * 4
    expected = {
        "up.mm": (32 * row, True, False),  # sin saves its input
        "sin": (32 * row, False, False),
        "exp_": (32 * row, True, False),  # exp_ saves its result, and so does the product
        "down.mm": (8 * row, False, False),
        "add": (8 * row, True, True),  # the next layer saves its input
    }
    made = {v.name: (v.nbytes, v.saved, v.is_output) for v in graph.values if v.producer is not None}
    assert made == expected
    assert value(graph, "sin").mutated_later and not value(graph, "up.mm").mutated_later
    assert [(op.name, op.mutates) for op in graph.ops] == [
        ("up.mm", False), ("sin", False), ("exp_", True), ("down.mm", False), ("add", False)
    ]  # fmt: skip
    assert graph.saved_bytes == (32 + 32 + 8) * row
    first, second = (call for call in profile.calls if call.path in ("1", "2"))
    assert first.chained and [origin[1] for origin in second.origins] == [profile.calls.index(first)]


def test_a_module_that_layers_share_has_a_name_in_each() -> None:
    """Like the activation of all layers of a YOLO."""
    act = nn.SiLU()
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), act), nn.Sequential(nn.Linear(8, 8), nn.Sequential(act, act)))
    profile = recollect.record(model, torch.randn(4, 8), loss_fn=mean_square, units=["0", "1"])
    names = [[op.name for op in profile.graph_of(call).ops] for call in profile.calls[:2]]
    assert names == [["0.addmm", "1.silu"], ["0.addmm", "1.0.silu", "1.0.silu#1"]]


class Irreps(tuple[Any, ...]):
    """A tuple that cannot say how long it is, as e3nn's."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_tables_that_a_layer_holds_are_there_throughout() -> None:
    layer = Computes(lambda self, x: self.linear(x) * self.tables["cos"], linear=nn.Linear(8, 8))
    layer.tables = {"cos": torch.ones(8)}
    layer.tables["all"] = Irreps([layer.tables])  # type: ignore[assignment]
    profile = recollect.record(nn.Sequential(layer), torch.randn(4, 8), loss_fn=mean_square, units=["0"])
    assert [op.name for op in profile.graph_of(profile.calls[0]).ops] == ["linear.addmm", "mul"]
    assert profile.persistent["other_tensors"] == 8 * 4


def test_what_is_made_between_units_lives_as_long_as_a_unit_needs_it() -> None:
    """A unit's input that the model's own code made: without a plan's help it dies when the model lets go of it."""

    layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
    model = Computes(lambda self, x: self.layers[1](self.layers[0](x * 2) * 2), layers=layers)
    profile = recollect.record(model, torch.randn(4, 8), loss_fn=mean_square, units=["layers.0", "layers.1"])
    second = profile.calls[1]
    ((value, storage),) = second.outside
    assert profile.graph_of(second).values[value].nbytes == 4 * 8 * 4
    logged = profile.log.events
    assert (events.SAVE, 1, value) in [event[:3] for event in logged]  # by the linear layer, for its weight's gradient
    assert logged.index((events.FREE, storage)) < logged.index((events.PHASE, events.BACKWARD))


def test_phases_come_in_order() -> None:
    model = llama()
    profile = recollect.record(model, batch_of(), optimizer=torch.optim.AdamW(model.parameters()))
    log = list(profile.log.events)
    phases = [event[1] for event in log if event[0] == events.PHASE]
    assert phases == [events.FORWARD, events.BACKWARD, events.OPTIMIZER]
    saves = [event[3] for event in log if event[0] == events.SAVE]
    assert sorted(event[1] for event in log if event[0] == events.RELEASE) == sorted(saves)


def test_accumulated_gradients_count() -> None:
    model, batch = llama(), batch_of()
    without = recorded_once(model, batch)
    profile = recollect.record(model, batch, gradients="accumulated")
    assert without.persistent["gradients"] == 0
    assert profile.persistent["gradients"] == profile.persistent["parameters"]
    assert all(parameter.grad is None for parameter in model.parameters())


def graph_with(function: Callable[[Tensor], Tensor]) -> UnitGraph:
    torch.manual_seed(0)
    units = (Computes(lambda self, x: function(self.linear(x)), linear=nn.Linear(8, 8)) for _ in range(2))
    model = nn.Sequential(*units)
    return graph_at(recollect.record(model, torch.randn(5, 8), loss_fn=mean_square), "1")


CHOICES: dict[str, tuple[Callable[[Tensor], Tensor], set[str]]] = {
    "topk": (lambda x: x * x.sin().topk(1).values.exp(), {"topk.0", "topk.1"}),
    "sort": (lambda x: x.sin().sort(-1).values.exp(), {"sort.0", "sort.1"}),
    "argmax": (lambda x: x.sin() * F.one_hot(x.argmax(-1), 8), {"argmax"}),
    "max": (lambda x: x * x.max(-1, keepdim=True).values.exp(), {"max.0", "max.1"}),
    "nonzero": (lambda x: x[(x > 0).any(-1).nonzero()[:, 0]].sin().exp(), {"nonzero"}),
    "no choice": (lambda x: x.sin().exp() + 1, set()),
}


@pytest.mark.parametrize(("function", "kept"), CHOICES.values(), ids=CHOICES)
def test_choices_must_be_kept(function: Callable[[Tensor], Tensor], kept: set[str]) -> None:
    graph = graph_with(function)
    must_keep = {value.name for value in graph.values if value.must_keep and value.producer is not None}
    assert must_keep & kept == kept
    assert not must_keep & {"linear.addmm", "sin", "exp", "add"}


def test_write_that_reads_another_part_of_the_same_storage() -> None:
    graph = graph_with(lambda x: x.sin() if x[:, :4].add_(x[:, 4:]) is not None else x)
    write = next(op for op in graph.ops if op.mutates)
    assert [graph.values[i].name for i in (*write.inputs, *write.outputs)] == ["linear.addmm", "add_"]


@pytest.mark.parametrize(
    ("function", "op", "state_bytes"),
    [
        (lambda x: F.dropout(x.sin(), 0.5), "bernoulli_", GENERATOR_BYTES),
        (lambda x: x * torch.rand_like(x), "rand_like", GENERATOR_BYTES),
        (lambda x: x + torch.randn(8), "randn", GENERATOR_BYTES),
        (lambda x: x.sin(), "sin", 0),
        (lambda x: F.dropout(x.sin(), 0.5, training=False), "sin", 0),
    ],
    ids=["dropout", "rand_like", "randn", "sin", "dropout in eval"],
)
def test_random_ops_hold_the_generators_state(function: Callable[[Tensor], Tensor], op: str, state_bytes: int) -> None:
    graph = graph_with(function)
    assert {one.name: one.state_bytes for one in graph.ops}[op] == state_bytes
    assert sum(one.state_bytes for one in graph.ops) == state_bytes


def test_batch_that_the_model_rejects() -> None:
    message = (
        r"^GPTModel rejected the batch \(input_ids int64\[2, 3\]\): TypeError: .*unexpected keyword argument 'input_ids'\. A "
        "dict is passed as keywords, a tuple or list as positions, anything else as the only argument"
    )
    for fake in (False, True):
        with pytest.raises(RecordError, match=message):
            recollect.record(llama(), {"input_ids": torch.zeros(2, 3, dtype=torch.int64)}, fake=fake)


def test_an_op_that_fails_within_a_unit_is_not_part_of_the_step() -> None:
    def tries(x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            return x @ x
        return x.sin()

    assert [one.name for one in graph_with(tries).ops] == [one.name for one in graph_with(torch.sin).ops]


def test_model_with_a_plan_on_it() -> None:
    model, batch = llama(), batch_of()
    plan = recollect.fit(model, batch, "80%")
    message = r"module .decoder\.layers\.0. recomputes already, by a recollect plan.*remove that plan first: .*applied\.remove"
    with pytest.raises(AlreadyAppliedError, match=message):
        recollect.record(model, batch)
    with pytest.raises(BudgetTooSmallError):
        recollect.fit(model, batch, 1)
    (applied,) = recollect.applied_to(model)
    assert applied.plan is plan, "no plan fitted, so the earlier one stays"
    replaced = recollect.fit(model, batch, "90%")
    (applied,) = recollect.applied_to(model)
    assert applied.plan is replaced
    applied.remove()
    assert recollect.record(model, batch).calls


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_model_with_a_checkpoint_wrapper(fake: bool) -> None:
    model = llama()
    model.decoder.layers[2] = checkpoint_wrapper(model.decoder.layers[2])
    message = (
        r"module 'decoder\.layers\.2' recomputes already, by torch's CheckpointWrapper; a value would be "
        r"recomputed twice\. To have recollect decide, build the model without checkpoint_wrapper\.$"
    )
    with pytest.raises(AlreadyAppliedError, match=message):
        recollect.record(model, batch_of(), fake=fake)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_model_with_hugging_faces_flag(name: str) -> None:
    """GPT-2 keeps it on each block and T5 on the stack as well; both are refused by name."""
    case = ZOO[name]
    model: Any = case.model()
    hugging_face_flag.enable(model)
    message = (
        r"recomputes already, by Hugging Face's gradient checkpointing; .* "
        r"call model\.(gradient|activation)_checkpointing_disable\(\) first"
    )
    with pytest.raises(AlreadyAppliedError, match=message):
        recollect.record(model, case.data())
    hugging_face_flag.disable(model)
    assert recollect.record(model, case.data()).calls


def test_stack_under_autocast() -> None:
    model = Stack(width=16, depth=3)
    with torch.autocast("cpu", torch.bfloat16):
        profile = recollect.record(model, torch.randn(6, 16), loss_fn=mean_square)
    graph = graph_at(profile, "blocks.1")
    assert value(graph, "up.addmm").nbytes == 2 * 6 * 64


def test_layers_that_do_not_run() -> None:
    containers = {name: nn.Sequential(nn.Linear(8, 8), nn.GELU()) for name in ("first", "second")}
    model = Computes(lambda self, x: self.second[1](self.second[0](self.first[1](self.first[0](x)))), **containers)
    batch = torch.randn(16, 8)
    message = (
        r"^none of the 2 layers of Computes ran, such as 'first': its forward does not call them, but perhaps what is in "
        r'them, so they recompute nothing\. Name modules that it calls, or plan it as one: units=\[""\]\.$'
    )
    with pytest.warns(UserWarning, match=message):
        assert recollect.record(model, batch, loss_fn=mean_square).calls == ()
    profile = recollect.record(model, batch, loss_fn=mean_square, units=[""])
    assert recollect.plan(profile, "90%").units[""].recomputes_anything


def up() -> Computes:
    """[n, 8] -> [n, 8], a value that nothing of its own saves."""
    return Computes(lambda self, x: self.linear(x).sin() * 2, linear=nn.Linear(8, 8))


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("in_place", [True, False], ids=["written", "read"])
def test_what_another_unit_writes_to_has_to_be_kept(in_place: bool, fake: bool) -> None:
    clip = torch.relu_ if in_place else torch.relu
    model = nn.Sequential(up(), Computes(lambda self, x: self.linear(clip(x)), linear=nn.Linear(8, 8)))
    profile = recollect.record(
        model, torch.randn(4, 8), loss_fn=lambda output: output.square().mean(), units=["0", "1"], fake=fake
    )
    kept = {value.name: value.must_keep for value in graph_at(profile, "0").values if value.producer is not None}
    assert kept == {"linear.addmm": False, "sin": False, "mul": in_place}


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_what_is_made_of_a_value_that_is_written_to_later_has_to_be_kept(fake: bool) -> None:
    model = nn.Sequential(up(), *(adds_in_place(8) for _ in range(2)))
    profile = recollect.record(model, torch.randn(4, 8), loss_fn=mean_square, units=["0", "1", "2"], fake=fake)
    for path in ("1", "2"):
        kept = {value.name: value.must_keep for value in graph_at(profile, path).values if value.producer is not None}
        assert kept == {"mul": True, "sin": False, "linear.addmm": False, "cos": False}


def test_what_is_made_of_a_buffer_that_a_function_fills_has_to_be_kept() -> None:
    """A recipe of it would hold a copy of the buffer, which no prediction counts."""
    model = UNITS["function that fills slices"].model()
    profile = recollect.record(model, torch.randn(4, 8), loss_fn=sum, units=model.paths)
    values = graph_at(profile, model.paths[0]).values
    assert {"sum": True, "sum#1": True, "sum#2": False}.items() <= {v.name: v.must_keep for v in values}.items()


def test_every_run_saves_the_same() -> None:
    inner = Stack(width=16, depth=2)
    model = Computes(lambda self, x: torch.stack([self.inner(x).square().mean() for _ in range(4)]).mean(), inner=inner)
    profile = recollect.record(model, torch.randn(8, 16))
    savers = Counter(saver for *_, saver in profile.log.operands(SAVE))
    saves = {}
    for index, call in enumerate(profile.calls):
        saves.setdefault(call.path, []).append(savers[index])
    assert all(len(counts) == 4 and len(set(counts)) == 1 for counts in saves.values()), saves
