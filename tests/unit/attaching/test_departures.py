"""What `attach` does, and says, where a step does what no plan foresees; peaks are in tests/integration/test_real_loops.py."""

import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import recollect
from blocks import Computes
from recollect._torch_parallel import SPLITS_FUNCTIONS, fake_process_group, split_backward
from recollect.attaching.held import Departure
from recollect.attaching.missed import Missed, is_little
from recollect.attaching.planned_step import unforeseen
from recollect.attaching.reserve import Reserve
from recollect.attaching.step_meter import StepMeter
from recollect.attaching.step_shape import Structure, describe_call
from recollect.attaching.unit_watch import Course, Runs
from recollect.byte_format import format_bytes
from recollect.engine.content import has_same_bits
from recollect.errors import BudgetWarning, LargerStepError
from recollect.measuring.device_memory import held_now
from recollect.measuring.meter import peak_on_cpu
from recollect.plans.action import EngineChoice
from recollect.plans.unit_plan import UnitPlan
from residual_model import attached_loop, step

needs_distributed = pytest.mark.skipif(not dist.is_available(), reason="needs PyTorch with torch.distributed")
SGD = partial(torch.optim.SGD, lr=0.1)


class Blocks(nn.Module):
    """Runs as many of its blocks as it is told, each as often as its list of runs says."""

    def __init__(self, number: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(number)
        )
        self.runs = list(range(number))
        self.num_rows = 512
        self.by_name = False

    def forward(self, x: Tensor, flag: bool = False, way: str = "") -> Tensor:
        x = x[: self.num_rows]
        for index in self.runs:
            x = x + (self.blocks[index](input=x) if self.by_name else self.blocks[index](x))
        return x.square().mean()


@pytest.fixture
def model() -> Iterator[Blocks]:
    torch.manual_seed(0)
    yield Blocks()


def test_a_departure_raises_where_larger_steps_do(model: Blocks) -> None:
    model.runs = [0, 1]
    with attached_loop("90%", model, SGD, on_larger="raise") as (_, optimizer, _):
        step(model, optimizer, rows=512)
        model.runs = [0, 1, 2]
        with pytest.raises(
            LargerStepError,
            match=r"ran unit 'blocks.2' more often than its plan foresees \(got run 1, expected at most 0\)",
        ):
            step(model, optimizer, rows=512)


@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_a_module_that_layers_are_given_does_not_depart(engine: str) -> None:
    """As x-transformers' modules for positions: what they compute within a layer is theirs, also where they keep all."""

    def scored(self: Any, x: Tensor, scores: nn.Module) -> Tensor:
        return x + torch.tanh(self.linear(x) + scores(x)).sin().exp().sin().exp()

    def run(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.scores)
        return x.square().mean()

    layers = nn.ModuleList(Computes(scored, linear=nn.Linear(32, 32)) for _ in range(4))
    scores = Computes(lambda self, x: self.table(torch.arange(len(x)) % 8) * 0.1, table=nn.Embedding(8, 32))
    made = Computes(run, layers=layers, scores=scores)
    with attached_loop("80%", made, SGD, engine=engine) as (model, optimizer, attached):
        for _ in range(4):
            step(model, optimizer, rows=512)
    assert attached.recorded_steps == [0]


@pytest.mark.parametrize("by_name", [False, True])
def test_units_on_larger_inputs_depart_in_calls_of_equal_shapes(model: Blocks, by_name: bool) -> None:
    model.num_rows, model.by_name = 256, by_name
    with attached_loop("90%", model, SGD, on_larger="raise") as (_, optimizer, _):
        for model.num_rows in (256, 128, 256):
            step(model, optimizer, rows=512)
        model.num_rows = 257
        with pytest.raises(
            LargerStepError,
            match=r"ran unit 'blocks.0' on more elements than its plan foresees \(got 8224, expected at most 8192\)",
        ):
            step(model, optimizer, rows=512)


@pytest.mark.parametrize("every", [0, 2])
def test_a_loss_that_reaches_more_parameters_later_is_a_departure(model: Blocks, every: int) -> None:
    """Their gradients come on top: of a part of the loss that comes in after some steps, or in every second one."""
    parts = nn.ModuleList([model, Blocks()])
    optimizer = SGD(parts.parameters())
    with recollect.attach(parts, optimizer, "100%", log=lambda _: None) as attached:

        def train(number: int, *, with_both: bool) -> None:
            for _ in range(number):
                one, other = attached.call(lambda x: (parts[0](x), parts[1](x)), torch.randn(512, 32))
                (one + other if with_both else one).backward()
                del one, other
                optimizer.step()
                optimizer.zero_grad()

        train(2, with_both=False)
        with pytest.warns(
            BudgetWarning, match=r"made 16 gradients that its plan does not foresee\. It may have needed"
        ):
            train(1, with_both=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)
            for _ in range(6):
                train(every, with_both=False)
                train(1, with_both=True)
        assert attached.recorded_steps == ([0, 3, 6, 9, 12] if every else [0, 3])


def test_gradients_of_one_branch_take_the_place_of_those_of_the_other(recwarn: pytest.WarningsRecorder) -> None:
    """No more memory is needed, and so no step has to be recorded for it, or is said to be too large."""
    torch.manual_seed(0)
    parts = nn.ModuleList([Blocks(), Blocks()])
    optimizer = SGD(parts.parameters())
    with recollect.attach(parts, optimizer, "100%", log=lambda _: None) as attached:
        for branch in (0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 1):
            attached.call(lambda x, branch=branch: parts[branch](x), torch.randn(512, 32)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert attached.recorded_steps == [0, 3, 4, 5, 6]
    assert not any("gradients that its plan does not foresee" in str(one.message) for one in recwarn)


def test_a_gradient_that_comes_before_the_one_whose_place_it_takes_gets_room(model: Blocks) -> None:
    """Every second step trains a table at the end instead of one at the beginning, whose gradient backward makes last."""
    tables = nn.ParameterList([torch.zeros(4, 512, 32), torch.zeros(4, 512, 32)])
    parts, rows = nn.ModuleList([model, tables]), torch.randn(512, 32)
    optimizer = SGD(parts.parameters())

    def train(*, is_late: bool) -> None:
        first, last = (table if at == is_late else table.detach() for at, table in enumerate(tables))
        loss = attached.call(lambda x: model(x + first.sum(0)), rows) + last.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with recollect.attach(parts, optimizer, "85%", log=lambda _: None) as attached:
        train(is_late=False)
        with pytest.warns(BudgetWarning, match=r"step 1 made 1 gradients that its plan does not foresee"):
            train(is_late=True)
        for number in range(4):
            with peak_on_cpu() as found:
                train(is_late=number % 2 == 1)
            assert found[0] <= attached.budget_bytes, number
        assert attached.recorded_steps == [0]


@pytest.mark.parametrize("gradients_stay", [False, True], ids=["recorded once", "recorded twice"])
@pytest.mark.parametrize("ends_with_step", [True, False], ids=["returned", "kept after backward"])
def test_what_a_loop_holds_longer_than_the_models_next_output_gets_room(
    model: Blocks, ends_with_step: bool, gradients_stay: bool
) -> None:
    """As `out = train_step()` does: the last step's output is in memory until the function returns."""
    net, rows = nn.Sequential(*model.blocks, nn.Linear(32, 128)), torch.randn(512, 32)
    optimizer, kept = SGD(net.parameters()), list[Tensor]()

    def train() -> Tensor:
        out: Tensor = net(rows)
        out.square().mean().backward()
        if not ends_with_step:
            kept[:] = [out]
        optimizer.step()
        optimizer.zero_grad(set_to_none=not gradients_stay)
        return out

    def loop(number: int) -> None:
        for _ in range(number):
            out = train()
            if ends_with_step:
                kept[:] = [out]
            del out

    with recollect.attach(net, optimizer, "75%", log=lambda _: None) as attached:
        loop(1)
        # A step that is recorded shows it, too.
        late = pytest.warns(
            BudgetWarning, match=r"step 1 held in backward what the model returned in the step before\. It"
        )
        with nullcontext() if gradients_stay else late:
            loop(1)
        loop(1)
        begin_bytes = (
            sum(p.nbytes * (1 + (p.grad is not None)) for p in net.parameters()) + rows.nbytes + kept[0].nbytes
        )
        peak_bytes = begin_bytes + recollect.measure_peak(lambda: loop(1), device="cpu").peak_growth_bytes
        loop(2)
        assert attached.recorded_steps == [0, 1][: 1 + gradients_stay]
        assert attached.plan is not None and attached.plan.predicted_peak_bytes is not None
        assert attached.budget_bytes is not None and peak_bytes <= attached.budget_bytes
        assert 0 <= attached.plan.predicted_peak_bytes - peak_bytes <= 4096


def test_a_state_that_goes_from_call_to_call_is_an_input_of_the_next_step(model: Blocks) -> None:
    def forward(self: Computes, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            state = state + block(x)
        return state.square().mean(), state

    net, state = Computes(forward, blocks=model.blocks), torch.zeros(512, 32)
    optimizer = SGD(net.parameters())
    with recollect.attach(net, optimizer, "90%", log=lambda _: None) as attached:
        for _ in range(4):
            loss, new = net(torch.randn(512, 32), state)
            loss.backward()
            state = new.detach()
            del loss, new
            optimizer.step()
            optimizer.zero_grad()
        assert attached.recorded_steps == [0] and not attached.planned[-1].more_bytes


def test_state_that_an_optimizer_makes_later_is_planned_for(model: Blocks) -> None:
    """As for slow weights that are averaged from some step on."""
    with attached_loop("100MiB", model, SGD) as (_, optimizer, attached):
        for number in range(4):
            step(model, optimizer, rows=512)
            for parameter in model.parameters() if number == 1 else ():
                optimizer.state[parameter]["slow"] = torch.zeros(16, *parameter.shape)
        (planned,) = attached.planned
        assert attached.recorded_steps == [0]
        slow_bytes = 16 * sum(parameter.nbytes for parameter in model.parameters())
        assert planned.profile.persistent["optimizer_state"] == slow_bytes > 1 << 20


def test_how_the_calls_of_a_step_differ_from_its_plan_is_said(model: Blocks) -> None:
    def said(*rows: int, entry: str = "", **arguments: object) -> str:
        inputs, built = enumerate(torch.zeros(number, 32) for number in rows), Structure(model)
        calls = [describe_call(entry, model, (x,), arguments, built, "cpu", is_open=i > 0) for i, x in inputs]
        return unforeseen(planned, calls).removeprefix("differs in call 1 of the model from its plan: ")

    with attached_loop("90%", model, SGD) as (_, optimizer, attached):
        step(model, optimizer, rows=512, flag=True)
        (planned,) = attached.planned
    assert said(512, 512, flag=True) == "called the model 2 times, and its plan foresees 1"
    assert said(512, entry="blocks.0", flag=True) == "the module that is called, the model and blocks.0"
    assert said(513, flag=True) == "shapes 512 x 32 and 513 x 32"
    assert said(512, flag=False) == "arguments True and False"
    assert said(512) == "arguments that one of them lacks"
    with torch.autocast("cpu", torch.bfloat16):
        assert said(512, flag=True) == "autocast None and torch.bfloat16"
    model.eval()
    assert said(512, flag=True) == "training mode True and False"
    excess = Departure("ran more").excess
    budget, limit = f"budget of {format_bytes(planned.budget_bytes)}", planned.budget_bytes
    assert excess(planned, None, 0) == f"ran more. It may have needed more than the {budget}"
    assert excess(planned, 1 << 40, limit) == "", "what is measured counts"
    over = f"{format_bytes(limit + 2**20)}, 1.0 MiB more than the {budget}"
    assert excess(planned, 0, limit + 2**20) == f"ran more. Its measured peak was {over}"
    estimate = excess(planned, limit + 2**20 - planned.peak_bytes, 0)
    assert estimate == f"ran more. It may have needed {over}, and yet more if it did more than call the model"


def test_an_inner_loop_in_eval_mode_is_not_said_to_be_the_step(model: Blocks) -> None:
    with attached_loop("1GiB", model, SGD) as (_, optimizer, _):
        model.eval()(torch.randn(64, 32)).backward()
        model.train()(torch.randn(64, 32)).backward()
        model.eval()
        optimizer.step()


@pytest.mark.parametrize("rows", [(8, 8), (8, 200)], ids=["the same", "others"])
def test_room_is_left_where_calls_that_are_alike_have_values_of_other_sizes(rows: tuple[int, int]) -> None:
    class Sliced(Blocks):
        def forward(self, x: Tensor, flag: bool = False, way: str = "") -> Tensor:
            for block in self.blocks:
                x = torch.cat([block(x[: self.rows]), x[self.rows :]])
            return x.square().mean()

    model = Sliced()
    with attached_loop("1GiB", model, SGD) as (_, optimizer, attached):
        losses = []
        for model.rows in rows:
            losses.append(model(torch.randn(512, 32)))
        sum(losses).backward()
        optimizer.step()
        assert (attached.planned[0].more_bytes > 0) == (rows[0] != rows[1])


def test_no_room_is_left_where_optimizers_take_turns_and_freeze_each_others_layers(model: Blocks) -> None:
    turns = [model.blocks[:2], model.blocks[2:]]
    optimizers = [SGD(blocks.parameters()) for blocks in turns]
    with recollect.attach(model, optimizers, "1GiB", log=lambda _: None) as attached:
        for blocks, optimizer in zip(turns, optimizers, strict=True):
            model.requires_grad_(False)
            blocks.requires_grad_(True)
            step(model, optimizer, rows=512)
        assert attached.planned[0].more_bytes == 0


@pytest.mark.parametrize(
    ("engine", "num_calls", "beside", "said", "more"),
    [
        ("tape", 2, 0, "its shapes may depend on data, .* planned again, with room for that", True),
        ("compile", 1, 0, "PyTorch compiled layers for a new plan, which needs memory once", 0),
        ("compile", 2, 0, "compiled layers use buffers that no prediction knows", True),
        ("compile", 2, 1 << 40, r"something besides the recorded step needs memory \(evaluation", None),
    ],
    ids=["data", "compiling", "compiled", "besides"],
)
def test_the_cause_of_a_measured_excess_is_said(
    model: Blocks, engine: str, num_calls: int, beside: int, said: str, more: int | None
) -> None:
    with attached_loop("90%", model, SGD) as (_, optimizer, attached):
        step(model, optimizer, rows=512)
        (planned,) = attached.planned
    units = {path: UnitPlan({}, engine=EngineChoice(engine)) for path in planned.plan.units}
    planned = replace(planned, plan=replace(planned.plan, units=units), num_calls=num_calls)
    meter = StepMeter(torch.device("cpu"), on_cpu=True, log=lambda _: None)
    with peak_on_cpu() as found:
        pass
    planned.begin_bytes = found[1] - beside
    meter.begin(planned, 1)
    torch.zeros(planned.budget_bytes // 4 + 1024)
    excess = meter.end([planned])
    assert excess is not None and re.search(f"the process held .* more than was planned for: .*{said}", excess.text)
    assert excess.more_bytes == more or (more is True and excess.more_bytes > 0)


def test_fewer_and_other_units_of_one_kind_need_one_recorded_step(model: Blocks) -> None:
    with attached_loop("90%", model, SGD) as (_, optimizer, attached), warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        for model.runs in ([0, 1, 2, 3], [1, 3], [3, 2, 1, 0], [0], [0, 1, 2, 3]):
            step(model, optimizer, rows=512)
        assert attached.recorded_steps == [0]


@pytest.mark.parametrize(("budget", "fits"), [(3_000_000, False), (3_500_000, True), (6_000_000, True)])
def test_a_layer_that_the_recorded_step_lacked_gets_the_room_that_it_needs_beside_the_plan(
    budget: int, fits: bool
) -> None:
    torch.manual_seed(0)
    model = Blocks(12)
    for block in model.blocks:
        block[1] = nn.Sequential(*(nn.Tanh() for _ in range(5)))
    with attached_loop(budget, model, SGD) as (_, optimizer, attached), warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        # The last layer's values are recomputed while the most is alive.
        for model.runs in (list(range(11)), list(range(12)), list(range(12))):
            step(model, optimizer, rows=512)
        with peak_on_cpu() as found:
            step(model, optimizer, rows=512)
        (planned,) = attached.planned
        assert attached.recorded_steps == [0] and planned.fits is fits
        # A gradient is counted that is not there yet where most is alive.
        assert 0.98 * planned.peak_bytes < found[0] <= planned.peak_bytes


def test_flags_that_change_nothing_are_learned(model: Blocks) -> None:
    with attached_loop("90%", model, SGD) as (_, optimizer, attached), warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        for number in range(6):
            step(model, optimizer, rows=512, flag=number % 2 == 1)
        assert attached.recorded_steps == [0, 1]


def test_strings_that_name_data_are_learned(model: Blocks) -> None:
    """Detectors get the files of their images, which differ in each step, as do the numbers of boxes."""
    with attached_loop("90%", model, SGD) as (_, optimizer, attached), warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        for number, rows in enumerate([512, 505, 508, 480, 512, 400]):
            step(model, optimizer, rows=rows, way=f"{number}.jpg")
        assert attached.recorded_steps == [0, 1, 2]


def test_courses_without_end_are_named_and_run_lean(model: Blocks) -> None:
    with attached_loop("1GiB", model, SGD) as (_, optimizer, attached):
        with pytest.warns(
            BudgetWarning, match=r"16 of 16 steps were recorded, since each .* \(arguments '14' and '15'\)"
        ) as found:
            for number in range(20):
                model.runs = [0] * (number + 1)
                step(model, optimizer, rows=512, way=str(number))
        assert attached.recorded_steps == list(range(16))
        assert sum("steps were recorded" in str(warning.message) for warning in found) == 1


def test_two_handles_in_one_step_do_not_take_each_other_for_a_profiler() -> None:
    torch.manual_seed(0)
    models = [Blocks(), Blocks()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    handles = [recollect.attach(m, o, "1GiB", log=lambda _: None) for m, o in zip(models, optimizers, strict=True)]
    for _ in range(3):
        sum(model(torch.randn(512, 32)) for model in models).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert [handle.recorded_steps for handle in handles] == [[0], [1]]
    for handle in handles:
        handle.remove()


# Of traces, since a layer that computes more runs other ops than were recorded.
@pytest.mark.filterwarnings("ignore::recollect.errors.ConfigWarning")
@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_what_a_unit_computes_at_times_is_recomputed_and_planned_once_it_was_recorded(
    model: Blocks, engine: Any
) -> None:
    """Steps of equal shapes alternate: an argument's value, a buffer or the data says what the layers compute."""
    does_more = False

    def act(_: object, x: Tensor) -> Tensor:
        return x.tanh().sin().sigmoid() if does_more else x.tanh()

    for block in model.blocks:
        block[1] = Computes(act)
    plain = copy.deepcopy(model)
    rows, plain_optimizer = [torch.randn(512, 32) for _ in range(6)], SGD(plain.parameters())
    for number, x in enumerate(rows):
        does_more = number % 2 == 1
        plain(x).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    with attached_loop(2_000_000, model, SGD, engine=engine) as (_, optimizer, attached):
        for number, x in enumerate(rows):
            does_more = number % 2 == 1
            said = "^recollect: step 1 computed '1.sin' in unit 'blocks.0', which its plan does not name. It may have needed"
            expected = pytest.warns(BudgetWarning, match=said) if number == 1 else nullcontext()
            with expected, peak_on_cpu() if number == 1 else nullcontext([0]) as found:
                model(x).backward()
                optimizer.step()
            optimizer.zero_grad()
            # Two layers keep everything; kept in the other two, these would take twice as much more.
            assert found[0] <= 2_000_000 + 2 * 512 * 128 * 4
        assert attached.recorded_steps == [0, 2, 3]
    assert all(map(has_same_bits, model.parameters(), plain.parameters()))


class Skipped(nn.Sequential):
    """Passes on what it gets at times, as stochastic depth does inside a layer."""

    is_skipped = draws = False

    def forward(self, x: Tensor) -> Tensor:
        if self.draws:
            torch.rand(())
        return x if self.is_skipped else super().forward(x)


@pytest.mark.filterwarnings("ignore::recollect.errors.ConfigWarning")
@pytest.mark.parametrize(("engine", "draws"), [("tape", False), ("tape", True), ("graph", True)])
def test_a_layer_that_computed_nothing_in_the_recorded_step_is_recomputed_in_others(
    model: Blocks, engine: Any, draws: bool
) -> None:
    model.blocks = nn.ModuleList(Skipped(*block) for block in model.blocks)
    for block in model.blocks:
        block.draws = draws
    with attached_loop("85%", model, SGD, engine=engine) as (_, optimizer, attached):
        for number in range(2):
            model.blocks[number].is_skipped = True
            model.blocks[1 - number].is_skipped = False
            said = r"^recollect: step 1 computed '0\.addmm' in unit 'blocks.0', which its plan does not name"
            expected = pytest.warns(BudgetWarning, match=said) if number else nullcontext()
            with expected, peak_on_cpu() if number else nullcontext([0]) as found:
                step(model, optimizer, rows=512)
        assert attached.budget_bytes is not None and 0 < found[0] <= attached.budget_bytes


@pytest.mark.filterwarnings("ignore::recollect.errors.ConfigWarning")
@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_layers_that_prepare_themselves_in_the_first_step_are_recorded_again_without_it(
    model: Blocks, engine: Any
) -> None:
    """As codebooks do, by ops with gradients: later values have the names of those that only the first step computes."""
    is_prepared = False

    def act(_: object, x: Tensor) -> Tensor:
        if not is_prepared:
            x[:4].tanh().sum()
        return x.tanh().sin().tanh()

    for block in model.blocks:
        block[1] = Computes(act)
    with attached_loop("55%", model, SGD, engine=engine) as (_, optimizer, attached):
        for _ in range(5):
            step(model, optimizer, rows=512)
            is_prepared = True
        with peak_on_cpu() as found:
            step(model, optimizer, rows=512)
    assert attached.budget_bytes is not None
    assert attached.recorded_steps == [0, 2] and found[0] <= attached.budget_bytes


def _scaled_by_a_number(x: Tensor) -> Tensor:
    return x / x.detach().abs().max().item()


def _plus_a_sparse_matrix(x: Tensor) -> Tensor:
    return x + torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], x.shape[1:], check_invariants=True).to_dense()


@pytest.mark.parametrize("act", [_scaled_by_a_number, _plus_a_sparse_matrix])
@pytest.mark.parametrize("options", [{}, {"host_budget": "1GiB"}], ids=["", "host memory"])
def test_numbers_and_sparse_tensors_are_no_values_that_a_plan_lacks(
    model: Blocks, act: Any, options: dict[str, str]
) -> None:
    for block in model.blocks:
        block[1] = Computes(lambda _, x: act(x.tanh()))
    with attached_loop("60%", model, SGD, **options) as (_, optimizer, attached):
        for _ in range(3):
            step(model, optimizer, rows=4096)
        assert attached.recorded_steps == [0]


def test_values_that_are_new_again_and_again_are_recomputed_only(model: Blocks) -> None:
    more: list[Any] = []
    for block in model.blocks:
        block[1] = Computes(lambda _, x: more[0](x.tanh()) if more else x.tanh())
    with attached_loop(2_000_000, model, SGD) as (_, optimizer, attached):
        step(model, optimizer, rows=512)
        for op in (torch.sin, torch.cos, torch.sigmoid, torch.exp, torch.erf):
            more[:] = [op]
            follows = (
                "Values that plans do not name are recomputed"
                if op is torch.erf
                else "What follows is planned for that, too"
            )
            with pytest.warns(BudgetWarning, match=f"does not name.* {follows}"):
                step(model, optimizer, rows=512)
            step(model, optimizer, rows=512)
    assert attached.recorded_steps == [0, 2, 4, 6, 8]


def test_calls_that_wait_for_backward_together_are_more_than_one_after_the_other(model: Blocks) -> None:
    with attached_loop("80%", model, SGD) as (_, optimizer, attached):
        for _ in range(2):
            model(torch.randn(512, 32)).backward()
        optimizer.step()
        optimizer.zero_grad()
        said = r"step 1 differs in call 2 of the model from its plan: whether an earlier call waits for its backward"
        for number in range(1, 4):
            with peak_on_cpu() if number == 3 else nullcontext([0]) as found:
                losses = [model(torch.randn(512, 32)) for _ in range(2)]
                for loss in losses:
                    loss.backward()
                del loss, losses
                with pytest.warns(BudgetWarning, match=said) if number == 1 else nullcontext():
                    optimizer.step()
            optimizer.zero_grad()
        assert attached.recorded_steps == [0, 2]
        assert found[0] <= attached.planned[0].budget_bytes


def test_pairs_of_different_sizes_keep_the_budget_and_a_different_end_is_said(model: Blocks) -> None:
    """The first call of a pair does not tell how large the second one is."""
    pairs = [(256, 256), (512, 512), (256, 512), (256, 512), (256, 512)]
    with attached_loop(1_600_000, model, SGD) as (_, optimizer, attached):
        for number, sizes in enumerate(pairs):
            said = "step 2 differs in call 2 of the model from its plan: shapes 256 x 32 and 512 x 32"
            with pytest.warns(BudgetWarning, match=said) if number == 2 else nullcontext():
                with peak_on_cpu() if number == 4 else nullcontext([0]) as found:
                    losses = [model(torch.randn(size, 32)) for size in sizes]
                    for loss in losses:
                        loss.backward()
                    del loss, losses
                    optimizer.step()
            optimizer.zero_grad()
        assert attached.recorded_steps == [0, 1, 3]
    assert found[0] <= 1_600_000


def test_a_forward_whose_result_is_dropped_does_not_wait_for_backward(model: Blocks) -> None:
    with attached_loop("80%", model, SGD) as (_, optimizer, attached):
        for _ in range(3):
            model(torch.randn(512, 32))
            step(model, optimizer, rows=512)
        assert attached.recorded_steps == [0]


def test_more_backwards_of_a_later_output_are_said() -> None:
    # Of two results the loop uses only the second one.
    model = Computes(lambda self, x: (self.left(x), self.right(x)), left=Blocks(2), right=Blocks(2))
    with attached_loop("90%", model, SGD) as (_, optimizer, _):
        for number in range(2):
            _, loss = model(torch.randn(512, 32))
            loss.backward(retain_graph=number == 1)
            if number == 1:
                loss.backward()
            with pytest.warns(BudgetWarning, match="ran backward more often") if number == 1 else nullcontext():
                optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("begins_inside", [False, True])
def test_more_backwards_than_planned_are_said_and_recorded(model: Blocks, begins_inside: bool) -> None:
    made: list[Tensor] = []
    model.blocks[-1].register_forward_hook(lambda *given: made.append(given[2]))
    with attached_loop("90%", model, SGD) as (_, optimizer, attached):
        step(model, optimizer, rows=512)
        loss = model(torch.randn(512, 32))
        loss.backward(retain_graph=True)
        (made.pop().sum() if begins_inside else loss).backward()
        made.clear()
        with pytest.warns(
            BudgetWarning, match=r"step 1 ran backward more often .*. It may have needed more than the budget of"
        ):
            optimizer.step()
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)
            step(model, optimizer, rows=512)
        assert attached.recorded_steps == [0, 2]


@pytest.mark.parametrize(("planned", "rows"), [((512, 256), 384), ((512, 256), 1024), ((16, 512), 520)])
def test_a_micro_batch_larger_than_planned_is_said_where_it_needs_more_than_others(
    model: Blocks, planned: tuple[int, int], rows: int
) -> None:
    with attached_loop("70%", model, SGD) as (_, optimizer, _), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BudgetWarning)
        for numbers in (planned, (planned[0], rows)):
            for number in numbers:
                model(torch.randn(number, 32)).backward()
            optimizer.step()
            optimizer.zero_grad()
    over = "recollect: step 1 differs in call 2 of the model from its plan: shapes 256 x 32 and 1024 x 32. It may have needed"
    said = [str(warning.message) for warning in caught if issubclass(warning.category, BudgetWarning)]
    assert [text.startswith(over) for text in said] == ([True] if rows == 1024 else [])


def test_a_call_whose_loss_is_dropped_needs_no_memory_beside_the_next_one(model: Blocks) -> None:
    with attached_loop("70%", model, SGD) as (_, optimizer, attached):
        step(model, optimizer, rows=512)
        assert model(torch.randn(512, 32)).isfinite()
        step(model, optimizer, rows=512)
        assert attached.recorded_steps == [0] and attached.num_steps == 2
        loss = model(torch.randn(512, 32))
        assert model(torch.randn(512, 32)).isfinite()
        (loss + model(torch.randn(512, 32))).backward()
        with pytest.warns(BudgetWarning, match="step 2 called the model 3 times, and its plan foresees 1"):
            optimizer.step()


@pytest.mark.parametrize("varies", [False, True])
def test_larger_inputs_of_units_are_recorded_and_if_they_vary_without_end_the_plan_stays(varies: bool) -> None:
    lines: list[str] = []

    def mixed(self: Any, x: Tensor) -> Tensor:
        parts = zip(self.experts, x.split(self.rows), strict=True)
        return torch.cat([expert(part) for expert, part in parts]).square().mean()

    torch.manual_seed(0)
    experts = [nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(4)]
    model = Computes(mixed, experts=nn.ModuleList(experts))
    optimizer = SGD(model.parameters())
    with recollect.attach(model, optimizer, "90%", log=lines.append) as attached, warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        for number in range(16):
            more = 4 * number if varies else 8 * min(number, 1)
            model.rows = [128 + more, 128 - more, 128 + more, 128 - more]
            step(model, optimizer, rows=512)
        assert attached.recorded_steps == ([0, 2, 4, 6, 8] if varies else [0, 2])
        assert len(lines) == len(attached.recorded_steps)


def _with_table(self: Any, x: Tensor) -> Tensor:
    if self.table is None:
        self.table = torch.arange(32).cos().expand(self.num_rows, -1).contiguous()
    return self.inner(x * self.table)


@pytest.mark.parametrize("num_rows", [1, 512])
def test_layers_that_make_tables_in_their_first_call_run_from_traces(num_rows: int) -> None:
    """As rotary embeddings do. The second step is recorded, too, in which layers read what they hold; it does less."""
    inner = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)]
    model = nn.Sequential(*(Computes(_with_table, inner=one, table=None, num_rows=num_rows) for one in inner))
    with attached_loop("80%", model, SGD, engine="graph") as (_, optimizer, attached):
        for _ in range(4):
            model(torch.randn(512, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert attached.recorded_steps == [0, 1]
        dropping = [unit.engine for unit in attached.plan.units.values() if unit.recomputes_anything]
        assert set(dropping) == {EngineChoice.GRAPH}


@pytest.mark.skipif(not SPLITS_FUNCTIONS, reason="before torch 2.13 layers of pipelines are not traced")
def test_both_halves_of_a_backward_may_begin_at_a_traced_unit() -> None:
    # Units whose output is made by an op without parameters.
    inner = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)]
    model = nn.Sequential(*(Computes(lambda self, x: x + self.inner(x), inner=one) for one in inner))
    with attached_loop("90%", model, SGD, engine="graph") as (_, optimizer, attached):
        for _ in range(4):
            x = torch.randn(512, 32, requires_grad=True)
            split_backward(model(x).square().mean(), [x], model)
            optimizer.step()
            optimizer.zero_grad()
        assert attached.recorded_steps == [0]
        assert any(unit.engine is EngineChoice.GRAPH for unit in attached.plan.units.values())


@needs_distributed
@pytest.mark.parametrize("has_group", [True, False])
@pytest.mark.parametrize(("steps", "nbytes"), [(1, 960 << 10), (4, 512 << 10)])
def test_pytorchs_record_of_collectives_may_grow_in_a_forward(
    model: Blocks, has_group: bool, steps: int, nbytes: int
) -> None:
    """It doubles to 512 KiB, and once more, when there is a group; it is not the model's, nor stays in later calls.

    In the first calls under a plan other memory comes that stays, too.
    """
    held: list[Tensor] = []

    def hold(*_: object) -> None:
        held[:] = [torch.zeros(nbytes // 4)] if is_holding else []

    model.blocks[0].register_forward_hook(hold)
    is_holding = False
    with (
        fake_process_group(0, 2) if has_group else nullcontext(),
        attached_loop("90%", model, SGD) as (_, optimizer, _),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(steps):
            step(model, optimizer, rows=512)
        is_holding = True
        step(model, optimizer, rows=512)
    assert any(f"step {steps} held more after forward" in str(its.message) for its in caught) is not has_group


def test_what_a_forward_holds_besides_is_read_from_the_allocator(model: Blocks) -> None:
    held: list[Tensor] = []

    def hold(*_: object) -> None:
        held[:] = [torch.zeros(1 << 21)] if is_holding else []

    model.blocks[0].register_forward_hook(hold)
    is_holding = False
    with attached_loop("90%", model, SGD) as (_, optimizer, attached):
        for _ in range(3):
            step(model, optimizer, rows=512)
        is_holding = True
        with pytest.warns(
            BudgetWarning, match=r"step 3 held more after forward than its plan foresees. It may have needed"
        ):
            step(model, optimizer, rows=512)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)
            step(model, optimizer, rows=512)
        assert attached.recorded_steps == [0, 4]


class ManySines(nn.Module):
    """Its op is as small as those of a recurrence, which makes a node of autograd's graph for each of thousands of them."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:1]
        for _ in range(800):
            rows = rows.sin()
        return x + rows


@pytest.mark.skipif(held_now(torch.device("cpu")) is None, reason="nothing tells what the process holds")
def test_nodes_of_the_graph_are_no_memory_that_a_plan_should_have_foreseen() -> None:
    model = Blocks(2)
    for block in model.blocks:
        block.append(ManySines())
    with attached_loop("90%", model, SGD) as (_, optimizer, attached):
        for _ in range(3):
            step(model, optimizer, rows=32)
        assert attached.recorded_steps == [0]


class Force(Blocks):
    """Takes a gradient within its forward, whose graph it holds, as a force field does."""

    def forward(self, x: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(super().forward(x.requires_grad_()), x, create_graph=True)
        return force.square().sum()


class ForceOnCharges(Blocks):
    """Its first block gets what does not depend on the positions, and so no part of the gradient within."""

    def forward(self, x: Tensor) -> Tensor:
        charges = self.blocks[0](x.detach())
        (force,) = torch.autograd.grad(self.energy(charges, x.requires_grad_()), x, create_graph=True)
        return force.square().sum()

    def energy(self, charges: Tensor, x: Tensor) -> Tensor:
        for block in self.blocks[1:]:
            charges = charges + block(charges * x)
        return charges.square().mean()


class Descending(nn.Tanh):
    """Goes down a gradient of its own, which does not reach what a unit has returned."""

    def forward(self, x: Tensor) -> Tensor:
        inner = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(inner.square().sum(), inner)
        return super().forward(x - 0.1 * gradient)


class Heads(Blocks):
    """Runs one block on two scales."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.blocks[0](x[:64]).square().mean()


class Observed(nn.Module):
    """Its op updates statistics, and returns what it makes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.on = torch.ones(1, dtype=torch.long)
        self.statistics = [torch.zeros(1), torch.ones(1), torch.ones(1), torch.zeros(1, dtype=torch.int)]

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.fused_moving_avg_obs_fake_quant(x, self.on, self.on, *self.statistics, 0.01, 0, 255, -1)
        return made


class Watched(Blocks):
    """Compares what hooks collect in its layers, and holds it until the next step."""

    def __init__(self) -> None:
        super().__init__(8)
        self.seen: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            block[0].register_forward_hook(lambda _, __, output, index=index: self.seen.__setitem__(index, output))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(8, -1, 32)) + sum(one.abs().mean() for one in self.seen.values())


@pytest.mark.parametrize(
    ("kind", "budget"),
    [
        (Force, "100%"),
        (ForceOnCharges, "100%"),
        (Heads, "100%"),
        (Observed, "95%"),
        (Descending, "100%"),
        (Watched, "80%"),
    ],
)
def test_what_every_step_does_is_no_departure(kind: type[nn.Module], budget: str) -> None:
    model = kind() if issubclass(kind, Blocks) else Blocks()
    if not issubclass(kind, Blocks):
        for block in model.blocks:
            block.insert(2, kind())
    with attached_loop(budget, model, SGD) as (_, optimizer, attached), warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        step(model, optimizer, rows=512)
        warnings.simplefilter("error", BudgetWarning)
        step(model, optimizer, rows=512)
        step(model, optimizer, rows=512)
        assert attached.recorded_steps == [0] and attached.planned[0].more_bytes == 0


@pytest.mark.skipif(held_now(torch.device("cpu")) is None, reason="nothing tells what the process holds")
@pytest.mark.parametrize("is_tensor", [False, True], ids=["NumPy's", "a tensor"])
def test_only_tensors_count_as_held_beside_the_step(model: Blocks, is_tensor: bool) -> None:
    held: list[object] = []
    with attached_loop("90%", model, SGD) as (_, optimizer, attached), warnings.catch_warnings():
        warnings.simplefilter("ignore" if is_tensor else "error", BudgetWarning)
        for number in range(4):
            step(model, optimizer, rows=512)
            if number == 1:
                held.append(torch.zeros(1 << 20) if is_tensor else np.zeros(1 << 20))
        # Not with the margin, with which no plan fits.
        assert attached.planned[0].more_bytes == (4 << 20 if is_tensor else 0)


@pytest.mark.skipif(held_now(torch.device("cpu")) is None, reason="nothing tells what the process holds")
def test_what_was_there_before_the_first_planned_step_counts_too(model: Blocks) -> None:
    with attached_loop("100%", model, SGD) as (_, optimizer, attached):
        step(model, optimizer, rows=512)
        held = torch.zeros(1 << 20)
        with pytest.warns(BudgetWarning, match=r"[34]\.\d MiB of it as room for what other steps do or hold"):
            step(model, optimizer, rows=512)
        assert 0.95 * held.nbytes < attached.planned[0].more_bytes <= held.nbytes


def test_calls_after_the_planned_ones_need_no_more_where_nothing_waits_for_backward(model: Blocks) -> None:
    with attached_loop("100%", model, SGD) as (_, optimizer, attached):
        step(model, optimizer, rows=512)
        model(torch.randn(512, 32)).backward()
        model(torch.randn(512, 32), flag=True).backward()
        optimizer.step()
        assert attached.recorded_steps == [0]


@pytest.mark.skipif(held_now(torch.device("cpu")) is None, reason="nothing tells what the process holds")
def test_what_another_thread_releases_a_moment_late_is_not_said(model: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Tensor] = []
    waits: list[float] = []
    is_sending = False

    def send(*_: object) -> None:
        if is_sending:
            sent.append(torch.zeros(1 << 21))

    model.blocks[0].register_forward_hook(send)
    with attached_loop("90%", model, SGD) as (_, optimizer, attached):
        for _ in range(3):
            step(model, optimizer, rows=512)
        is_sending = True
        monkeypatch.setattr("recollect.attaching.held.time.sleep", lambda wait_s: (waits.append(wait_s), sent.clear()))
        step(model, optimizer, rows=512)
        assert waits and attached.recorded_steps == [0]


def test_what_was_missed_is_met_by_a_step_that_does_as_much() -> None:
    missed = Missed()
    missed.note([], [Course({"0": Runs(2, 8)})], attempts=2)
    assert missed.attempts_left == 2
    missed.end_attempt(is_met=False)
    assert missed.attempts_left == 1
    missed.end_attempt(is_met=True)
    assert missed.attempts_left == 0
    many = Course({str(number): Runs(1, 8) for number in range(20)})
    assert is_little([many], [{"0": 2}]) and not is_little([many], [{"0": 3}])


def test_spare_runs_are_completed_for_units_of_one_kind(model: Blocks) -> None:
    paths = [f"blocks.{number}" for number in range(4)]
    reserve = Reserve(model, paths, [], torch.device("cpu"))
    course = Course({"blocks.0": Runs(1, 8), "blocks.1": Runs(1, 8)})
    assert reserve.completed(course, {"blocks.2": 1}) == {"blocks.2": 1, "blocks.3": 1}
    assert reserve.completed(course, {}) == {}


def test_a_structure_is_looked_at(model: Blocks) -> None:
    structure = Structure(model)
    assert not structure.look() and structure.version == 0
    model.blocks.append(nn.GELU())
    assert structure.look(), "it has more modules"
    model.blocks[-1].weight = nn.Parameter(torch.zeros(32, 32))
    assert structure.look(), "it has another parameter"
    model.double()
    assert structure.look(), "its parameters have another dtype"
    handle = model.blocks[0].register_forward_hook(lambda *_: None)
    assert structure.look(), "a module has a hook"
    handle.remove()
    assert not structure.look() and structure.version == 4
    structure.remove()
    model.blocks.append(nn.Linear(32, 32))
    assert structure.look(), "what is registered unseen shows in the lengths"
