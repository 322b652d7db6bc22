"""Plans whose units run inside `torch.compile`: what is kept, gradients, sharing, and what is refused.

Gradients are compared with those of units compiled alike without a plan.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

import recollect
from blocks import Computes
from compiled_blocks import (
    BY_INDUCTOR,
    Gradients,
    compiled_without_plan,
    each_block,
    each_block_forward,
    each_block_in_one_graph,
    each_block_in_place,
    each_block_in_place_in_one_graph,
    in_place,
    same,
    whole,
)
from compiled_units import names_of, saved_tensors, values_by_name, without_code
from recollect._torch_parallel import fake_process_group, split_backward
from recollect.engine.compiled.partitioner import PlanPartitioner
from recollect.errors import (
    ArgumentError,
    BudgetWarning,
    ConfigError,
    NotYetError,
    PlanError,
    UnsupportedModelError,
)
from recollect.lab.models.architectures import llama_config
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from small_llama import batch_of, graph_at, llama
from tiers import long_but

pytestmark = BY_INDUCTOR

NUM_BLOCKS = 3
ROWS = torch.linspace(-1, 1, 24 * 8).reshape(24, 8)


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile what several tests need once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def block(then: Callable[[Tensor], Tensor] = lambda rows: rows) -> Computes:
    """[n, 8] -> [n, 8]."""
    return Computes(
        lambda self, rows: then(rows + self.down(self.up(rows).tanh().exp())),
        up=nn.Linear(8, 16),
        down=nn.Linear(16, 8),
    )


class Model(nn.Module):
    """[n, 8] -> a loss."""

    def __init__(self, kind: Callable[[], nn.Module] = block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(NUM_BLOCKS))

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = block(rows)
        return rows.square().mean()


KEPT = {"up.addmm": "keep", "tanh": "recompute", "exp": "recompute", "down.addmm": "recompute", "add": "keep"}
PLAN = Plan({f"blocks.{index}": UnitPlan(KEPT, engine="compile") for index in range(NUM_BLOCKS)})

# As it is recorded of a model whose blocks `torch.compile(block)` has wrapped.
WRAPPED = Plan(
    {
        path: UnitPlan({f"_orig_mod.{name}": word for name, word in KEPT.items()}, engine="compile")
        for path in PLAN.units
    }
)


def built(kind: Callable[[], nn.Module] = block) -> Any:
    torch.manual_seed(0)
    return Model(kind)


def stepped(model: Any, *batch: Any, **keywords: Any) -> Gradients:
    model.zero_grad()
    torch.manual_seed(3)
    output = model(*(batch or () if keywords else batch or (ROWS,)), **keywords)
    (output if isinstance(output, Tensor) else output.loss).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.fixture(name="plain")
def plain_gradients() -> Gradients:
    model = built()
    with compiled_without_plan(model, PLAN.units):
        gradients = stepped(model)
    torch._dynamo.reset()
    counters.clear()
    return gradients


def alive_names(values: Mapping[str, Tensor], there: set[int]) -> set[str]:
    """Names of what is alive, by its content, besides memory that was there before."""
    gc.collect()
    found = set()
    for tensor in [
        one for one in gc.get_objects() if type(one) is Tensor and one.untyped_storage().data_ptr() not in there
    ]:
        try:
            found |= names_of([tensor], values)
        except (LookupError, RuntimeError):
            continue  # An index, a gradient, or a number.
    return found


def test_two_plans_on_a_llama() -> None:
    """The saved tensors of each layer are those of its plan, and the same plan on the tape keeps the same."""
    config = llama_config(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=32)
    model, batch = llama(config), batch_of(config, 2, 8)
    paths = ["decoder.layers.0", "decoder.layers.1"]
    layers = [model.get_submodule(path) for path in paths]
    graph = graph_at(recollect.record(model, batch), paths[1])
    names = [value.name for value in graph.values if value.producer is not None]
    sdpa = "self_attention.core_attention._scaled_dot_product_flash_attention_for_cpu"
    kept: list[set[str]] = [set(), {"self_attention.add", f"{sdpa}.0", f"{sdpa}.1", "add", "mlp.linear_fc1.mm"}]
    actions = [{name: "keep" if name in keep else "recompute" for name in names} for keep in kept]

    def step() -> Gradients:
        return stepped(model, **batch)

    calls: list[tuple[Any, Any]] = []
    hooks = [layer.register_forward_hook(lambda _, args, output: calls.append((args, output))) for layer in layers]
    for layer in layers:
        layer.forward = without_code(layer.forward, None)
    expected = step()
    for layer, one in zip(layers, actions, strict=True):
        layer.forward = without_code(type(layer).forward.__get__(layer), PlanPartitioner(one))
    assert same(step(), expected)
    calls.clear()
    loss = model(**batch).loss
    for layer in layers:
        del layer.forward
    for hook in hooks:
        hook.remove()
    for layer, keep, (args, output) in zip(layers, kept, calls, strict=True):
        there = [leaf for leaf in tree_leaves((args, output)) if isinstance(leaf, Tensor)]
        held = saved_tensors(output, [*there, *layer.parameters()])
        # Before 2.15, attention runs again under the state of random numbers that it had, though it draws none.
        states = [tensor for tensor in held if tensor.dtype == torch.uint8]
        assert len(states) == (torch.__version__ < (2, 15) and f"{sdpa}.0" not in keep)
        values = [tensor for tensor in held if tensor.dtype != torch.uint8]
        assert names_of(values, values_by_name(layer, *args)) == keep
        assert len(values) == len(keep)
    assert not any("forward" in vars(module) for module in model.modules())
    values_of_layer = values_by_name(layers[1], *calls[1][0])
    calls.clear()
    del loss, args, output, there, held, states, values
    gc.collect()
    before = {one.untyped_storage().data_ptr() for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)}
    units = {path: UnitPlan(one) for path, one in zip(paths, actions, strict=True)}
    with recollect.apply(model, Plan.from_json(Plan(units).to_json())):
        loss = model(**batch).loss
        alive = alive_names({name: value for name, value in values_of_layer.items() if name in names}, before)
    assert alive - {names[-1]} == kept[1]
    del loss


Compile = Callable[[Model], Any]
WRAPPING: list[Compile] = [each_block, each_block_in_one_graph]
BY_USER: list[Compile] = [
    *(whole, in_place, each_block_in_place, each_block_forward, each_block_in_place_in_one_graph, *WRAPPING)
]


ORDERS = [(compile_model, compile_first) for compile_model in BY_USER for compile_first in (True, False)]
# Each way in one order, and each order in about half of the ways.
QUICK = [row for number, row in enumerate(ORDERS) if number % 4 in (1, 2)]


@pytest.mark.parametrize(("compile_model", "compile_first"), long_but(QUICK, ORDERS, are_rows=True))
def test_what_the_user_compiled_runs_by_the_plan(compile_model: Compile, compile_first: bool, plain: Gradients) -> None:
    model = built()
    ran: Any = compile_model(model) if compile_first else model
    before = {path: vars(module).get("forward") for path, module in model.named_modules()}
    applied = recollect.apply(model, WRAPPED if compile_first and compile_model in WRAPPING else PLAN)
    if not compile_first:
        ran = compile_model(model)
    for _ in range(2):
        assert same(stepped(ran), plain)
        with torch.no_grad():
            ran(ROWS)
    ours = [key for key in counters["aot_autograd"] if key == "ok"]
    assert ours or graphs() >= 1
    applied.remove()
    if compile_first:
        assert {path: vars(module).get("forward") for path, module in model.named_modules()} == before


def test_equal_layers_share_what_was_compiled(plain: Gradients) -> None:
    model = built()
    with recollect.apply(model, PLAN):
        assert same(stepped(model), plain)
    assert graphs() == 2  # The first block's input takes no gradient.


def test_without_gradients_units_run_as_they_are() -> None:
    model = built()
    with torch.no_grad():
        expected = model(ROWS)
        with recollect.apply(model, PLAN):
            assert torch.equal(model(ROWS), expected)
    assert graphs() == 0


@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_that_come_later_run(of_all: bool) -> None:
    model = built()
    with recollect.apply(model, PLAN):
        without = stepped(model)
        register = register_module_forward_hook if of_all else model.blocks[1].up.register_forward_hook
        hook = register(lambda module, _, output: output / 2 if isinstance(module, nn.Linear) else None)
        found = stepped(model)
        hook.remove()
        assert same(stepped(model), without)
        hook = register(lambda module, _, output: output / 2 if isinstance(module, nn.Linear) else None)
    expected = stepped(model)
    hook.remove()
    assert all(map(torch.allclose, found, expected))
    assert not all(map(torch.allclose, found, without))


def test_plans_of_micro_batches(plain: Gradients) -> None:
    model = built()
    other = Plan({path: UnitPlan({**KEPT, "up.addmm": "recompute"}, engine="compile") for path in PLAN.units})
    with recollect.apply(model, [PLAN, other]):
        for _ in range(4):
            assert same(stepped(model), plain)
    assert graphs() == 4


def refused(model: nn.Module, error: type[Exception], said: str) -> None:
    with recollect.apply(model, PLAN), pytest.raises(error, match=said):
        model(ROWS)


def test_a_graph_break_is_an_error_that_names_the_unit() -> None:
    def broken(rows: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return rows.sin()

    said = r"^cannot run unit 'blocks\.0' inside torch\.compile, in one graph, as the plan says: .*Use the engine 'tape' for it"
    refused(built(lambda: block(broken)), UnsupportedModelError, said)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"backend": "aot_eager"},
            r"unit 'blocks\.0' was compiled with a backend other than Inductor, which takes no plan",
        ),
        ({"mode": "reduce-overhead"}, r"unit 'blocks\.0' was compiled in a mode with CUDA graphs"),
    ],
)
def test_other_compilations_are_refused(options: dict[str, Any], said: str, fullgraph: bool) -> None:
    options = {**options, "fullgraph": fullgraph}
    model = built()
    model.blocks[0].compile(**options)
    with pytest.raises(ConfigError, match=said):
        recollect.apply(model, PLAN)
    model = built()
    applied = recollect.apply(model, PLAN)
    model.blocks[0].forward = torch.compile(model.blocks[0].forward, **options)
    assert applied.plan is PLAN
    model = built()
    model.blocks[0].forward = torch.compile(model.blocks[0].forward, **options)
    with pytest.raises(ConfigError, match=said):
        recollect.apply(model, PLAN)


@pytest.mark.parametrize(
    ("config", "setting", "value", "reason"),
    [
        (torch._dynamo.config, "compiled_autograd", True, "backward is recompiled"),
        (torch._dynamo.config, "disable", True, "nothing is compiled"),
        (torch._inductor.config, "triton.cudagraphs", True, "CUDA graphs hold what is kept in their own pool"),
        (torch._functorch.config, "activation_memory_budget", 0.5, "it decides as well what is kept"),
    ],
)
def test_settings_in_the_way_are_refused(config: Any, setting: str, value: object, reason: str) -> None:
    model = built()
    with config.patch({setting: value}):
        refused(
            model,
            ConfigError,
            rf"^got torch\._\w+\.config\.{setting}={value}: {reason}, and unit 'blocks\.0' is compiled",
        )


@pytest.mark.parametrize("compile_model", [each_block, each_block_in_place, whole])
def test_modes_with_cuda_graphs_are_refused_before_the_step_is_recorded(compile_model: Callable[..., Any]) -> None:
    model = compile_model(built(), mode="reduce-overhead")
    said = (
        r"^got engine='compile', triton\.cudagraphs=True: (unit 'blocks\.0'|the model) was compiled in a mode with CUDA"
    )
    with pytest.raises(ConfigError, match=said):
        recollect.record(model, ROWS, engine="compile")
    optimizer = torch.optim.SGD(model.parameters())
    with recollect.attach(model, optimizer, "90%", engine="compile"), pytest.raises(ConfigError, match=said):
        model(ROWS)


def test_what_is_switched_on_later_is_refused(plain: Gradients) -> None:
    model = built()
    with recollect.apply(model, PLAN):
        assert same(stepped(model), plain)
        with torch.compiler.set_stance("force_eager"), pytest.raises(ConfigError, match="would run without their plan"):
            model(ROWS)
        loss = model(ROWS)
        with (
            torch._dynamo.compiled_autograd._enable(torch.compile),
            pytest.raises(ConfigError, match="backward is recompiled"),
        ):
            model(ROWS)
        loss.backward()


def test_backward_runs_once(plain: Gradients) -> None:
    model = built()
    said = (
        r"^got retain_graph=True: unit 'blocks\.2' is compiled as a plan says, and its backward uses up what it saved"
    )
    with recollect.apply(model, PLAN):
        with pytest.raises(ConfigError, match=said):
            model(ROWS).backward(retain_graph=True)
        rows = ROWS.clone().requires_grad_()
        loss = model(rows)
        with pytest.raises(RuntimeError, match="Failed to run stage backward input") as raised:
            split_backward(loss, [rows], model)
        assert "not in two halves, as zero-bubble pipelines have it" in str(raised.value.__cause__)
        assert same(stepped(model), plain)


def test_what_a_unit_passes_on_may_have_several_backwards() -> None:
    model = nn.Sequential(Computes(lambda self, rows: (self.up(rows).exp(), rows), up=nn.Linear(8, 8)))
    weight = torch.ones(8, requires_grad=True)
    with recollect.apply(model, Plan({"0": UnitPlan({"up.addmm": "keep", "exp": "keep"}, engine="compile")})):
        made, passed_on = model(ROWS * weight)
        passed_on.sum().backward(retain_graph=True)
        made.sum().backward()
    found, weight.grad = weight.grad, None
    rows = ROWS * weight
    (model[0].up(rows).exp().sum() + rows.sum()).backward()
    torch.testing.assert_close(found, weight.grad)  # The compiler's exp rounds by itself, and the sums are others.


def test_other_shapes_are_warned_of_once() -> None:
    model = built()
    plan = Plan(PLAN.units, predicted_peak_bytes=1000)
    with recollect.apply(model, plan):
        stepped(model)
        # An error, so that nothing is compiled for them.
        with pytest.raises(
            BudgetWarning, match=r"^recollect: unit 'blocks\.0' gets tensors of other shapes than in its"
        ):
            model(ROWS[:20])


def test_units_with_sharded_modules_are_refused() -> None:
    with fake_process_group(0, 2):
        model = built()
        fully_shard(model.blocks[0].up, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(NotYetError, match=r"not yet: FSDP shards modules inside unit 'blocks\.0', and one graph"):
            recollect.apply(model, PLAN)


# One graph of the whole model


def test_one_graph_keeps_what_the_plan_keeps() -> None:
    """Of blocks between modules that are in no unit."""

    def sandwich(self: Any, rows: Tensor) -> Any:
        rows = self.embed(rows).sin()
        for one in self.blocks:
            rows = one(rows)
        return rows.cos()

    torch.manual_seed(0)
    model = Computes(sandwich, embed=nn.Linear(8, 8), blocks=nn.ModuleList(block() for _ in range(NUM_BLOCKS)))
    rows = ROWS.clone().requires_grad_()
    plans = [
        {**KEPT, "up.addmm": "keep" if index == 1 else "recompute", "add": "recompute"} for index in range(NUM_BLOCKS)
    ]
    plan = Plan({f"blocks.{index}": UnitPlan(actions) for index, actions in enumerate(plans)})
    expected = stepped_with(without_code(model.forward, None)(rows), model)
    options = recollect.compile_options(plan)
    output = without_code(model.forward, options["custom_partitioner_fn"])(rows)
    held = saved_tensors(output, [rows, output, *model.parameters()])
    values = {name: value for name, value in values_by_name(model, rows).items() if not name.startswith("embed")}
    # What blocks return is kept, whatever the plan says; and what is between them, as PyTorch chooses.
    names = names_of(held, {**values, "embed": model.embed(rows).detach(), "sin": model.embed(rows).sin().detach()})
    assert names - {"embed", "sin"} == {"blocks.0.add", "blocks.1.add", "blocks.2.add", "blocks.1.up.addmm"}
    assert same(stepped_with(output, model), expected)


def stepped_with(output: Tensor, model: nn.Module) -> Gradients:
    model.zero_grad()
    output.square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    "unit",
    [
        UnitPlan({"add": "recompute"}, output="recompute"),
        UnitPlan({"add": "shard"}),
        UnitPlan({"add": "offload"}),
    ],
    ids=["output", "shard", "offload"],
)
def test_one_graph_takes_what_it_can_carry_out(unit: UnitPlan) -> None:
    with pytest.raises(
        PlanError, match=r"^cannot compile by the plan: unit 'blocks\.0' drops its output, or has values that"
    ):
        recollect.compile_options(Plan({"blocks.0": unit}))
    with pytest.raises(PlanError, match="computes the loss in 4 chunks, expected 1"):
        recollect.compile_options(Plan({}, loss_chunks=4))
    with pytest.raises(ArgumentError, match="recollect.compile_options"):
        recollect.compile_options(None)  # type: ignore[arg-type]


def test_verify_of_wrapped_blocks_of_which_one_is_on_the_tape() -> None:
    """Without its plan that one has to run uncompiled as well, though its user compiled it."""
    model = each_block(built())
    on_tape = UnitPlan({f"_orig_mod.{name}": word for name, word in KEPT.items()})
    report = recollect.verify(model, ROWS, Plan({**WRAPPED.units, "blocks.0": on_tape}), time=False)
    assert report.gradients_equal, report
