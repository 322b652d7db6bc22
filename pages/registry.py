"""What of the documentation is made by a command. Whoever adds a figure or a table with numbers adds it here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from pages import interactive, terminal
from pages.figures import ROOT, Dated, Exact, Figure, output_of

__all__ = ["FIGURES"]

sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests" / "support")]

_LARGE = "--size 8b --fake --hardware H100 --dtype bf16 --seq-length 4096"
_FRONTIER = f"recollect frontier {_LARGE}"
_MEMORY = f"recollect plan {_LARGE} --memory-budget 72GiB"
_EXPLAIN = (
    "recollect explain --size 70b --fake --hardware H100 --dtype bf16 --seq-length 4096"
    " --recompute-granularity selective --recompute-modules mlp"
)
_COVERAGE = (
    "recollect coverage --size 70b --fake --dtype bf16 --seq-length 4096"
    " --recompute-granularity full --recompute-method block --recompute-num-layers 16"
)
_CLUSTER = (
    "recollect plan --size 70b --num-layers 16 --seq-length 4096 --dtype bf16 --fake --hardware H100"
    " --tensor-model-parallel-size 4 --sequence-parallel --data-parallel-size 4 --use-distributed-optimizer"
    f" --memory-budget 34GiB --out {os.devnull}"
)
_HELD_OUT = "python benchmarks/held_out_70b.py"
_RECIPES = "python benchmarks/megatron_recipes.py"
_PLAN = (
    "recollect plan --size 1b --fake --hardware H100 --dtype bf16 --seq-length 2048 --batch-size 4 --memory-budget 44%"
    f" --out {os.devnull}"
)


def _api() -> str:
    from pages.api import page

    return page()


def _zoo() -> str:
    from architectures.page import page, read_rows

    results = ROOT / "benchmarks" / "results"
    return page(read_rows(results / "zoo.jsonl"), read_rows(results / "zoo_graph.jsonl"))


def _gpu() -> str:
    from gpu.page import page

    return page(ROOT / "benchmarks" / "results" / "gpu")


def _versions() -> str:
    from pages.versions import table

    return table()


def _doctor_rules() -> str:
    from pages.doctor import rules_table

    return rules_table()


def _megatron_rules() -> str:
    from pages.megatron import rules_table

    return rules_table()


def _megatron_not_yet() -> str:
    from pages.megatron import not_yet_table

    return not_yet_table()


def _megatron_flags() -> str:
    from flag_table import foreign_table

    return foreign_table()


def _printed(command: str) -> Callable[[], str]:
    return lambda: output_of(command)


def _rows(page: str, command: str, *results: str) -> Dated:
    """Return a page whose numbers are in the rows of these benchmarks."""
    return Dated(page, command, tuple(f"benchmarks/results/{name}" for name in results))


def _part(page: str, command: str, now: Callable[[], str], seconds: int = 1) -> Exact:
    return Exact(page, command, now, whole=False, renews=False, seconds=seconds)


FIGURES: tuple[Figure, ...] = (
    *terminal.figures(),
    Exact("docs/api.md", "python -m pages.api", _api),
    Exact("docs/zoo.md", "python benchmarks/model_zoo.py --page", _zoo),
    Exact("docs/gpu.md", "scripts/gpu --page", _gpu),
    _part("CONTRIBUTING.md", "python -m pages.versions --page", _versions),
    _part("docs/doctor.md", "python -m pages.doctor", _doctor_rules),
    _part("docs/megatron.md", "python -m pages.megatron", _megatron_rules),
    _part("docs/megatron.md", "python -m pages.megatron", _megatron_not_yet),
    _part("docs/megatron_flags.md", "PYTHONPATH=src:tests/support python -m flag_table", _megatron_flags),
    _part("docs/coverage.md", _COVERAGE, _printed(_COVERAGE), seconds=15),
    _part("docs/explain.md", _EXPLAIN, _printed(_EXPLAIN), seconds=15),
    _part("docs/how_to_read_a_plan.md", _PLAN, lambda: output_of(_PLAN).partition("Written")[0], seconds=6),
    _part("docs/parallel.md", _CLUSTER, lambda: output_of(_CLUSTER).partition("Written")[0], seconds=20),
    _part("docs/parallel.md", _HELD_OUT, _printed(_HELD_OUT), seconds=60),
    _part("docs/megatron.md", _RECIPES, _printed(_RECIPES), seconds=200),
    Dated("docs/frontier.png", f"{_FRONTIER} --png docs/frontier.png", prints=_FRONTIER, renews=True, seconds=15),
    Dated(
        "docs/memory.png",
        f"{_MEMORY} --png docs/memory.png",
        prints=f"{_MEMORY} --out {os.devnull}",
        renews=True,
        seconds=10,
    ),
    Dated("docs/interactive.png", "python -m pages.interactive", prints=interactive.COMMAND, renews=True, seconds=10),
    Dated(
        "benchmarks/results/frontier-dense-cpu-fp32-d384-l16.png",
        "python benchmarks/frontier.py --redraw",
        ("benchmarks/results/frontier.csv",),
    ),
    _rows(
        "docs/peers.md", "python benchmarks/frontier.py; python benchmarks/compiled.py", "frontier.csv", "compiled.csv"
    ),
    _rows("docs/claims.md", "python benchmarks/claims.py", "claims.csv"),
    _rows("docs/published.md", "python benchmarks/held_out_tables.py --out benchmarks/results", "held_out.csv"),
    _rows("docs/costs.md", "python benchmarks/cost_model.py", "cost_model.csv"),
    _rows("docs/loss.md", "python benchmarks/loss_chunks.py", "loss_chunks.csv"),
    _rows("docs/planner_measurements.md", "python benchmarks/planner.py", "planner.csv"),
    Dated("docs/fp8.md", "python benchmarks/fp8.py memory; python benchmarks/fp8.py losses", ("benchmarks/fp8.py",)),
    _rows("docs/megatron_core.md", "python benchmarks/megatron_core.py --page", "megatron_core.csv"),
)
