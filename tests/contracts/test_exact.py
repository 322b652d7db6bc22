"""Every unit of the registry trains to the same bits on each engine and in `checkpoint`, by any backward, in any loop.

Compared are losses, gradients, parameters, buffers, what a unit counts, and where the generator is. On the graph engine a unit
runs from its trace in the last step, or says why not.
"""

import copy
import io
import pickle
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import recollect
from contract_steps import BACKWARDS, QUIET, Run, accumulated, plain, twice
from contract_units import TRACED_LATER, UNITS, WHY_NOT, Case, Model
from engines import applied, num_tape_calls, traced_forwards
from gradients import Step, assert_same_gradients
from policies import FULL, KEEP_ALL, NOTHING_KEPT, Policy, Random

pytestmark = QUIET


class Coin(Random):
    """A coin for each value; outputs are kept."""

    drops_outputs = False

    def output_action(self, unit_path: str) -> Any:
        return FULL.output


every_unit = pytest.mark.parametrize("case", UNITS.values(), ids=UNITS)


@cache
def without_a_plan(name: str) -> Step:
    return Run(UNITS[name].model()).through(*BACKWARDS)


# First, as the recorder looks at all objects, and what the others compare with stays.
@pytest.mark.filterwarnings("ignore:recollect")
@pytest.mark.parametrize(
    "name",
    [
        "random relu in place",
        "weight assigned as data",
        "statistics made",
        "sparse weight",
        "function that fills slices",
    ],
)
def test_recorded(name: str) -> None:
    """The recorder copies what is saved, unless autograd reads what is written to it afterwards."""
    case = UNITS[name]
    run = Run(case.model())
    with recollect.attach(run.model, run.optimizer, "1GiB", units=run.model.paths):
        found = run.through(plain, accumulated, twice, twice)
    assert_same_gradients(Run(case.model()).through(plain, accumulated, twice, twice), found)


@every_unit
def test_on_the_tape(case: Case) -> None:
    """Every other unit keeps all that it can, and the others some of it."""
    expected = without_a_plan(case.name)
    in_turn = (KEEP_ALL, Random(1))[list(UNITS).index(case.name) % 2]
    for name, policy in {"full": FULL, "nothing kept": NOTHING_KEPT, "in turn": in_turn}.items():
        model = case.model()
        with applied("tape", model, policy):
            assert_same_gradients(expected, Run(model).through(*BACKWARDS), name)


@every_unit
def test_from_traces(case: Case) -> None:
    """Every other unit recomputes all that it can, and the others some of it."""
    expected = without_a_plan(case.name)
    model = case.model()
    policy = FULL if case.name in WHY_NOT else (FULL, Coin(0), FULL, Coin(5))[list(UNITS).index(case.name) % 4]
    with applied("graph", model, policy) as handle:
        run = Run(model)
        run.through(*BACKWARDS[:-1])
        num_calls = num_tape_calls(handle)
        assert_same_gradients(expected, run.through(BACKWARDS[-1]))
    why_not = next((forward.why_not for forward in traced_forwards(handle) if forward.why_not), "")
    if case.name in WHY_NOT and (why_not or case.name not in TRACED_LATER):
        assert re.search(WHY_NOT[case.name], why_not) and why_not, why_not
    else:
        assert (why_not, num_tape_calls(handle)) == ("", num_calls)


def takes_turns(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    answers = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.PREFER_CPU_OFFLOAD)
    return answers[sum(map(ord, op.__name__)) % 3]


@every_unit
def test_checkpointed(case: Case) -> None:
    """By `recollect.checkpoint`; every other unit with a policy that saves, recomputes and offloads."""
    expected = without_a_plan(case.name)
    options: dict[str, Any] = {}
    if list(UNITS).index(case.name) % 2:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, takes_turns)
    model = case.model()
    for unit in model.units:
        vars(unit)["forward"] = partial(recollect.checkpoint, unit.forward, **options)
    assert_same_gradients(expected, Run(model).through(*BACKWARDS))


Place = Callable[[Model, Policy], AbstractContextManager[Any]]


def toggled(case: Case, place: Place) -> Step:
    """Weights of a unit, and what it is given, need gradients in some steps only."""
    model = case.model()
    run = Run(model)
    with place(model, FULL):
        for needs_grad in (True, True, False, False, True):
            model.units[0].first.weight.requires_grad_(needs_grad)
            model.stem.requires_grad_(needs_grad)
            run.through(plain)
    return run.noted


def applied_again(case: Case, place: Place) -> Step:
    model = case.model()
    run = Run(model)
    with place(model, FULL):
        run.through(plain, plain)
    run.through(plain)
    with place(model, Coin(1)):
        run.through(plain, plain)
    return run.noted


def copied(case: Case, place: Place) -> Step:
    """Copies of a planned model have no plan; the model itself goes on."""
    model = case.model()
    run = Run(model)
    with place(model, FULL):
        run.through(plain, plain)
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved(model)]
        found = {
            f"copy {i}: {n}": t for i, twin in enumerate(twins) for n, t in Run(twin).through(plain, plain).items()
        }
        return found | run.through(plain)


def saved(model: Model) -> Model:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: Model = torch.load(file, weights_only=False)
    return loaded


def two_models(case: Case, place: Place) -> Step:
    """Their forwards and backwards interleave under different plans."""
    models = [case.model(), case.model()]
    runs = [Run(model) for model in models]
    with place(models[0], FULL), place(models[1], Coin(1)):
        for _ in range(3):
            losses = [run.loss() for run in runs]
            for run, (data, loss) in zip(runs, losses, strict=True):
                loss.backward()
                run.end_step(data)
    return runs[0].noted | {f"second: {name}": tensor for name, tensor in runs[1].noted.items()}


def differentiated_in_evaluation(case: Case, place: Place) -> Step:
    model = case.model()
    run = Run(model)
    with place(model, FULL):
        for is_training in (True, True, False, False, False, True):
            model.train(is_training)
            run.through(plain)
    return run.noted


def for_several_gradients(case: Case, place: Place) -> Step:
    """At once, in two ways, in each of which `vmap` refuses to draw random numbers."""
    model = case.model()
    run = Run(model)
    with place(model, FULL):
        run.through(plain, plain)
        for is_mapped in (False, True):
            data, losses = run.losses()
            outputs, rows = torch.stack(losses * 2), torch.eye(len(losses) * 2)
            if is_mapped:
                found = torch.func.vmap(partial(torch.autograd.grad, outputs, data))(rows)
            else:
                found = torch.autograd.grad(outputs, data, rows, is_grads_batched=True)
            run.note("gradients", found[0])
            run.end_step()
    return run.noted


def several_forwards(case: Case, place: Place) -> Step:
    """One backward goes through two, none through the third; under autocast, and in saved-tensor hooks of others, too."""
    model = case.model()
    run = Run(model)
    with place(model, FULL):
        for around in (nullcontext, nullcontext, partial(torch.autocast, "cpu", torch.bfloat16), save_on_cpu):
            with around():
                (first, of_first), (second, of_second), _ = run.loss(), run.loss(), run.loss()
            (of_first + of_second).backward()
            run.end_step(first, second)
        with torch.inference_mode():
            run.loss()
        run.through(plain)
    return run.noted


LOOPS: tuple[Callable[[Case, Place], Step], ...] = (
    *(toggled, applied_again, copied, two_models),
    *(differentiated_in_evaluation, for_several_gradients, several_forwards),
)
# Of these, each loop runs three.
LOOPED = ("dropout", "cross_attention", "batch_norm_2d", "in_place", "weights_tied")


@pytest.mark.filterwarnings("ignore:recollect. hooks for saved tensors")
@pytest.mark.parametrize("engine", ["tape", "graph"])
@pytest.mark.parametrize(
    ("loop", "name"), [(loop, LOOPED[(i + k) % 5]) for i, loop in enumerate(LOOPS) for k in range(3)]
)
def test_loops(loop: Callable[[Case, Place], Step], name: str, engine: str) -> None:
    case = UNITS[name.replace("_", " ")]
    assert_same_gradients(loop(case, lambda *_: nullcontext()), loop(case, partial(applied, engine)))
