"""`recollect.largest_batch` on real models: what it says fits really does, what it says does not, does not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from predictions import reference_gpt
from recollect.errors import ArgumentError, BudgetTooSmallError, RecordError
from recollect.lab.bench.race import few_objects
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.planning.choose import Planner
from scaled_model import Scaled

LENGTH = 48
VOCABULARY = 128
MOST = 10
Batch = dict[str, Tensor]


def small_llama() -> nn.Module:
    return GPTModel(llama_config(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=VOCABULARY))


def tokens_of(sequences: int, length: int, device: str) -> Batch:
    tokens = torch.zeros(sequences, length, dtype=torch.int64, device=device)
    if device == "cpu":
        tokens.random_(VOCABULARY)
    return {"tokens": tokens, "labels": tokens.clone()}


def sequences(size: int, device: str = "meta") -> Batch:
    return tokens_of(size, LENGTH, device)


def longer(size: int, device: str = "meta") -> Batch:
    return tokens_of(2, 16 * size, device)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


CASES = [
    pytest.param(small_llama, sequences, id="Llama, sequences"),
    pytest.param(small_llama, longer, id="Llama, length", marks=pytest.mark.long),
    pytest.param(reference_gpt, sequences, id="GPT with dropout, sequences", marks=pytest.mark.long),
]


def budget_between(model: nn.Module, make_batch: Callable[[int], Batch], size: int) -> int:
    """A budget two thirds of the way from this size's peak without recompute to that of full recompute."""
    profile = recollect.record(model, make_batch(size), optimizer=adamw(model), fake=True)
    plain_bytes = Planner(profile).plain_peak_bytes
    full_bytes = recollect.classic_plan(profile, "full").predicted_peak_bytes or 0
    return plain_bytes - (plain_bytes - full_bytes) * 2 // 3


@pytest.mark.parametrize(("make_model", "make_batch"), CASES)
def test_it_really_fits_and_the_next_does_not(
    make_model: Callable[[], nn.Module], make_batch: Callable[..., Batch]
) -> None:
    """By real steps: measured peaks of the size and the next, without recompute and with the plans that the search knows."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = adamw(model)
    budget_bytes = budget_between(model, make_batch, 4)
    found = recollect.largest_batch(model, make_batch, budget_bytes, optimizer=optimizer)
    assert found.without_recompute is not None
    plain_size, planned_size = found.without_recompute.size, found.planned.size
    assert plain_size < planned_size
    assert found.planned.plan is not None

    def peak_bytes(size: int, plan: recollect.Plan) -> int:
        with few_objects():
            report = recollect.verify(model, make_batch(size, "cpu"), plan, optimizer=optimizer, time=False)
        assert report.equal
        return report.plan_peak_bytes

    assert peak_bytes(planned_size, found.planned.plan) <= budget_bytes
    next_step = Planner(recollect.record(model, make_batch(planned_size + 1), optimizer=optimizer, fake=True))
    with pytest.raises(BudgetTooSmallError) as refused:
        next_step.plan(budget_bytes)
    assert peak_bytes(planned_size + 1, next_step.plan(refused.value.least_peak_bytes)) > budget_bytes
    assert peak_bytes(plain_size, recollect.Plan({})) <= budget_bytes
    assert peak_bytes(plain_size + 1, recollect.Plan({})) > budget_bytes


@pytest.mark.parametrize(
    "settings",
    [
        {"holds_output": False, "gradients": "freed", "loss_chunks": 2, "hardware": "RTX 4090"},
        {"units": ["decoder.layers.0", "decoder.layers.1"], "loss_fn": lambda output: output.loss * 2},
    ],
    ids=["of the loop", "of the model"],
)
def test_settings_of_the_step_arrive(settings: dict[str, Any]) -> None:
    model = small_llama()
    given = {"optimizer": adamw(model), **settings}
    once = {name: iter(value) if name == "units" else value for name, value in given.items()}
    found = recollect.largest_batch(model, sequences, "90% of the device", max_size=1, **once)
    profile = recollect.record(model, sequences(1), fake=True, **given)
    (row,) = found.tried
    assert (row.plain_peak_bytes, row.step_s) == (Planner(profile).plain_peak_bytes, profile.step_s)
    assert row.plan is not None
    assert row.plan.units.keys() == recollect.plan(profile, "90% of the device").units.keys()
    assert found.device_name == profile.device_name


def test_a_batch_that_the_model_rejects() -> None:
    model = small_llama()
    with pytest.raises(RecordError, match=r"^size 1: GPTModel rejected the batch \(words int64\[1\]\): TypeError: "):
        recollect.largest_batch(model, lambda size: {"words": torch.zeros(size, dtype=torch.int64)}, "1GiB")


def test_a_length_that_the_model_has_no_positions_for() -> None:
    model = reference_gpt()
    assert isinstance(model, GPTModel)
    with pytest.raises(
        RecordError, match=r"^length \d+: tokens: got \d+ positions, .* length 128 could be recorded; if"
    ):
        recollect.largest_batch(model, lambda size: tokens_of(1, size, "meta"), "1GiB", multiple_of=64, along="length")


def test_arguments_of_another_kind() -> None:
    call = r"^recollect\.largest_batch\(model, make_batch, budget\): got an object of class "
    swapped: Any = recollect.largest_batch
    with pytest.raises(ArgumentError, match=call + "function as model, expected one of class torch.nn.Module"):
        swapped(sequences, small_llama(), "1GiB")
    with pytest.raises(ArgumentError, match=call + "dict as make_batch, expected a function from a size to a batch"):
        swapped(small_llama(), sequences(1), "1GiB")


def test_a_model_that_asks_for_content() -> None:
    model = Scaled(lambda self, rows: (rows * self.weight).sum() if rows.sum() > 0 else rows.sum())
    with pytest.raises(RecordError, match=r"^size 1: cannot record Scaled on fake tensors: .* asks for the content"):
        recollect.largest_batch(model, lambda size: torch.ones(size, 2), "1GiB", units=[""])
