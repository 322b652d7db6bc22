"""The printed bound is below every plan, on recorded steps of whole models, however exactly the linear program was solved."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

import recollect
from budgets import budgets
from recollect.planning.bound import LowerBound
from recollect.planning.choose import Planner
from recollect.profile.profile import Profile
from recollect.simulation.decisions import CallActions, ValueActions
from recollect.simulation.peak_sums import PeakSums
from recollect.simulation.simulate import simulate
from tiers import long_but

NUM_PLANS = 1000
NUM_BUDGETS = 12
# Sums of seconds in another order, and what the bound is lowered by.
TOLERANCE = 1e-6


def _gpt2() -> Any:
    """The model whose bounds were up to 0.1 points above its plans while the objective was in seconds."""
    sizes = {"vocab_size": 8192, "n_embd": 512, "n_layer": 12, "n_head": 8, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), (4, 1024)


def _llama() -> Any:
    sizes = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=8)), (4, 1024)


def _bert() -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes)), (8, 256)


MODELS = {"gpt2": _gpt2, "llama": _llama, "bert": _bert}


@pytest.fixture(scope="module", params=long_but(["gpt2"], MODELS))
def profile(request: pytest.FixtureRequest) -> Profile:
    """A step on fake tensors, with times of an H100: seconds far below the solver's tolerance."""
    with torch.device("meta"):
        model, shape = MODELS[request.param]()
        tokens = torch.zeros(shape, dtype=torch.int64)
    return recollect.record(model.train(), {"input_ids": tokens, "labels": tokens}, fake=True)


def random_plans(profile: Profile, seed: int) -> Iterator[list[CallActions]]:
    """Choices for each call out of a few for each graph, from keeping nearly all to dropping nearly all."""
    rng = random.Random(seed)
    choices: list[list[CallActions]] = []
    for graph in profile.graphs:
        droppable = [i for i, value in enumerate(graph.values) if value.producer is not None and not value.must_keep]
        densities = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)
        dropped = [frozenset(i for i in droppable if rng.random() < density) for density in densities]
        choices.append([CallActions(ValueActions.recomputing(values)) for values in dropped])
    for _ in range(NUM_PLANS):
        few = [rng.choice(choices[call.graph]) for call in profile.calls]
        same = {graph: rng.choice(options) for graph, options in enumerate(choices)}
        is_mixed = rng.random()
        yield [
            one if rng.random() < is_mixed else same[call.graph] for one, call in zip(few, profile.calls, strict=True)
        ]


def without_output(profile: Profile, call: int, decision: CallActions, rng: random.Random) -> CallActions:
    """The same decision, half of the time with the output dropped as well, where the next unit starts from it."""
    graph = profile.graph_of(profile.calls[call])
    outputs = {index for index, value in enumerate(graph.values) if value.is_output}
    drops = profile.calls[call].chained and not outputs.isdisjoint(decision.values.recomputed) and rng.random() < 0.5
    return replace(decision, keeps_output=not drops)


def test_no_random_plan_is_below_the_bound(profile: Profile) -> None:
    peak_sums = PeakSums.of(profile)
    plain = simulate(profile, [CallActions()] * len(profile.calls))
    bound = LowerBound(profile)
    budgets = [round(plain.peak_bytes * (i + 1) / NUM_BUDGETS) for i in range(NUM_BUDGETS)]
    bounds_s = [bound.added_s(budget) for budget in budgets]
    assert 0 < min(s for s in bounds_s if s > 0) < float("inf")
    rng = random.Random(1)
    for decisions in random_plans(profile, seed=0):
        peaks = peak_sums.peaks([without_output(profile, call, decisions[call], rng) for call in range(len(decisions))])
        # The bound of any budget that the plan fits into, the tightest of them.
        of_budget = next((s for b, s in zip(budgets, bounds_s, strict=True) if b >= peaks.peak_bytes), 0.0)
        assert of_budget <= peaks.recompute_s * (1 + TOLERANCE) + 1e-12


def test_no_plan_is_below_its_own_bound(profile: Profile) -> None:
    planner = Planner(profile)
    for budget_bytes in budgets(planner, (0.0, 0.1, 0.3, 0.5, 0.6, 0.7, 0.9)):
        made = planner.plan(budget_bytes)  # raises if it is
        assert made.bound_slowdown is not None and made.predicted_slowdown is not None
        assert made.bound_slowdown <= made.predicted_slowdown * (1 + TOLERANCE) + 1e-12
