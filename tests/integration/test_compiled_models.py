"""Plans for models that `torch.compile` compiled, in part or whole, with Inductor: which parts stay compiled, and what is said.

Gradients are those of the same parts compiled without a plan: parts that a plan has run eagerly are not compiled there.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from blocks import Computes
from compiled_blocks import (
    BY_INDUCTOR,
    Gradients,
    each_block,
    each_block_forward,
    each_block_in_one_graph,
    each_block_in_place,
    each_block_in_place_in_one_graph,
    in_place,
    same,
    whole,
)
from recollect.errors import BudgetWarning, ConfigError, ConfigWarning, UnknownNameError
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan

pytestmark = BY_INDUCTOR

SOURCE = str(Path(recollect.__file__).parent)
EAGER = r"^recollect: torch\.compile has no effect on {}, which a plan has run eagerly"
ROWS = torch.linspace(-1, 1, 64 * 16).reshape(64, 16)

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


def block() -> Computes:
    """[n, 16] -> [n, 16]."""
    mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    return Computes(lambda self, rows: rows + self.mlp(self.norm(rows)).tanh().exp(), norm=nn.LayerNorm(16), mlp=mlp)


class Model(nn.Module):
    """[n, 16] -> a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, rows: Tensor) -> Tensor:
        for one in self.blocks:
            rows = one(rows)
        return (rows.sin() * rows.cos()).square().mean()


def built() -> Model:
    torch.manual_seed(0)
    return Model()


def stepped(model: Any, plain: nn.Module) -> Gradients:
    plain.zero_grad()
    model(ROWS).backward()
    return [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]


@pytest.fixture(scope="module", name="eager")
def eager_gradients() -> Gradients:
    model = built()
    return stepped(model, model)


@pytest.fixture(name="traced")
def traced_frames() -> Iterator[Counter[str]]:
    from torch._dynamo import convert_frame

    found: Counter[str] = Counter()
    trace = convert_frame.ConvertFrameAssert.__call__

    def noted(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if frame.f_code.co_filename.startswith(SOURCE):
            found[f"{frame.f_code.co_filename}: {frame.f_code.co_name}"] += 1
        return trace(self, frame, *args, **kwargs)

    convert_frame.ConvertFrameAssert.__call__ = noted  # type: ignore[method-assign]
    yield found
    convert_frame.ConvertFrameAssert.__call__ = trace  # type: ignore[method-assign]


def own_forward(model: Model) -> Any:
    model.forward = torch.compile(model.forward)  # type: ignore[method-assign]
    return model


def each_mlp(model: Any) -> Any:
    for block in model.blocks:
        block.mlp = torch.compile(block.mlp)
    return model


def each_mlp_in_place(model: Any) -> Any:
    for block in model.blocks:
        block.mlp.compile()
    return model


def each_mlp_forward(model: Any) -> Any:
    for block in model.blocks:
        block.mlp.forward = torch.compile(block.mlp.forward)
    return model


def child(model: Model) -> Any:
    holder = nn.Sequential(torch.compile(model))  # type: ignore[arg-type]
    return holder


Compile = Callable[[Model], Any]
EAGERLY: dict[Compile, str] = {
    whole: "the model",
    in_place: "the model",
    own_forward: "the model",
    child: "module '0'",
    each_block: r"module 'blocks\.0'",
    each_block_in_place: r"module 'blocks\.0'",
    each_block_in_one_graph: r"module 'blocks\.0'",
    each_block_in_place_in_one_graph: r"module 'blocks\.0'",
}
INSIDE: tuple[Compile, ...] = (each_mlp, each_mlp_in_place, each_mlp_forward)


@pytest.mark.parametrize("compile_model", EAGERLY)
def test_compiled_then_planned(compile_model: Compile, eager: Gradients, traced: Counter[str]) -> None:
    plain = built()
    model = compile_model(plain)
    with pytest.warns(ConfigWarning, match=EAGER.format(EAGERLY[compile_model])) as said:
        plan = recollect.fit(model, ROWS, "80%")
    assert len(said) == 1
    assert any(unit.recomputes_anything for unit in plan.units.values())
    for _ in range(3):
        assert same(stepped(model, plain), eager)
    assert traced == {}


@pytest.mark.parametrize(
    "compile_model",
    [whole, in_place, own_forward, each_block, each_block_in_one_graph, each_block_in_place_in_one_graph, *INSIDE],
)
def test_planned_then_compiled(compile_model: Compile, eager: Gradients, traced: Counter[str]) -> None:
    """What has a plan when it is compiled runs eagerly, modules inside of units, too."""
    plain = built()
    recollect.apply(plain, recollect.classic_plan(recollect.record(plain, ROWS), "full"))
    model = compile_model(plain)
    with pytest.warns(ConfigWarning, match=EAGER.format("(the model|what calls .*|module '.*')")) as said:
        for _ in range(3):
            assert same(stepped(model, plain), eager)
    assert len(said) == 1
    assert traced == {}


@pytest.mark.parametrize("compile_first", [False, True])
@pytest.mark.parametrize("compile_model", [each_block_in_one_graph, each_block_in_place_in_one_graph])
def test_evaluation_before_training(compile_model: Compile, compile_first: bool) -> None:
    """PyTorch wants some graph of what is compiled with `fullgraph=True`."""
    model = compile_model(built()) if compile_first else built()
    plan = Plan({path: UnitPlan({}, engine="tape", output="recompute") for path in BLOCKS})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        recollect.apply(model, plan)
        model = model if compile_first else compile_model(model)
        assert torch.equal(model(ROWS), built()(ROWS))


@pytest.mark.parametrize("compile_first", [False, True])
@pytest.mark.parametrize("compile_model", [whole, in_place, each_block])
def test_attached(compile_model: Compile, compile_first: bool, eager: Gradients, traced: Counter[str]) -> None:
    plain = built()
    model: Any = compile_model(plain) if compile_first else plain
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.0)
    attached = recollect.attach(model, optimizer, "90%", log=lambda line: None)
    model = model if compile_first else compile_model(plain)
    with pytest.warns(ConfigWarning, match=EAGER.format("(the model|what calls .*|module '.*')")) as said:
        for _ in range(3):
            assert same(stepped(model, plain), eager)
            optimizer.step()
    assert len(said) == 1
    assert attached.recorded_steps == [0]
    assert traced == {}


@pytest.mark.parametrize("compile_model", INSIDE)
def test_parts_of_units_stay_compiled(compile_model: Compile, traced: Counter[str]) -> None:
    plain = built()
    model = compile_model(plain)
    expected = stepped(model, plain)
    plan = recollect.fit(model, ROWS, "90%")
    assert same(stepped(model, plain), expected)
    assert any(unit.recomputes_anything for unit in plan.units.values())
    assert not any("mlp" in name for unit in plan.units.values() for name in unit.actions)
    report = recollect.verify(model, ROWS, plan, time=False)
    assert report.gradients_equal
    # What compiled code takes for a while is not seen; gradients that it makes are.
    assert plan.predicted_peak_bytes is not None
    assert report.plan_peak_bytes < 1.06 * plan.predicted_peak_bytes
    assert traced == {}


@pytest.mark.long
def test_compiled_forward_of_a_unit_is_kept_as_a_whole(traced: Counter[str]) -> None:
    plain = built()
    model = each_block_forward(plain)
    expected = stepped(model, plain)
    with pytest.warns(BudgetWarning, match=r"^recollect: the forward of module 'blocks\.0' is compiled, and stays so"):
        plan = recollect.classic_plan(recollect.record(model, ROWS), "full")
    with recollect.apply(model, plan):
        for _ in range(2):
            assert same(stepped(model, plain), expected)
    assert traced == {}


def test_a_compiled_forward_is_named_where_layers_are_to_be_compiled() -> None:
    """A plan cannot reach inside it; that of a module compiled in place it can."""
    model = each_block_forward(built())
    with (
        pytest.warns(UserWarning, match=r"unit 'blocks\.0' and 2 more cannot run inside torch\.compile"),
        pytest.warns(
            BudgetWarning, match=r"^recollect: the forward of module .* in place \(module\.compile\(\)\) and plan"
        ),
    ):
        profile = recollect.record(model, ROWS, engine="compile")
    assert not any(graph.variants for graph in profile.graphs)


def test_compiled_step(eager: Gradients, traced: Counter[str]) -> None:
    """The model in it runs eagerly, as under `torch.compiler.disable`; what is around it is compiled."""
    plain = built()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.0)

    def step(rows: Tensor) -> None:
        optimizer.zero_grad()
        plain(rows * 1.0).backward()
        optimizer.step()

    recollect.attach(plain, optimizer, "90%", log=lambda line: None)
    compiled = torch.compile(step)
    with pytest.warns(ConfigWarning, match=EAGER.format("what calls the model")):
        for _ in range(3):
            compiled(ROWS)
            assert same([p.grad for p in plain.parameters() if p.grad is not None], eager)
    assert traced == {}


def test_one_graph_of_the_whole_model() -> None:
    plain = built()
    recollect.fit(plain, ROWS, "80%")
    message = (
        "got fullgraph=True: .* one graph of what calls the model, which .* Compile its layers one by one, each with"
    )
    for context in (torch.enable_grad(), torch.no_grad()):
        with context, pytest.raises(ConfigError, match=message):
            torch.compile(plain, fullgraph=True)(ROWS)


def test_forced_eager_is_not_compiled(eager: Gradients) -> None:
    plain = built()
    recollect.fit(plain, ROWS, "80%")
    with torch.compiler.set_stance("force_eager"):
        assert same(stepped(torch.compile(plain, fullgraph=True), plain), eager)


def test_plan_made_without_the_wrapper() -> None:
    plain = built()
    plan = recollect.plan(recollect.record(plain, ROWS), "80%")
    assert isinstance(plan, Plan)
    with pytest.raises(UnknownNameError, match=r"'blocks\.0'.*'_orig_mod\.blocks\.0'.*compile\(\) keeps names"):
        recollect.apply(torch.compile(plain), plan)


@pytest.mark.long  # A minute: the layer is compiled in each way that was worth trying.
def test_trainer(tmp_path: Path) -> None:
    """Hugging Face's, with `torch_compile=True`: its layers run compiled, within the budget, with about the losses without."""
    transformers = pytest.importorskip("transformers")
    from recollect.integrations.transformers import MemoryBudget

    losses = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, use_cache=False, **sizes))
        tokens = torch.arange(24)
        args = transformers.TrainingArguments(
            tmp_path, max_steps=3, torch_compile=is_compiled, report_to=[], logging_steps=1, use_cpu=True,
            save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        data = [{"input_ids": tokens, "labels": tokens}] * 32
        callback = MemoryBudget("90%", measure=True)
        trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[callback])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert not [warning for warning in said if warning.category is ConfigWarning]
        assert callback.attached is not None and callback.attached.plan is not None
        plan = callback.attached.plan
        assert plan.is_compiled == is_compiled
        assert plan.predicted_peak_bytes <= plan.budget_bytes
    # Compiled code rounds in other places.
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        ({}, "tape"),
        ({"torch_compile": True}, "compile"),
        ({"torch_compile_backend": "aot_eager"}, "tape"),
        ({"torch_compile_mode": "default"}, "compile"),
    ],
)
def test_trainer_keeps_what_can_be_planned_compiled(tmp_path: Path, settings: dict[str, Any], engine: str) -> None:
    transformers = pytest.importorskip("transformers")
    from recollect.integrations.transformers import engine_of

    assert engine_of(transformers.TrainingArguments(tmp_path, use_cpu=True, **settings)) == engine
