"""What the lines of `attach` say of a step: its calls, and what sets it apart from one whose calls look the same."""

import re
import warnings
from typing import Any

import pytest
import torch

import recollect
from recollect.attaching.planned_step import difference
from residual_model import Model, attached_loop, step


class Weighted(Model):
    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None, *, scale: bool = False) -> torch.Tensor:
        loss = super().forward(x) * (2 if scale else 1)
        return loss if weight is None else loss * weight.mean()


def lines_of(steps: list[list[dict[str, Any]]], *, keeps_gradients: bool = False) -> tuple[list[str], str]:
    model = Weighted()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lines: list[str] = []
    with recollect.attach(model, optimizer, "1GiB", log=lines.append) as attached:
        for calls in steps:
            if not keeps_gradients:
                optimizer.zero_grad()
            for call in calls:
                model(**call).backward()
            optimizer.step()
        report = attached.report()
    return [line.partition(", planned for ")[2].partition(" in ")[0] for line in lines], report


X = torch.randn(4, 16, 32)


def test_all_calls_are_named() -> None:
    lines, report = lines_of([[{"x": X}, {"x": X}, {"x": X[:1]}]])
    assert lines == ["2 calls of 4 x 16 x 32 and 1 x 16 x 32"]
    assert "\n2 calls of 4 x 16 x 32 and 1 x 16 x 32, as in step 0: predicted peak " in report


def test_a_slowdown_that_was_measured_is_told() -> None:
    with attached_loop("90%", Weighted()) as (model, optimizer, attached):

        def step() -> None:
            model(X).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        assert attached.plan is not None
        assert (
            "\nslowdown not measured, for want of a step without a plan: print(recollect.verify(" in attached.report()
        )
        verified = recollect.verify(model, None, attached.plan, step=step, optimizer=optimizer)
        assert f"\nslowdown {verified.slowdown_text()}\n" in attached.report()
        assert "past_key_values" not in attached.report()


@pytest.mark.parametrize(
    ("second", "unlike"),
    [
        ([{"x": X, "scale": True}], "arguments False and True"),
        ([{"x": X, "weight": torch.ones(3)}], "the number of tensors"),
        ([{"x": X.clone().requires_grad_()}], "what requires a gradient"),
    ],
    ids=["argument", "number", "gradient"],
)
def test_steps_that_look_the_same_are_told_apart(second: list[dict[str, Any]], unlike: str) -> None:
    first: list[dict[str, Any]] = [{"x": X, "scale": False}] if "scale" in second[0] else [{"x": X}]
    lines, report = lines_of([first, second, second])
    # The second may need no plan of its own; where it has one, its line is another.
    assert len(set(lines)) == len(lines)
    assert lines[1:] == [] or lines[1].startswith(f"4 x 16 x 32 (unlike step 0: {unlike}")
    assert len(set(report.splitlines())) == len(report.splitlines())


def test_gradients_before_a_step_are_named() -> None:
    lines, report = lines_of([[{"x": X}]] * 3, keeps_gradients=True)
    assert lines == ["4 x 16 x 32", "4 x 16 x 32 (unlike step 0: gradients that are there before it)"]
    assert "4 x 16 x 32 (unlike step 0: gradients that are there before it), as in step 1: " in report


def test_a_step_that_was_planned_again_says_why() -> None:
    with attached_loop("1GiB", Weighted()) as (model, optimizer, attached):
        model(X).backward()
        optimizer.step()
        (planned,) = attached.planned
    assert difference(planned, planned) == ""  # As where it was recorded again.
    assert re.search(r"predicted peak \S+ \S+, step \+0\.0%, full recompute \+\d+%, planned for ", planned.line(1.0))
    assert planned.line(1.0, ", with room for 1.0 MiB more,").endswith(
        ", planned again for 4 x 16 x 32, with room for 1.0 MiB more, in 1.0 s"
    )


class ReadsANumber(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum().item() < 1e9 else -x)


def test_layers_that_an_engine_leaves_to_the_tape_are_told_once() -> None:
    model, lines = Model(inner=128), list[str]()
    for layer in model.layers:
        setattr(layer, "0", ReadsANumber(32, 128))
    with attached_loop("80%", model, torch.optim.SGD, engine="graph", log=lines.append) as (_, optimizer, attached):
        step(model, optimizer, rows=512)
        step(model, optimizer, rows=544)
        report = attached.report()
    notes = [line for line in lines if " run on the tape: " in line]
    assert attached.recorded_steps == [0, 1] and len(notes) == 1
    assert re.match(r"recollect: (\d) of \1 layers run on the tape: .* data-dependent", notes[0])
    assert " run on the tape: " in report


class Repeated(Model):
    def forward(self, x: torch.Tensor, *, times: str = "1") -> torch.Tensor:
        return super().forward(torch.cat([x] * int(times)))


def test_a_step_that_needs_more_than_what_was_told_of_equal_shapes_is_told() -> None:
    with attached_loop("80%", Repeated()) as (model, optimizer, _), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for times in "1", "4", "4", "8":
            step(model, optimizer, rows=512, times=times)
    told = [str(warning.message).partition(" 512 x 32 ")[0] for warning in caught]
    assert told.count("recollect: no plan fits a step of") == 2
