"""The mistakes of the first hour: swapped arguments, paths, classes, typos, another model's plan. None costs a step."""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recollect
from recollect.errors import (
    ArgumentError,
    HardwareError,
    MissingFileError,
    PlanError,
    PlanFormatError,
    PlanMismatchWarning,
    ProfileFormatError,
    QuantityError,
    RecordError,
    UnknownNameError,
)
from recollect.lab.bench.settings import parse_setting
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.lab.train.optimizer_step import resolve_device

TOKENS = torch.zeros(1, 16, dtype=torch.int64)
BATCH = {"tokens": TOKENS, "labels": TOKENS}


class Untouched(nn.Linear):
    """A model that must not run."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it ran")


def llama(num_layers: int) -> GPTModel:
    return GPTModel(llama_config(num_layers=num_layers, hidden_size=32, num_attention_heads=2, vocab_size=64))


MODEL = Untouched(2, 2)
ADAMW = torch.optim.AdamW(MODEL.parameters())
PROFILE = recollect.record(llama(2), BATCH, fake=True)
PLAN = recollect.plan(PROFILE, "100%")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: recollect.plan("p.json", "60%"),  # type: ignore[arg-type]
            "recollect.plan(profile, budget): got the text 'p.json' as profile, expected one of class recollect.Profile. "
            "Load it first: recollect.Profile.load('p.json').",
        ),
        (lambda: recollect.plan(Path("p.json"), 60), "got the path 'p.json' as profile"),  # type: ignore[arg-type]
        (
            lambda: recollect.plan("60%", PROFILE),  # type: ignore[arg-type]
            "got the text '60%' as profile, expected one of class recollect.Profile. Call it as recollect.plan(profile, ",
        ),
        # A profile that was read as text.
        (
            lambda: recollect.plan(" " * 200 + PROFILE.to_json(), 60),  # type: ignore[arg-type]
            " '... as profile, expected one of class recollect.Profile. Call it",
        ),
        (lambda: recollect.frontier(PLAN), "recollect.frontier(profile): got an object of class Plan as profile"),  # type: ignore[arg-type]
        (
            lambda: recollect.classic_plan("full", PROFILE),  # type: ignore[arg-type]
            "got the text 'full' as profile, expected one of class recollect.Profile",
        ),
        (
            lambda: recollect.apply(PLAN, MODEL),  # type: ignore[arg-type]
            "recollect.apply(model, plan): got an object of class Plan as model, expected one of class torch.nn.Module. "
            "Call it as recollect.apply(model, plan).",
        ),
        (lambda: recollect.apply(MODEL, "plan.json"), "Load it first: recollect.Plan.load('plan.json')."),  # type: ignore[arg-type]
        (
            lambda: recollect.apply(Untouched, PLAN),
            "the class Untouched as model, expected one of class torch.nn.Module. Make one: ",
        ),  # type: ignore[arg-type]
        (
            lambda: recollect.fit(BATCH, MODEL),  # type: ignore[arg-type]
            "recollect.fit(model, batch, budget): got an object of class dict as model",
        ),
        (
            lambda: recollect.record(BATCH, MODEL),
            "recollect.record(model, batch): got an object of class dict as model",
        ),  # type: ignore[arg-type]
        (
            lambda: recollect.verify(BATCH, MODEL, PLAN),
            "recollect.verify(model, batch, plan): got an object of class dict",
        ),  # type: ignore[arg-type]
        (lambda: recollect.verify(MODEL, PLAN, BATCH), "got an object of class dict as plan"),  # type: ignore[arg-type]
        (
            lambda: recollect.attach(ADAMW, MODEL),
            "recollect.attach(model, optimizer, budget): got an object of class AdamW",
        ),  # type: ignore[arg-type]
        (
            lambda: recollect.attach(MODEL, ADAMW, 60_000, units="layers"),
            "units: got the text 'layers', expected a list of ",
        ),
        (
            lambda: recollect.record(MODEL, TOKENS, units="0"),
            "units: got the text '0', expected a list of paths. Write units=['0'].",
        ),
        (lambda: recollect.attach("model", ADAMW), "got the text 'model' as model"),  # type: ignore[arg-type]
        (
            lambda: recollect.timeline(PLAN, PROFILE),  # type: ignore[arg-type]
            "recollect.timeline(profile, plan): got an object of class Plan as profile",
        ),
        (lambda: recollect.timeline(PROFILE, "plan.json"), "Load it first: recollect.Plan.load('plan.json')."),  # type: ignore[arg-type]
        (
            lambda: recollect.explain_peak(PLAN),  # type: ignore[arg-type]
            "recollect.explain_peak(profile, plan): got an object of class Plan as profile",
        ),
        (lambda: recollect.explain_peak(PROFILE, PROFILE), "got an object of class Profile as plan"),  # type: ignore[arg-type]
        (
            lambda: recollect.layer_usage(PLAN, PROFILE),  # type: ignore[arg-type]
            "recollect.layer_usage(profile, plan): got an object of class Plan as profile",
        ),
        (lambda: recollect.layer_usage(PROFILE, None), "got an object of class NoneType as plan"),  # type: ignore[arg-type]
        (
            lambda: recollect.megatron_plan(MODEL, recollect.RecomputeConfig()),  # type: ignore[arg-type]
            "recollect.megatron_plan(profile, config): got an object of class Untouched as profile",
        ),
        (
            lambda: recollect.megatron_plan(PROFILE, {"recompute_granularity": "full"}),  # type: ignore[arg-type]
            "got an object of class dict as config, expected one of class recollect.RecomputeConfig",
        ),
    ],
)
def test_arguments_of_another_kind(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        call()
    assert recollect.applied_to(MODEL) == []


def edited(made: recollect.Plan | recollect.Profile, **changes: Any) -> bytes:
    return json.dumps({**json.loads(made.to_json()), **changes}).encode()


@pytest.mark.parametrize(("kind", "what"), [(recollect.Plan, "a plan"), (recollect.Profile, "a profile")])
def test_files_that_cannot_be_loaded(
    kind: type[recollect.Plan] | type[recollect.Profile], what: str, tmp_path: Path
) -> None:
    """Nothing there, a folder, an empty file, no text, no JSON, and JSON of a later version or the other kind."""
    with pytest.raises(
        MissingFileError, match=rf"none\.json: no such file, expected {what} that .*(Make|Record) one: "
    ):
        kind.load(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError, match=r"no such file, nor its folder .*nowhere, expected"):
        kind.load(tmp_path / "nowhere" / "none.json")
    error = PlanFormatError if kind is recollect.Plan else ProfileFormatError
    with pytest.raises(error, match=rf"is a folder, expected {what} that "):
        kind.load(tmp_path)
    (tmp_path / "empty.json").write_text("\n")
    with pytest.raises(error, match=rf"empty\.json: is empty, expected {what} that "):
        kind.load(tmp_path / "empty.json")
    own, other = (PLAN, PROFILE) if kind is recollect.Plan else (PROFILE, PLAN)
    bad = {
        rf"not {what}": b"\xff\xfe\x00",
        r"line 1, column 11: not JSON": b'{"format":',
        r"version: got 99, but this recollect reads up to \d\. Update": edited(own, version=99),
        r"format: got \"recollect\.\w+\", expected 'recollect\.\w+'": edited(other),
    }
    for message, data in bad.items():
        (tmp_path / "bad.json").write_bytes(data)
        with pytest.raises(error, match=rf"bad\.json: {message}"):
            kind.load(tmp_path / "bad.json")


OPTIMIZER_CALLS: dict[str, Callable[[Any], object]] = {
    "record": lambda optimizer: recollect.record(MODEL, TOKENS, optimizer=optimizer),
    "fit": lambda optimizer: recollect.fit(MODEL, TOKENS, "60%", optimizer=optimizer),
    "attach": lambda optimizer: recollect.attach(MODEL, optimizer, "60%"),
    "verify": lambda optimizer: recollect.verify(MODEL, TOKENS, PLAN, optimizer=optimizer),
}


@pytest.mark.parametrize("call", OPTIMIZER_CALLS.values(), ids=OPTIMIZER_CALLS)
def test_optimizers_that_are_none_or_of_another_model(call: Callable[[Any], object]) -> None:
    with pytest.raises(
        RecordError, match=re.escape("got the class AdamW, expected an optimizer made from it. Make one: ")
    ):
        call(torch.optim.AdamW)
    with pytest.raises(RecordError, match="is a parameter of this Untouched, so it trains a different model"):
        call(torch.optim.AdamW(nn.Linear(2, 2).parameters()))
    with pytest.raises(RecordError, match="optimizer: got a list_iterator, expected an optimizer of torch.optim"):
        call(iter([]))


def test_a_budget_in_place_of_the_optimizer() -> None:
    message = "got '1GiB', expected an optimizer. A budget comes after it: recollect.attach(model, optimizer, '1GiB')."
    with pytest.raises(RecordError, match=re.escape(message)):
        recollect.attach(MODEL, "1GiB")


def test_an_optimizer_that_tells_nobody_of_its_steps() -> None:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, defaultdict(dict)

    inner = torch.optim.SGD(MODEL.parameters())
    message = (
        "Lookahead has no hooks after its step, since torch.optim.Optimizer.__init__ did not run for it. If it steps "
    )
    with pytest.raises(RecordError, match=message):
        recollect.attach(MODEL, Lookahead(inner), "1GiB")
    recollect.attach(MODEL, inner, "1GiB").remove()


def test_a_name_that_is_nearly_one_of_ours() -> None:
    with pytest.raises(AttributeError, match=r"^module 'recollect' has no attribute 'attac'; did you mean 'attach'\?$"):
        recollect.attac  # type: ignore[attr-defined]  # noqa: B018 - it raises
    with pytest.raises(AttributeError, match=r"'quux'$"):
        recollect.quux  # type: ignore[attr-defined]  # noqa: B018 - it raises


def test_a_plan_cannot_be_saved_where_no_file_can_be(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere" / "plan.json"
    with pytest.raises(
        PlanError, match=re.escape(f"{missing}: cannot be written (no folder {missing.parent}), expected")
    ):
        PLAN.save(missing)
    with pytest.raises(PlanError, match=re.escape(f"{tmp_path}: cannot be written (Is a directory), expected a file")):
        PLAN.save(tmp_path)
    for name in ("p.json", "p.json.gz"):
        with pytest.raises(
            ProfileFormatError, match=re.escape(f"{name}: cannot be written (no folder {missing.parent})")
        ):
            PROFILE.save(missing.parent / name)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("60", "'60': has no unit; write '60%'"),
        ("6GXB", "'6GXB': unknown suffix"),
        (0.6, "0.6: has no unit; write '60%'"),
    ],
)
def test_typos_in_a_budget_are_found_before_a_step_runs(budget: Any, message: str) -> None:
    with pytest.raises(QuantityError, match=re.escape(message)):
        recollect.fit(MODEL, TOKENS, budget)
    with pytest.raises(QuantityError, match=re.escape(message)):
        recollect.attach(MODEL, ADAMW, budget)
    assert recollect.applied_to(MODEL) == []


def test_part_of_a_device_without_a_size_is_found_before_a_step_runs() -> None:
    advice = "Give bytes, such as '16GiB', or a part of the peak without recompute, such as '60%'"
    with pytest.raises(QuantityError, match=f"the device's memory is known only for CUDA devices.*{advice}"):
        recollect.fit(MODEL, TOKENS)
    with pytest.raises(QuantityError, match="the device's memory is known only for CUDA devices.*Give bytes, such as"):
        recollect.attach(MODEL, ADAMW)


def test_typos_in_a_setting_are_found_when_it_is_read() -> None:
    with pytest.raises(QuantityError, match="write '60%'"):
        parse_setting("memory_budget 60")


@pytest.mark.parametrize("name", ["gpu0", "gpu", "cuda:77", "cuda:-1", "meta", ""])
def test_devices_that_are_not_here(name: str) -> None:
    with pytest.raises(HardwareError, match=rf"^--device {name}: cannot be used \(.+\), expected auto or .+: cpu"):
        resolve_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none() -> None:
    with pytest.raises(HardwareError, match=r"^--device cuda: cannot be used .*To plan for a different one, add"):
        resolve_device("cuda")


def test_plan_of_a_deeper_model() -> None:
    message = (
        "GPTModel has no unit 'decoder.layers.1'. The plan is for 2 layers (decoder.layers.0-1), and this model has 1 layer "
        "(decoder.layers.0). Make a plan for this model"
    )
    with pytest.raises(UnknownNameError, match=re.escape(message)):
        recollect.apply(llama(1), PLAN)


def test_plan_of_a_shallower_model() -> None:
    message = (
        "the plan is for 2 layers (decoder.layers.0-1), and GPTModel has 4 layers (decoder.layers.0-3): the others keep"
    )
    model = llama(4)
    with pytest.warns(PlanMismatchWarning, match=re.escape(message)), recollect.apply(model, PLAN):
        pass


def test_plan_of_a_part_of_a_model_is_no_mistake() -> None:
    model = llama(4)
    own_units = ["decoder.layers.0", "decoder.layers.1"]
    some = recollect.plan(recollect.record(model, BATCH, fake=True, units=["decoder.layers.0"]), "100%")
    by_hand = recollect.Plan({path: PLAN.units[path] for path in PLAN.units})
    for plan in (some, by_hand):
        recollect.apply(model, plan).remove()
    recollect.fit(model, BATCH, "100%", units=own_units)
