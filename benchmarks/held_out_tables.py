"""Predict published tables: other people's clusters, in bf16, as `recollect plan --fake` predicts them, without a GPU.

    python benchmarks/held_out_tables.py                 about ten minutes on one core
    python benchmarks/held_out_tables.py --tables titan-a100

The rows are in held_out_rows.csv, each with its layout and what was published; docs/parallel.md says what is assumed. Nothing
was fitted to them. Beside the errors are the differences between rows: how many tokens more a second and device each has than
the first of its model, here and there.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flags import parse
from held_out_70b import in_fp8
from recollect.costs.hardware import Hardware
from recollect.costs.hardware_table import find_hardware
from recollect.costs.links import cluster_of
from recollect.integrations.megatron import RecomputeConfig, megatron_plan
from recollect.integrations.torchtitan_settings import torchtitan_plan
from recollect.lab.models.architectures import gpt_config
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.lab.parallel.cluster_step import ClusterStep, RecordedStages, record_stages, schedule_of_step, send_s
from recollect.lab.parallel.layout import DeviceLayout
from recollect.pipelines.plan_pipeline import predict_pipeline
from recollect.planning.classic import classic_plan
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from results_csv import Number, append

Row = Mapping[str, str]

GIB = 2**30
ROWS = Path(__file__).parent / "held_out_rows.csv"
# What was published, from where, and what of it cannot be modelled.
TABLES = {
    "titan-a100": "torchtitan, docs/performance.md at 0413343, 64 A100 80GB, FSDP2",
    "titan-h100": "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, FSDP2. Not modelled: "
    "torch.compile (5 GiB less, 16 % faster there) and Float8 (48 % faster)",
    "titan-h100-cp": "the same, table 2, with full recompute. Of Float8 the rate of products is modelled, casts and copies are "
    "not; nor is torch.compile",
    "korthikanti": "Korthikanti et al. 2022, arXiv 2205.05198, table 5, A100 80GB; layouts of its table 3, selective with "
    "sequence parallelism. Memory: its figures 1 and 7, which add up the first stage's weights, states and kept activations, "
    "as read by calculon-ai/calculon, calculon/llm/validation.py at 2dd9c5c",
    "mpt-a100": "llm-foundry, scripts/train/benchmarking/README.md at 061f2c7, A100 80GB, 2,048 tokens, FSDP",
    "mpt-a100-40": "the same, A100 40GB, 200 Gb/s a device",
    "mpt-h100": "the same, H100 80GB",
}

# Why a row is off by more than 10 %, by the letters in its column "reason".
REASONS = {
    "p": "products are modelled at the most that any shape reaches (86 % of the peak of an A100, 80 % of an H100)",
    "u": "not counted: the optimizer, autocast's casts, time between kernels, collectives that slow down what runs beside them",
    "w": "its checkpoints run each block again to the end (torch before 2.1), recollect as far as backward asks",
    "l": "devices that may take 500 of 700 W",
    "h": "software of early 2023, before its kernels were tuned for the H100, by inference",
    "r": "published is what the allocator reserved, predicted what is allocated",
    "m": "near the end of the memory, by inference: there is room for a larger batch on twice as many devices",
    "e": "the figures leave out the embedding's weights, its mask of dropout, and the layer that backward is at",
    "f": "Float8 and torch.compile, which are not modelled",
    "c": "torch's ring attention passes keys and values on in as many steps as ranks, and merges results; here one gather",
}


def _mpt(num_layers: int, hidden_size: int, heads: int) -> TransformerConfig:
    """GPT with learned positions and biases, by the number of parameters that the table gives."""
    sizes = {"num_layers": num_layers, "hidden_size": hidden_size, "num_attention_heads": heads}
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return gpt_config(**sizes, **dropout, vocab_size=50_368, activation_func="gelu")


def _megatron(num_layers: int, hidden_size: int, heads: int) -> TransformerConfig:
    """GPT of 2022: attention op by op."""
    sizes = {"num_layers": num_layers, "hidden_size": hidden_size, "num_attention_heads": heads}
    return gpt_config(**sizes, vocab_size=51_200, core_attention="unfused")


MODELS = {
    "llama3-8b": NAMED_CONFIGS["8b"].changed(separate_projections=True),
    "llama3-70b": NAMED_CONFIGS["70b"].changed(separate_projections=True, vocab_size=128_256),
    "llama2-13b": NAMED_CONFIGS["13b"].changed(separate_projections=True),
    "llama2-70b": NAMED_CONFIGS["70b"].changed(separate_projections=True),
    "gpt-22b": _megatron(48, 6144, 64),
    "gpt-175b": _megatron(96, 12_288, 96),
    "gpt-530b": _megatron(105, 20_480, 128),
    "gpt-1t": _megatron(128, 25_600, 160),
    "mpt-7b": _mpt(32, 4096, 32),
    "mpt-13b": _mpt(40, 5120, 40),
    "mpt-30b": _mpt(48, 7168, 56),
    "mpt-70b": _mpt(80, 8192, 64),
}


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What to predict."""

    tables: tuple[str, ...] = tuple(TABLES)
    """Names of tables."""
    out: Path | None = None
    """Folder of `held_out.csv`; none: only print."""


@dataclass(frozen=True)
class Predicted:
    """What a row is predicted to take: seconds of a step, and bytes of the fullest device."""

    step_s: float
    peak_bytes: int


def hardware_of(row: Row) -> Hardware:
    """Return the device of a row; that of torchtitan's H100s has 96 GB of HBM2e, as the page says."""
    if row["hardware"] == "H100 96GB":
        made = replace(find_hardware("H100"), memory_bytes=96 * GIB, bandwidth_bytes_per_s=2.4e12)
    else:
        made = find_hardware(row["hardware"])
    return in_fp8(made) if row["assumes"] == "fp8" else made


def step_of(row: Row) -> ClusterStep:
    """Return the step of a row."""
    tensor, pipeline, context = (int(row[name]) for name in ("tensor", "pipeline", "context"))
    is_megatrons = row["setting"].startswith("megatron")
    hardware = hardware_of(row)
    # Its links are those of the device in the table.
    links = cluster_of(find_hardware(row["hardware"].removesuffix(" 96GB")))
    return ClusterStep(
        config=MODELS[row["model"]].changed(max_position_embeddings=int(row["length"])),
        layout=DeviceLayout(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            context_parallel_size=context,
            data_parallel_size=int(row["devices"]) // (tensor * pipeline * context),
            sequence_parallel=row["sequence"] == "yes",
            num_layers_per_virtual_pipeline_stage=int(row["layers_a_stage"]) if row["layers_a_stage"] else None,
        ),
        cluster=replace(links, hardware=hardware),
        micro_batch_size=int(row["micro_batch"]),
        seq_length=int(row["length"]),
        num_micro_batches=int(row["micro_batches"]),
        sharding="all" if row["sharding"] == "all" else "none",
        pipeline_engine="megatron" if is_megatrons else "torch",
    )


def plan_of(profile: Profile, setting: str) -> Plan:
    """Return the plan of a setting for a stage."""
    if setting == "second layer":
        full = classic_plan(profile, "full")
        return Plan({path: unit for path, unit in full.units.items() if int(path.rpartition(".")[2]) % 2})
    if setting == "megatron full":
        return megatron_plan(
            profile,
            RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        )
    if setting == "megatron selective":
        return megatron_plan(
            profile, RecomputeConfig(recompute_granularity="selective", recompute_modules=("core_attn",))
        )
    return torchtitan_plan(profile, setting)  # type: ignore[arg-type]


def predicted(step: ClusterStep, recorded: RecordedStages, setting: str) -> Predicted:
    """Return what a step takes under a setting; data parallelism runs beside the computation."""
    plans = {id(profile): plan_of(profile, setting) for profile in recorded.profiles}
    found = predict_pipeline(
        recorded.profiles,
        schedule_of_step(step),
        [plans[id(profile)] for profile in recorded.profiles],
        send_s=send_s(step),
    )
    beside_s = [
        step.num_micro_batches * (traffic["data"].time_s if "data" in traffic else 0.0) + reduction_s
        for traffic, reduction_s in zip(recorded.traffic, recorded.reduction_s, strict=True)
    ]
    return Predicted(max(found.step_s, *beside_s), max(found.peaks_bytes))


def published_step_s(row: Row, step: ClusterStep) -> float:
    """Return the seconds of a step that a row gives, or the tokens per second and device."""
    if row["step_s"]:
        return float(row["step_s"])
    # Ranks of tensor, pipeline and context parallelism share their tokens.
    sharing = int(row["devices"]) // step.layout.data_parallel_size
    tokens = step.micro_batch_size * step.seq_length * step.num_micro_batches / sharing
    return tokens / float(row["tokens_per_s"])


def lines_of(rows: list[Row], numbers: list[Number]) -> list[str]:
    """Predict the rows of a table, and return the lines of its report."""
    lines = [f"{'':24} {'step, s':>8} {'published':>9} {'error':>7} {'faster by':>10} {'published':>9}  memory, GiB"]
    recorded: dict[str, tuple[ClusterStep, RecordedStages]] = {}
    first: dict[str, tuple[float, float]] = {}
    for row in rows:
        key = ",".join(value for name, value in row.items() if name not in ("row", "setting", *row_results()))
        if key not in recorded:
            recorded = {key: (step := step_of(row), record_stages(step))}
        step, stages = recorded[key]
        found = predicted(step, stages, row["setting"])
        actual_s = published_step_s(row, step)
        error = found.step_s / actual_s - 1
        tokens = step.micro_batch_size * step.seq_length * step.num_micro_batches * step.layout.data_parallel_size
        speeds = tokens / found.step_s / int(row["devices"]), tokens / actual_s / int(row["devices"])
        base = first.setdefault(row["model"], speeds)
        than_first = [speed / own - 1 for speed, own in zip(speeds, base, strict=True)]
        memory = f"{found.peak_bytes / GIB:6.1f}"
        if row["memory_gib"]:
            memory += f" ({row['memory_gib']} published, {found.peak_bytes / GIB / float(row['memory_gib']) - 1:+.0%})"
        differences = f"{than_first[0]:+10.1%} {than_first[1]:+9.1%}"
        lines.append(f"{row['row']:24} {found.step_s:8.3f} {actual_s:9.3f} {error:+7.1%} {differences}  {memory}")
        why = row["reason"] or ("?" if abs(error) > 0.1 else "")
        lines[-1] += f"  {why}" if why else ""
        numbers += [
            Number(f"{row['table']}: {row['row']}", "s", "predicted", found.step_s),
            Number(f"{row['table']}: {row['row']}", "s", "published", actual_s),
            Number(f"{row['table']}: {row['row']}", "byte", "predicted", found.peak_bytes),
        ]
    letters = dict.fromkeys("".join(row["reason"] for row in rows))
    return [*lines, *(f"  {letter}: {REASONS[letter]}" for letter in letters), ""]


def row_results() -> tuple[str, ...]:
    """Return the columns that say what was published."""
    return ("tokens_per_s", "step_s", "memory_gib", "reason")


def main() -> None:
    """Print the tables."""
    flags = parse(Flags, __doc__)
    tables: defaultdict[str, list[Row]] = defaultdict(list)
    with ROWS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            tables[row["table"]].append(row)
    numbers: list[Number] = []
    for name in flags.tables:
        print(f"{name}: {TABLES[name]}")
        print("\n".join(lines_of(tables[name], numbers)), flush=True)
    if flags.out is not None:
        append(flags.out / "held_out.csv", numbers, {"device": "cpu", "tables": list(flags.tables)})


if __name__ == "__main__":
    main()
