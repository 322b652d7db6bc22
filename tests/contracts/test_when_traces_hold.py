"""What may change after a unit was traced, and what cannot be traced: exact, and a line says which unit, why, what to do."""

import gc
import math
import os
import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recollect
from blocks import Computes
from contract_steps import Run, plain
from contract_units import HOOKS, POSITION, ROWS, UNITS, WIDTH, Case, Model, WrittenDouble
from engines import applied, num_tape_calls, traced, traced_forwards
from gradients import Step, assert_same_gradients
from policies import FULL, Only
from recollect.engine.captured import told_of_capture
from recollect.engine.graph import graph_engine
from recollect.errors import ConfigError, ConfigWarning, MutatedValueError

FEED_FORWARD = UNITS["feed forward"]
TO_DO = (
    r"\. To have them run from traces, take that out of their forward; to stay with the tape without this warning, plan them "
    r"with engine='tape'\.$"
)


def line(why_not: str, unit: str = "units.0") -> str:
    begin = (
        f"^recollect: unit '{unit}', and others like it, run on the tape, exactly but with more Python around each op: "
    )
    return begin + why_not + TO_DO


def changed(change: Callable[[Model], object], case: Case = FEED_FORWARD) -> tuple[Any, str]:
    """Train, change something, train on, and compare; return the handle, and why a unit is not traced any more."""
    plainly, model = case.model(), case.model()
    expected = Run(plainly)
    expected.through(plain, plain)
    with applied("graph", model, FULL) as handle:
        run = Run(model)
        run.through(plain, plain)
        assert num_tape_calls(handle) == len(model.paths)
        change(plainly)
        expected.through(plain, plain, plain)
        change(model)
        assert_same_gradients(expected.noted, run.through(plain, plain, plain))
    return handle, next((forward.why_not for forward in traced_forwards(handle) if forward.why_not), "")


def stays(case: Case, why_not: str, *steps: Callable[[Run], None]) -> None:
    """Check that a unit stays on the tape, with the same bits, and that one line says why."""
    model, expected = case.model(), Run(case.model()).through(*steps)
    with applied("graph", model, FULL), pytest.warns(ConfigWarning, match=line(why_not)) as told:
        assert_same_gradients(expected, Run(model).through(*steps))
    assert len(told) == 1


# What changes


@pytest.mark.parametrize("kind", ["forward hook", "forward pre hook"])
def test_a_hook_that_is_added_inside_a_unit(kind: str) -> None:
    """It is traced again with the hook, whose ops belong to the module around."""
    _, why_not = changed(lambda model: HOOKS[kind](model.units[0].second))
    assert why_not == ""


@pytest.mark.filterwarnings("ignore:recollect.*run on the tape, exactly")
@pytest.mark.parametrize("kind", ["full backward hook", "gradient hook", "post-accumulate hook"])
def test_other_hooks_that_are_added_inside_a_unit(kind: str) -> None:
    changed(lambda model: HOOKS[kind](model.units[0].second))


def test_hooks_of_parameters_that_get_no_gradient() -> None:
    """Eager mode calls none of them."""
    case = Case("in vain", lambda self, x: (self.first(x) * self.second.weight[0], self.second(x).tanh())[1])
    changed(lambda model: HOOKS["post-accumulate hook"](model.units[0].first), case)
    handle, why_not = changed(lambda model: HOOKS["gradient hook"](model.units[0].first), case)
    assert (num_tape_calls(handle), why_not) == (len(case.model().paths), "")


def test_a_hook_on_one_of_two_layers_that_share_code() -> None:
    handle, _ = changed(lambda model: HOOKS["forward hook"](model.units[1].second), UNITS["weights shared by units"])
    assert [forward.why_not for forward in traced_forwards(handle)] == ["", ""]


def test_a_hook_on_all_modules() -> None:
    handles: list[Any] = []

    def double(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 2 if isinstance(module, nn.Linear) else None

    try:
        changed(lambda _: handles or handles.append(nn.modules.module.register_module_forward_hook(double)))
    finally:
        handles[0].remove()


class Scaled(nn.Linear):
    def scaled(self, hidden: Tensor) -> Tensor:
        return hidden * 2

    def forward(self, input: Tensor) -> Tensor:
        return self.scaled(super().forward(input))


def _sine(power: int) -> object:
    class Sine:
        def __call__(self, hidden: Tensor) -> Tensor:
            return hidden.sin() ** power

    return Sine()


def test_an_object_of_a_class_that_is_gone() -> None:
    """Dynamo's guards of the old trace then hold for any call."""
    case = Case(
        "object",
        lambda self, x: self.function(self.first(x)),
        prepare=lambda model: setattr(model.units[0], "function", _sine(2)),
    )
    _, why_not = changed(lambda model: (setattr(model.units[0], "function", _sine(3)), gc.collect()), case)
    assert why_not == ""


def test_another_method_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("scaled", lambda self, x: self.inner(x).sin(), lambda: {"inner": Scaled(WIDTH, WIDTH)})
    with pytest.warns(ConfigWarning, match=line("a method of one of its classes was replaced")):
        changed(lambda _: monkeypatch.setattr(Scaled, "scaled", lambda self, hidden: hidden * 3), case)


def test_a_method_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(ConfigWarning, match=line("a method of one of its classes was replaced")):
        changed(lambda _: monkeypatch.setattr(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight) * 2))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.units[0], "first", nn.Linear(WIDTH, WIDTH)),
        lambda model: model.units[0].first.register_parameter("bias", None),
        lambda model: model.units[0].second.requires_grad_(False),
        lambda model: model.units[0].double() and model.float(),
        lambda model: model.units[0].load_state_dict({k: v * 2 for k, v in model.units[0].state_dict().items()}),
        lambda model: setattr(model.units[0].first.weight, "data", model.units[0].first.weight.data * 2),
        lambda model: torch.set_default_dtype(torch.float32),
    ],
    ids=["module", "no parameter", "frozen", "there and back", "loaded", "data", "nothing"],
)
def test_parts_that_are_replaced(change: Callable[[Model], object]) -> None:
    def the_same(model: Model) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            change(model)

    changed(the_same)


def test_a_part_that_is_replaced_before_it_runs() -> None:
    """BigBird chooses its attention so in the first step."""
    plainly, model = FEED_FORWARD.model(), FEED_FORWARD.model()
    with applied("graph", model, FULL) as handle:
        for one in (plainly, model):
            torch.manual_seed(7)
            one.units[0].first = nn.Linear(WIDTH, WIDTH)
        assert_same_gradients(Run(plainly).through(plain, plain, plain), Run(model).through(plain, plain, plain))
        assert num_tape_calls(handle) == len(model.paths)


def _caught(look_up: Callable[[Any], Any]) -> Any:
    """A unit that catches the error where an attribute, or a key, is missing."""

    def function(self: Any, x: Tensor) -> Tensor:
        try:
            return self.first(x).sin() * look_up(self)
        except (AttributeError, KeyError):
            return self.first(x).cos()

    return function


class Settings:
    scale = 1.0
    name = "factor"


@pytest.mark.parametrize(
    ("function", "change"),
    [
        (_caught(lambda self: self.factor), lambda model: setattr(model.units[0], "factor", 2.0)),
        (
            _caught(lambda self: getattr(self.first, Settings.name)),
            lambda model: setattr(model.units[0].first, "factor", 2.0),
        ),
        (_caught(lambda self: self.extra["factor"]), lambda model: model.units[0].extra.update(factor=2.0)),
        (_caught(lambda self: float(os.environ["RECOLLECT_FACTOR"])), lambda model: None),
        (lambda self, x: self.first(x) * float(os.getenv("RECOLLECT_FACTOR", "1")), lambda model: None),
        (lambda self, x: self.first(x) * hasattr(math, "factor"), lambda model: None),
        (lambda self, x: self.first(x) * Settings.scale, lambda model: None),
    ],
    ids=["attribute", "getattr", "key", "environment", "getenv", "of a Python module", "of a class"],
)
def test_what_is_missing_and_comes(function: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def comes(model: Model) -> None:
        monkeypatch.setenv("RECOLLECT_FACTOR", "2")
        monkeypatch.setattr(math, "factor", 2.0, raising=False)
        monkeypatch.setattr(Settings, "scale", 2.0)
        change(model)

    _, why_not = changed(comes, Case("missing", function, prepare=lambda model: setattr(model.units[0], "extra", {})))
    assert why_not == ""


@pytest.mark.parametrize("is_frozen", [False, True])
def test_weights_that_are_frozen_and_thawed(is_frozen: bool) -> None:
    case = Case(
        "asks what trains",
        lambda self, x: self.first(x).sin() if self.first.weight.requires_grad else self.first(x).cos(),
        prepare=lambda model: model.units[0].first.requires_grad_(not is_frozen),
    )
    _, why_not = changed(lambda model: model.units[0].first.requires_grad_(is_frozen), case)
    assert why_not == ""


def test_a_different_kernel_of_attention(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: torch.backends.cuda.enable_flash_sdp(True))
    handle, why_not = changed(lambda _: torch.backends.cuda.enable_flash_sdp(False), UNITS["cross attention"])
    # Once more on the tape, and then from a new trace.
    assert (num_tape_calls(handle), why_not) == (2 * len(UNITS["cross attention"].model().paths), "")


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have the type of their parameters")
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_gradients_of_another_type_than_their_parameters(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """As FSDP2 has them from torch 2.15 on, where it gathers parameters in 16 bits."""

    def scaled_in_32_bits() -> Computes:
        weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        return Computes(lambda self, rows: rows + (rows.float().sin() * self.weight).bfloat16(), weight=weight)

    plainly, model = (nn.Sequential(scaled_in_32_bits(), scaled_in_32_bits()) for _ in range(2))
    rows = torch.linspace(-1, 1, 8 * WIDTH, dtype=torch.bfloat16).view(8, WIDTH)
    with traced(model, ["0", "1"], FULL) as handle:
        for number in range(7):
            for one in (plainly, model):
                one.zero_grad()
                for parameter in one.parameters():
                    parameter.grad_dtype = dtypes[number > 3]
                one(rows).float().square().sum().backward()
            pairs = zip(plainly.parameters(), model.parameters(), strict=True)
            assert all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None)
        assert not any(forward.why_not for forward in traced_forwards(handle))


def test_an_attribute_that_changes_between_forward_and_backward() -> None:
    case = Case("scaled", lambda self, x: (self.first(x) * self.count).sin().exp())

    def steps(model: Model) -> Step:
        run = Run(model)
        for _ in range(3):
            model.units[0].count = 2
            data, loss = run.loss()
            model.units[0].count = 3
            loss.backward()
            run.end_step(data)
        return run.noted

    model, expected = case.model(), steps(case.model())
    with applied("graph", model, FULL) as handle:
        assert_same_gradients(expected, steps(model))
        assert num_tape_calls(handle) == 1


# What is not traced


def sine(hidden: Tensor) -> Tensor:
    return hidden.sin()


@torch.compiler.substitute_in_graph(sine)
def _sine_in_a_trace(hidden: Tensor) -> Tensor:
    return hidden.cos()


@pytest.mark.parametrize(
    ("function", "why_not"),
    [
        (
            (lambda self, x: self.first(x) if x.sum() > 0 else self.second(x)),
            r"Data-dependent branching in `\(lambda self, x: self.first\(x\) if x.sum\(\) > 0 else self.second\(x\)\),?` "
            r"\(test_when_traces_hold\.py:\d+\)",
        ),
        (
            lambda self, x: self.first(x) * x.sum().item(),
            r"what aten\._local_scalar_dense\.default gives back depends on data",
        ),
        (
            lambda self, x: sine(self.first(x)),
            r"traced, it runs other ops than in eager mode: cos \[4, 8\] of strides \[8, 1\] in place of sin \[4, 8\] of "
            r"strides \[8, 1\]",
        ),
        (lambda self, x: (self.first(x), x[1:]), "it returns a view of an input"),
    ],
    ids=["branch", "number", "other ops", "view"],
)
def test_what_cannot_be_traced(function: Any, why_not: str) -> None:
    stays(Case("untraceable", function), why_not, plain, plain, plain)


class AsksForLeaves(nn.Linear):
    """Does something else for what an op has made. [4, 8] -> [4, 8]."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self._chosen(super().forward(hidden), hidden)

    def _chosen(self, output: Tensor, hidden: Tensor) -> Tensor:
        return output.sin() if hidden.is_leaf else output.cos()


def _with_asking_hook() -> nn.Linear:
    part = nn.Linear(WIDTH, WIDTH)
    part.register_forward_hook(lambda module, args, output: output.sin() if args[0].is_leaf else output.cos())
    return part


class AsksForAll(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (2 if "factor" in self.__dict__ else 1)


@pytest.mark.parametrize(
    ("inner", "what"),
    [
        (lambda: AsksForLeaves(WIDTH, WIDTH), "code of AsksForLeaves uses is_leaf"),
        (_with_asking_hook, "a hook on Linear uses is_leaf"),
        (lambda: AsksForAll(WIDTH, WIDTH), "code of AsksForAll uses __dict__"),
    ],
    ids=["code", "hook", "names"],
)
def test_code_that_asks_what_no_guard_sees(inner: Callable[[], nn.Module], what: str) -> None:
    case = Case(
        "asks for leaves",
        lambda self, x: self.inner(x),
        parts=lambda: {"inner": inner()},
        calls=lambda units, x: units[0](x if units[0].count else x.detach().requires_grad_()),
    )

    def counted(run: Run) -> None:
        run.model.units[0].count = 1

    why_not = f"{what}, which a trace would take for constant"
    stays(case, why_not, plain, plain, plain, counted, plain, plain)


def test_guards_that_fail_in_every_call() -> None:
    why_not = r"its calls differ, and each would have to be traced: 'count == 1' did not hold in the last one"
    stays(UNITS["counter"], why_not, *[plain] * 8)


def test_arguments_of_many_shapes() -> None:
    case = Case(
        "shapes",
        FEED_FORWARD.function,
        calls=lambda units, x: torch.stack([units[0](x[:, :, None].expand(4, 8, n).mT).mean() for n in range(1, 11)]),
    )
    stays(case, "its arguments come in more than 8 shapes", plain, plain)


def _lengths_of(numbers: range) -> Case:
    """Calls with lengths of sequences, which the unit's code reads: their contents change, their shapes do not."""
    return Case(
        "lengths",
        UNITS["lengths read"].function,
        calls=lambda units, x: torch.stack(
            [units[0](x.repeat(3, 1), torch.tensor([0, number, 12])).mean() for number in numbers]
        ),
    )


def test_numbers_that_code_reads() -> None:
    case = _lengths_of(range(3, 6))
    model, expected = case.model(), Run(case.model()).through(plain, plain, plain)
    with applied("graph", model, FULL) as handle:
        assert_same_gradients(expected, Run(model).through(plain, plain, plain))
        # The first two of the first step, before it is known that code reads them; then each once.
        assert num_tape_calls(handle) == 5
        assert not any(forward.why_not for forward in traced_forwards(handle))


def test_numbers_of_a_buffer_that_changes() -> None:
    case = Case(
        "lengths of a buffer",
        lambda self, x: torch.cat([one.softmax(0).exp() for one in self.first(x).split(self.lengths.tolist())]),
        prepare=lambda model: model.units[0].register_buffer("lengths", torch.tensor([1, 3])),
    )
    _, why_not = changed(lambda model: model.units[0].lengths.copy_(torch.tensor([2, 2])), case)
    assert why_not == ""


def test_a_context_variable_that_changes(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(POSITION.set, POSITION.get()))
    _, why_not = changed(lambda _: POSITION.set(3.0), UNITS["context variable"])
    assert why_not == ""


def test_code_that_is_told_of_a_capture() -> None:
    with ExitStack() as told:
        _, why_not = changed(lambda _: told.enter_context(told_of_capture()), UNITS["asks of a capture"])
    assert why_not == ""


def test_a_stream_that_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    # In place of what a build without CUDA lacks.
    asked = "torch.cuda.graphs._cuda_isCurrentStreamCapturing"
    _, why_not = changed(lambda _: monkeypatch.setattr(asked, lambda: True), UNITS["asks of a capture"])
    assert why_not == ""


def test_a_check_that_fails() -> None:
    case = UNITS["numbers checked"]
    model = case.model()
    with applied("graph", model, FULL):
        Run(model).through(plain, plain)
        with pytest.raises(ValueError, match="got other lengths"):
            model.units[0](torch.zeros(4, WIDTH), torch.tensor([0, 1, 4]))


def _warns(self: Any, x: Tensor) -> Tensor:
    warnings.warn("masks of different types", stacklevel=1)
    return self.first(x).sin()


@pytest.mark.parametrize(("action", "num_on_tape"), [("default", 1), ("always", 3)])
def test_a_unit_that_warns(action: Any, num_on_tape: int) -> None:
    """By default a warning is shown once, and the tape's call has shown it."""
    case = Case("warns", _warns)
    model = case.model()
    with warnings.catch_warnings(record=True) as shown, applied("graph", model, FULL) as handle:
        warnings.resetwarnings()
        warnings.simplefilter(action)
        expected = Run(case.model()).through(plain, plain, plain)
        assert_same_gradients(expected, Run(model).through(plain, plain, plain))
        assert num_tape_calls(handle) == num_on_tape
    assert [one.category for one in shown].count(UserWarning) == (1 if action == "default" else 6)


def test_numbers_that_differ_in_every_call() -> None:
    stays(_lengths_of(range(1, 11)), "its arguments come in more than 8 shapes or contents", plain, plain)


def test_a_third_shape_where_the_tape_has_learned_what_to_watch() -> None:
    case = Case(
        "shapes",
        FEED_FORWARD.function,
        calls=lambda units, x: torch.stack([units[0](x[:n]).mean() for n in range(1, 5)]),
    )
    model, expected = case.model(), Run(case.model()).through(plain, plain)
    with applied("graph", model, Only(frozenset({"gelu"}))) as handle:
        assert_same_gradients(expected, Run(model).through(plain, plain))
        assert num_tape_calls(handle) == 4


def test_autocast_in_every_other_step() -> None:
    def in_turns(run: Run) -> None:
        for is_on in (False, True) * 3:
            with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
                plain(run)

    # The unit's input has the same type in both.
    case = Case("autocast", FEED_FORWARD.function, calls=lambda units, x: units[0](x.float()))
    model, expected = case.model(), Run(case.model()).through(in_turns)
    with applied("graph", model, FULL) as handle:
        assert_same_gradients(expected, Run(model).through(in_turns))
        # Once with it, and once without.
        assert num_tape_calls(handle) == 2
        assert not any(forward.why_not for forward in traced_forwards(handle))


def test_a_trace_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_engine, "_LONG_S", 0.0)
    model = FEED_FORWARD.model()
    message = r"^recollect: tracing unit 'units\.0' took \d+ s\. To train without that, plan it with engine='tape'\.$"
    with applied("graph", model, FULL), pytest.warns(ConfigWarning, match=message):
        Run(model).through(plain, plain)


@pytest.mark.filterwarnings("ignore:recollect. torch.compile has no effect")
def test_a_compiled_unit() -> None:
    model, expected = FEED_FORWARD.model(), Run(FEED_FORWARD.model()).through(plain, plain, plain)
    model.units[0].compile(backend="eager")
    with applied("graph", model, FULL) as handle:
        assert_same_gradients(expected, Run(model).through(plain, plain, plain))
        assert [forward.why_not for forward in traced_forwards(handle)] == ["its user compiled it"]


@pytest.mark.parametrize(
    ("runs_code_as_it_is", "why_not"),
    [
        (
            lambda: torch.compiler.set_stance("force_eager"),
            r"torch\.compiler\.set_stance\('force_eager'\) keeps Dynamo from tracing it",
        ),
        (
            lambda: torch._dynamo.config.patch(disable=True),
            r"Dynamo is switched off \(TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE\)",
        ),
    ],
    ids=["stance", "switch"],
)
def test_where_dynamo_would_run_a_unit_as_it_is(runs_code_as_it_is: Callable[[], Any], why_not: str) -> None:
    """It stays on the tape, and recording runs it only once: what it draws is as without."""
    dropout = UNITS["dropout"].function
    case = Case("dropout", dropout, num_units=2, calls=lambda units, x: units[1](units[0](x)))
    model, expected = case.model(), Run(case.model()).through(plain, plain)
    rows, drawn = torch.ones(ROWS, WIDTH), torch.get_rng_state()
    with runs_code_as_it_is():
        profile = recollect.record(model, rows, loss_fn=sum, engine="graph")
        assert torch.equal(drawn, torch.get_rng_state())
        with applied("graph", model, FULL), pytest.warns(ConfigWarning, match=line(why_not)):
            assert_same_gradients(expected, Run(model).through(plain, plain))
    assert re.fullmatch(why_not, profile.graphs[-1].why_not_traced)


# What no backward can do


def after_a_trace(name: str = "kept value out") -> tuple[Any, Run]:
    model = UNITS[name].model()
    handle = applied("graph", model, FULL)
    run = Run(model)
    run.through(plain, plain)
    return handle, run


@pytest.mark.parametrize(
    ("number", "what"), [(0, "its base or another view of its base has been modified"), (1, "is being modified")]
)
def test_writes_to_outputs_that_share_memory(number: int, what: str) -> None:
    """Autograd refuses them: the other output's gradient would lack the write."""
    handle, run = after_a_trace("value and its view out")
    with handle, pytest.raises(RuntimeError, match=f"is a view and {what} inplace"):
        outputs = run.model.units[0](run.model.stem(torch.ones(ROWS, WIDTH)))
        outputs[number].mul_(2)
        outputs[1].sum().backward()


def test_a_backward_that_writes_to_an_input() -> None:
    model = Case("unit", lambda self, x: WrittenDouble.apply(self.first(x), self.seen)).model()
    with applied("graph", model, FULL) as handle, pytest.warns(ConfigWarning, match="to its inputs|same tensor twice"):
        Run(model).through(plain, plain)
    assert traced_forwards(handle)[0].why_not


def test_second_derivatives() -> None:
    handle, run = after_a_trace()
    message = (
        r"create_graph=True.*unit 'units\.0' runs from a trace, which has no second derivatives.*"
        r"Use the engine 'tape' for it, or leave it out of the plan"
    )
    with handle, pytest.raises(ConfigError, match=message):
        run.loss()[1].backward(create_graph=True)


def test_a_second_backward_without_the_graph() -> None:
    handle, run = after_a_trace()
    message = (
        r"^backward ran a second time through unit 'units\.0', and what it had saved is freed\. Call the first backward with "
        r"retain_graph=True\.$"
    )
    with handle:
        output = run.model.units[0](torch.ones(4, WIDTH))[1].sum()
        output.backward()
        with pytest.raises(RuntimeError, match=message):
            output.backward()


def test_what_a_unit_writes_to_is_seen_outside() -> None:
    model = UNITS["other input written"].model()
    with applied("graph", model, FULL) as handle:
        run = Run(model)
        run.through(plain, plain)
        table, weight = torch.ones(4, WIDTH), torch.ones(4, WIDTH, requires_grad=True)
        product = weight * table
        model.units[0](torch.ones(4, WIDTH), table)
        assert num_tape_calls(handle) == 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.parametrize("write", [lambda unit, given, made: made.add_(1), lambda unit, given, made: given.add_(1)])
def test_writes_before_backward(write: Callable[..., Any]) -> None:
    handle, run = after_a_trace()
    unit, given = run.model.units[0], torch.ones(4, WIDTH)
    with handle:
        made, other = unit(given)
        with torch.no_grad():
            write(unit, given, made)
        message = (
            r"a tensor of shape \[4, 8\], saved for backward in units\.0, was changed in place 1 time before backward"
        )
        with pytest.raises(MutatedValueError, match=message):
            other.sum().backward()


def test_writes_that_raise_no_version() -> None:
    """Seen, as on the tape, where an op would run again on a small tensor; autograd's own formulas read what is there now."""
    handle, run = after_a_trace("feed forward")
    with handle:
        _, loss = run.loss()
        run.model.units[0].first.bias.data.mul_(2)
        message = r"a tensor of shape \[8\], saved for backward in units\.0, was changed in place \(through `\.data` or NumPy\)"
        with pytest.raises(MutatedValueError, match=message):
            loss.backward()
