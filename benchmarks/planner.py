"""Measure the planner: distance of plans to the lower bound, planning time, and whether budgets are kept.

    python benchmarks/planner.py

For each profile, budgets from the least peak that is known up to 95 % of the way to keeping everything, each planned by itself,
as a user would, and simulated again. Then the largest: an 80-layer Llama of 70 billion parameters, recorded on fake tensors and
planned for twenty budgets, all in one go. Times are of the process, so that other work on the machine counts little.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

import recollect
from flags import RESULTS, parse
from recollect.errors import BudgetTooSmallError
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.planning.choose import Planner
from recollect.profile.profile import Profile
from recollect.simulation.decisions import decide
from recollect.simulation.simulate import simulate
from results_csv import Number, append

PARTS = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_TINY: Mapping[str, Any] = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4}


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What to plan."""

    profiles: tuple[str, ...] = ()
    """Names of profiles, or prefixes of them; all if empty."""
    parts: tuple[float, ...] = PARTS
    """Budgets, as fractions of the range from the least peak to keeping everything."""
    large: str = "70b"
    """Name of the large model; empty for none."""
    large_num_budgets: int = 20
    """Budgets for the large model."""
    out: Path = RESULTS
    """Folder of `planner.csv`."""


class Subject(NamedTuple):
    """A model to record."""

    name: str
    build: Callable[[], nn.Module]
    tokens: tuple[int, int]
    fake: bool


def _llama(num_layers: int) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
    )
    return transformers.LlamaForCausalLM(config)


def _gpt2() -> nn.Module:
    sizes = {"vocab_size": 8192, "n_embd": 512, "n_layer": 12, "n_head": 8}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**_TINY, num_hidden_layers=4, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def _deepseek_v3() -> nn.Module:
    config = transformers.DeepseekV3Config(
        **_TINY,
        num_hidden_layers=6,
        num_key_value_heads=4,
        moe_intermediate_size=128,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=64,
        q_lora_rank=96,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=64,
    )
    return transformers.DeepseekV3ForCausalLM(config)


SUBJECTS = (
    Subject("Llama, 8 layers", lambda: _llama(8), (2, 512), fake=True),
    Subject("Llama, 32 layers", lambda: _llama(32), (2, 512), fake=True),
    Subject("GPT-2, 12 layers, dropout", _gpt2, (2, 512), fake=True),
    Subject("DeepSeek-V3, 6 layers", _deepseek_v3, (2, 256), fake=False),
    Subject("Mixtral, 4 layers", _mixtral, (2, 256), fake=False),
)


class Planned(NamedTuple):
    """One budget: slowdown of the plan and of the bound, as fractions of a step, and seconds of planning."""

    gap: float
    plan_s: float


def profiles(starts: tuple[str, ...]) -> Iterator[tuple[str, Profile]]:
    """Yield each subject with a matching name, with AdamW, and with four times the tokens without an optimizer."""
    for subject, has_optimizer in itertools.product(SUBJECTS, (True, False)):
        name = subject.name if has_optimizer else f"{subject.name}, no optimizer"
        if starts and not name.startswith(starts):
            continue
        torch.manual_seed(0)
        model = subject.build().train()
        scale = 1 if has_optimizer else 2
        tokens = torch.randint(0, 1024, (scale * subject.tokens[0], scale * subject.tokens[1]))
        optimizer = torch.optim.AdamW(model.parameters()) if has_optimizer else None
        batch = {"input_ids": tokens, "labels": tokens}
        yield (
            name,
            recollect.record(
                model, batch, optimizer=optimizer, fake=subject.fake, holds_output=False, gradients="freed"
            ),
        )


def least_peak(profile: Profile) -> int:
    """Return the least peak, from the planner's error."""
    try:
        recollect.plan(profile, 1)
    except BudgetTooSmallError as error:
        return error.least_peak_bytes
    return 0


def planned(profile: Profile, budget_bytes: int) -> Planned:
    """Plan one budget, and simulate the plan.

    Raises:
        RuntimeError: the plan's peak is not what it says, or above the budget.
    """
    start_s = time.process_time()
    made = recollect.plan(profile, budget_bytes)
    plan_s = time.process_time() - start_s
    peak_bytes = simulate(profile, decide(profile, made)).peak_bytes
    if peak_bytes != made.predicted_peak_bytes or peak_bytes > budget_bytes:
        raise RuntimeError(f"a plan for {budget_bytes} bytes has a peak of {peak_bytes}")
    return Planned((made.predicted_slowdown or 0.0) - (made.bound_slowdown or 0.0), plan_s)


def large_step_s(size: str, num_budgets: int) -> tuple[float, float]:
    """Return the seconds of recording a large model on fake tensors, and of planning it for many budgets."""
    with torch.device("meta"):
        model = GPTModel(NAMED_CONFIGS[size]).to(torch.bfloat16)
        tokens = torch.zeros(1, 4096, dtype=torch.int64)
    start_s = time.process_time()
    profile = recollect.record(model, {"tokens": tokens, "labels": tokens}, fake=True)
    record_s = time.process_time() - start_s
    planner = Planner(profile)
    least, most = least_peak(profile), planner.plan("100%").predicted_peak_bytes or 0
    start_s = time.process_time()
    for step in range(num_budgets):
        planner.plan(least + (most - least) * step // num_budgets)
    return record_s, time.process_time() - start_s


def main() -> None:
    """Print the tables and append the numbers."""
    flags = parse(Flags, __doc__)
    table = Table("profile", "budgets", "gap, median", "gap, worst", "one plan, median", "one plan, worst")
    numbers: list[Number] = []
    everything: list[Planned] = []

    def add(name: str, rows: list[Planned]) -> None:
        gaps, times = [row.gap for row in rows], [row.plan_s for row in rows]
        found = [statistics.median(gaps), max(gaps), statistics.median(times), max(times)]
        metrics = ("gap_median", "gap_worst", "plan_median", "plan_worst")
        numbers.extend(
            Number(m, unit, name, n) for m, unit, n in zip(metrics, ("1", "1", "s", "s"), found, strict=True)
        )
        table.add_row(name, str(len(rows)), *(f"{n:.3%}" for n in found[:2]), *(f"{n:.2f} s" for n in found[2:]))

    for name, profile in profiles(flags.profiles):
        least, most = least_peak(profile), Planner(profile).plan("100%").predicted_peak_bytes or 0
        rows = [planned(profile, int(least + part * (most - least))) for part in flags.parts]
        everything += rows
        add(name, rows)
    add("all", everything)
    Console(width=120).print(table)
    if flags.large:
        record_s, plan_s = large_step_s(flags.large, flags.large_num_budgets)
        numbers += [Number("record", "s", flags.large, record_s), Number("plan_all_budgets", "s", flags.large, plan_s)]
        print(
            f"{flags.large}: recorded on fake tensors in {record_s:.1f} s, {flags.large_num_budgets} budgets in {plan_s:.1f} s"
        )
    config = {"device": "cpu", "parts": flags.parts, "large_num_budgets": flags.large_num_budgets}
    append(flags.out / "planner.csv", numbers, config)


if __name__ == "__main__":
    main()
