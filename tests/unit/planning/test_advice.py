"""What the error of a budget that is too small says would help: one case for each place where the bytes can be."""

from dataclasses import replace

import pytest

import recollect
from recollect.byte_format import format_bytes
from recollect.errors import BudgetTooSmallError
from recollect.planning.choose import advice, lasting_bytes
from recollect.planning.planners import plan
from recollect.profile.events import WORK, StepLog
from recollect.profile.profile import Profile
from small_llama import llama_step
from synthetic_step import random_step
from toy_profile import stack


def refused(profile: Profile, budget_bytes: int) -> BudgetTooSmallError:
    with pytest.raises(BudgetTooSmallError) as error:
        plan(profile, budget_bytes)
    return error.value


def test_what_lives_through_the_step_is_named_with_its_bytes() -> None:
    profile = replace(stack(1), persistent={"parameters": 1000, "buffers": 0, "optimizer_state": 2048})
    (said,) = advice(profile, budget_bytes=3048, least_peak_bytes=9000, peak_call="layers.0")
    assert said == (
        "What lives through the whole step takes 3.0 KiB by itself (parameters 1000 B, optimizer state 2.0 KiB), which no "
        "recompute changes: shard it (FSDP), or use an optimizer with less state or bf16 parameters."
    )
    assert "by itself" not in advice(profile, budget_bytes=3049, least_peak_bytes=9000, peak_call="layers.0")[0]


def test_gradients_that_the_step_makes_live_to_its_end_too() -> None:
    model, batch = llama_step(4, 32)
    profile = recollect.record(model, batch, fake=True, holds_output=False, gradients="freed")
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert lasting_bytes(profile) == num_bytes
    error = refused(profile, 2 * num_bytes)
    assert f"gradients {format_bytes(num_bytes)}" in str(error) and "or bf16 parameters." in str(error)
    half = refused(recollect.record(model.bfloat16(), batch, fake=True), num_bytes // 4)
    assert "by itself" in str(half) and "bf16 parameters" not in str(half)


def test_optimizer_step() -> None:
    profile = stack(1)
    (said,) = advice(profile, budget_bytes=8000, least_peak_bytes=9000, peak_call="the optimizer step")
    assert said == (
        "The peak is the workspace of the optimizer's step, which no recompute changes: make the optimizer with foreach=False "
        "(one parameter at a time) or fused=True, or use one with less state."
    )


@pytest.mark.parametrize("where", ["head", "the loss and what surrounds the units"])
def test_loss_with_large_logits(where: str) -> None:
    profile = stack(1)
    said = advice(profile, budget_bytes=1500, least_peak_bytes=1000 + 800, peak_call=where)
    assert said[0] == (
        "The peak is in the loss and the head, whose output alone takes 80 B: compute the loss in chunks "
        '(recollect.fit(..., loss_chunks="auto")).'
    )
    assert said[1].startswith("Use a smaller micro-batch")


@pytest.mark.parametrize(("peak_bytes", "where"), [(1000 + 801, "head"), (1800, "layers.0"), (1800, "embed")])
def test_loss_is_not_blamed_for_what_it_does_not_take(peak_bytes: int, where: str) -> None:
    profile = stack(1)
    said = advice(profile, budget_bytes=1500, least_peak_bytes=peak_bytes, peak_call=where)
    assert "chunks" not in " ".join(said)


def test_a_layer_gets_the_part_of_the_batch_that_fits() -> None:
    profile = stack(1)
    said = advice(profile, budget_bytes=1300, least_peak_bytes=1000 + 900, peak_call="layers.0")
    assert said == (
        "Use shorter sequences: about 5 of the 16 positions of the recorded ones (2 x 16) fit.",
        'Or let part of what backward needs go to host memory (host_budget="64GiB", or as much as there is).',
    )


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ("12 x 128", "about 4 of the 12 samples of the recorded one (12 x 128) fit."),
        ("tokens int64[3, 9], labels int64[3, 9]", "about 1 of the 3 samples of the recorded one"),
        ("float32[2, 3, 8, 8]", "about 1 of the 3 positions"),
        ("1 x 2", "Or let part of what backward needs go to host memory"),
        ("list", "about 33 % of the recorded one (list) fits."),
    ],
)
def test_the_batch_that_is_advised_exists(batch: str, said: str) -> None:
    profile = replace(stack(1), batch=batch)
    assert said in advice(profile, budget_bytes=1301, least_peak_bytes=1900, peak_call="layers.0")[0]


def test_part_of_the_batch_that_is_said_to_fit_does() -> None:
    """On a real model, whose peak is in a layer: the micro-batch that the error names has a plan."""
    model, batch = llama_step(32, 128, vocab_size=8)
    profile = recollect.record(model, batch, fake=True)
    error = refused(profile, profile.persistent_bytes + lasting_bytes(profile) + 1)
    budget_bytes = (error.least_peak_bytes + profile.persistent_bytes + lasting_bytes(profile)) // 2
    error = refused(profile, budget_bytes)
    num_samples = int(str(error).partition("about ")[2].partition(" of the 32 samples")[0])
    assert 10 <= num_samples <= 16
    smaller = {name: tokens[:num_samples] for name, tokens in batch.items()}
    assert recollect.plan(recollect.record(model, smaller, fake=True), budget_bytes).predicted_peak_bytes


def test_planner_gives_the_advice_of_the_least_peak() -> None:
    profile = random_step(0, num_values=5)
    # Whatever is kept, the optimizer's step has the peak.
    events = tuple((WORK, 5000) if event == (WORK, 30) else event for event in profile.log.events)
    profile = replace(profile, log=StepLog(events))
    with pytest.raises(
        BudgetTooSmallError,
        match=r"which the optimizer step needs\. It is filled by working memory while .*\. Raise the budget to '.+' or '.+'\. "
        "The peak is the workspace",
    ):
        plan(profile, 4000)
