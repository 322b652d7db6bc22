"""What each process trains in `test_train_torchrun.py`, as a program that serves cases.

torchrun training_ranks.py FOLDER
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

import training_runs
from case_server import serve
from recollect.cli.entry import parse_train
from recollect.cli.train import training_config
from recollect.errors import DataError
from recollect.integrations.megatron import RecomputeConfig
from recollect.lab.train import session as session_module
from recollect.lab.train.config import ProcessFlags, TrainConfig
from recollect.lab.train.exchange import PipelineExchange
from recollect.lab.train.loop import train
from recollect.lab.train.model_flags import ExpertFlags, Fp8Flags
from recollect.lab.train.optim_flags import OptimFlags
from recollect.lab.train.pipeline_plans import PipelinePlans, record_own_stages
from recollect.lab.train.processes import joined_processes
from recollect.lab.train.session import open_session
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan, digest_of

TENSOR = {"tensor_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
EXPERT = {"expert_model_parallel_size": 2}
WHOLE: dict[str, Any] = {"sequence_parallel": True, "expert_tensor_parallel_size": 1}
PIPELINE = {"pipeline_model_parallel_size": 2}
INTERLEAVED = {**PIPELINE, "num_layers_per_virtual_pipeline_stage": 1}
# In two processes, and in four.
ON_TWO: dict[str, dict[str, Any]] = {
    "TP2": TENSOR,
    "TP2 SP": {**TENSOR, "sequence_parallel": True},
    "DP2": {},
    "DP2 FSDP2": {"use_torch_fsdp2": True},
    "DP2 ZeRO": {"use_distributed_optimizer": True},
    "CP2": CONTEXT,
    "DP2 experts": {},
    "EP2 experts": EXPERT,
    "EP2 FSDP2 experts": {**EXPERT, "use_torch_fsdp2": True},
    "PP2 tied": PIPELINE,
    "PP2 interleaved tied": INTERLEAVED,
    "PP2 fp8": PIPELINE,
    "TP2 SP fp8": {**TENSOR, "sequence_parallel": True},
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "TP2 DP2": TENSOR,
    "TP2 SP DP2 FSDP2": {**TENSOR, "sequence_parallel": True, "use_torch_fsdp2": True},
    "TP2 SP CP2": {**TENSOR, **CONTEXT, "sequence_parallel": True},
    "EP2 CP2 DP2 FSDP2 experts": {**EXPERT, **CONTEXT, "use_torch_fsdp2": True},
    "PP2 TP2 SP tied": {**PIPELINE, **TENSOR, "sequence_parallel": True},
    "PP2 interleaved CP2 tied": {**INTERLEAVED, **CONTEXT},
    "PP2 EP2 experts": {**PIPELINE, **EXPERT},
    "TP2 SP EP2 experts": {**TENSOR, **EXPERT, "sequence_parallel": True},
    "PP2 interleaved DP2 ZeRO tied": {**INTERLEAVED, "use_distributed_optimizer": True},
    "PP2 EP2 ZeRO experts": {**PIPELINE, **EXPERT, "use_distributed_optimizer": True},
    "TP2 SP EP2 ETP1 experts": {**TENSOR, **EXPERT, **WHOLE},
    "TP2 SP CP2 EP4 ETP1 experts": {**TENSOR, **CONTEXT, **WHOLE, "expert_model_parallel_size": 4},
}
LAYOUTS = ON_TWO | ON_FOUR
# Validation batches that do not divide over two ranks; after the second step, so that they see what that one changed.
STEPS: dict[str, Any] = {"steps": 2, "accumulation": 4, "batch_size": 2, "validation_batches": 3, "validate_every": 2}


# With a bias that moves far enough to change routes, and a prediction of the token after the next; three micro-batches a rank.
EXPERTS: dict[str, Any] = {
    "accumulation": 6,
    "batch_size": 1,
    "size": "deepseek-v3-tiny",
    "num_layers": 2,
    "experts": ExpertFlags(moe_layer_freq="[0,1]", moe_router_bias_update_rate=0.05),
}


# One matrix is embedding and LM head, which the first and the last rank of a pipeline have.
TIED: dict[str, Any] = {"num_layers": 4, "tie_embeddings": True}
FP8 = Fp8Flags(fp8_format="hybrid", fp8_amax_history_len=3, fp8_amax_compute_algo="max")
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": EXPERTS,
    "tied": TIED,
    "TP2 SP fp8": {"eight_bits": Fp8Flags(fp8_format="e4m3", fp8_recipe="mxfp8")},
    "fp8": {"num_layers": 4, "eight_bits": FP8},
}


def model_of(layout: str) -> str:
    return next((name for name in MODELS if name in layout), "dense")


def settings(folder: Path, name: str, **changes: Any) -> TrainConfig:
    parallel = changes.pop("parallel", {})
    config = training_runs.config(folder, run_dir=folder / name.replace(" ", "_"), **{**STEPS, **changes})
    return TrainConfig(**{**vars(config), "parallel": ProcessFlags(**parallel)})


def trained(config: TrainConfig) -> dict[str, Any]:
    """Train, and return the numbers of the run that are the same each time, and its plan."""
    outcome = train(config, console=training_runs.QUIET)
    rows = [asdict(record) for record in outcome.records]
    found = {
        name: [row[name] for row in rows if row[name] is not None] for name in ("loss", "grad_norm", "validation_loss")
    }
    path = Path(outcome.folder) / "plan.json"
    stages = stages_in(Path(outcome.folder))
    units = Plan.load(path).units if path.exists() else first_units(stages)
    return {
        **found,
        "plan": digest_of(units) if path.exists() else letters(stages),
        "parts": {name: list(unit.actions.values()).count(Action.SHARD) for name, unit in units.items()},
        "excess": (outcome.measured_peak_bytes or 0) - (outcome.predicted_peak_bytes or 0),
    }


def stages_in(folder: Path) -> tuple[tuple[Plan, ...], ...]:
    """Return the plans of a pipeline's stages; none of a run that has none."""
    path = folder / "pipeline_plans.json"
    return PipelinePlans.load(path).stages if path.exists() else ()


def letters(stages: tuple[tuple[Plan, ...], ...]) -> str:
    """Return what tells the plans of stages from others: a letter for each micro-batch, or for all of them."""
    return " / ".join("".join(digest_of(plan.units)[0] for plan in own) for own in stages)


def first_units(stages: tuple[tuple[Plan, ...], ...]) -> dict[str, UnitPlan]:
    """Return the units of stages in their first micro-batch, named with the number of the stage."""
    return {f"{stage}.{path}": unit for stage, own in enumerate(stages) for path, unit in own[0].units.items()}


def layout(folder: Path, name: str) -> dict[str, Any]:
    """Train in a layout without a plan and with one."""
    flags = {"parallel": LAYOUTS[name], **MODELS[model_of(name)]}
    plain = trained(settings(folder, name, **flags))
    # Of a model with experts, weights are more of what it needs.
    budget = "97%" if "experts" in name else "92%"
    return {"plain": plain, "planned": trained(settings(folder, f"{name} p", **flags, memory_budget=budget))}


def parts_of_stages(folder: Path) -> dict[str, Any]:
    """Hold parts of values in the stages of a pipeline. The budget is below the least possible peak without parts."""
    parallel = {**PIPELINE, **TENSOR}
    flags: dict[str, Any] = {"steps": 2, "eval_iters": 0, **TIED}
    recompute = RecomputeConfig(**FULL, distribute_saved_activations=True)
    budget = {"memory_budget": "1270kB", "distribute_saved_activations": True}
    split = {**parallel, "sequence_parallel": True}
    return {
        "plain": trained(settings(folder, "stages", parallel=parallel, **flags)),
        "full": trained(settings(folder, "stages full", parallel=parallel, recompute=recompute, **flags)),
        "planned": trained(settings(folder, "stages planned", parallel=parallel, **budget, **flags)),
        "values": values_alike(settings(folder, "stages values", parallel=split, **budget, **flags)),
    }


def values_alike(config: TrainConfig) -> dict[str, list[str]]:
    """Return the values that may be held as parts, by stage and unit, of the stages of this process."""
    with joined_processes(config) as processes:
        session = open_session(config, processes)
        exchange = session.trained.exchange
        assert isinstance(exchange, PipelineExchange)
        profiles = record_own_stages(session, exchange.rank)
    return {
        f"{stage}.{call.path}": [graph.values[part.value].name for part in graph.parts]
        for stage, profile in profiles.items()
        for call in profile.calls
        for graph in [profile.graph_of(call)]
    }


def chosen_chunks(folder: Path) -> dict[str, Any]:
    """Choose a number of chunks with the plans of stages, resume with it, and train in as many chunks without a plan."""
    flags: dict[str, Any] = {"parallel": INTERLEAVED, **TIED, "vocab_size": 2048}
    auto = {**flags, "memory_budget": "70%", "loss_chunks": "auto"}
    found = {"begun": trained(settings(folder, "chunks", **auto))}
    plans = (folder / "chunks" / "pipeline_plans.json").read_bytes()
    found["resumed"] = trained(settings(folder, "chunks", **auto, steps=3, resume=True))
    (chunks,) = {plan.loss_chunks for plan in stages_in(folder / "chunks")[-1]}
    found["plain"] = trained(settings(folder, "chunks plain", **flags, steps=3, loss_chunks=chunks))
    is_same = plans == (folder / "chunks" / "pipeline_plans.json").read_bytes()
    return {**found, "chunks": chunks, "is_same": is_same, "table": json.loads(plans)["table"]}


def failing_data(folder: Path) -> dict[str, Any]:
    own = session_module.load_corpus
    if dist.get_rank() == 1:
        session_module.load_corpus = _no_data  # type: ignore[assignment]
    try:
        return trained(settings(folder, "data"))
    finally:
        session_module.load_corpus = own


def _no_data(*_: Any, **__: Any) -> Any:
    raise DataError("data notes/: no such folder, expected text. Check --data.")


def two_budgets(folder: Path) -> dict[str, Any]:
    return trained(settings(folder, "budgets", memory_budget=("80%", "90%")[dist.get_rank()]))


def missing_devices(folder: Path) -> dict[str, Any]:
    before, os.environ["LOCAL_WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"], "1000"
    try:
        return trained(settings(folder, "devices", device="cuda"))
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before


def plans_of(change: Callable[[list[Any]], None]) -> Callable[[Path], dict[str, Any]]:

    def resumed(folder: Path) -> dict[str, Any]:
        name = f"plans {change.__name__}"
        if dist.get_rank() == 0:
            shutil.copytree(folder / "PP2_tied_p", folder / name.replace(" ", "_"))
            path = folder / name.replace(" ", "_") / "pipeline_plans.json"
            document = json.loads(path.read_text())
            change(document["stages"])
            path.write_text(json.dumps(document))
        dist.barrier()
        return trained(settings(folder, name, parallel=PIPELINE, memory_budget="92%", resume=True, steps=3, **TIED))

    return resumed


def without_last_stage(stages: list[Any]) -> None:
    del stages[-1]


def for_three_micro_batches(stages: list[Any]) -> None:
    stages[-1] = [stages[-1][0]] * 3


def with_other_layer(stages: list[Any]) -> None:
    stages[-1] = json.loads(re.sub(r'decoder\.layers\.[^"]+', "decoder.layers.7", json.dumps(stages[-1]), count=1))


FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PARTS: dict[str, Any] = {"distribute_saved_activations": True}
# Settings of a run, or what is done.
REFUSED: dict[str, dict[str, Any] | Callable[[Path], dict[str, Any]]] = {
    "world size": {"parallel": {"tensor_model_parallel_size": 4}},
    "micro-batches": {"accumulation": 3},
    "stages": {"parallel": INTERLEAVED, "num_layers": 4, "accumulation": 3},
    "few": {"parallel": PIPELINE, "accumulation": 1},
    "sharded stages": {"parallel": {**PIPELINE, "use_torch_fsdp2": True}},
    "small stages": {"parallel": PIPELINE, "memory_budget": "1MB", "loss_chunks": "auto"},
    "device": {"device": "cuda:1"},
    "resume": {"resume": True},
    "delayed scales": {"eight_bits": FP8},
    "parts": {"memory_budget": "90%", **PARTS},
    "parts of parts": {"parallel": LAYOUTS["TP2 SP"], "recompute": RecomputeConfig(**FULL, **PARTS)},
    "too small": {"memory_budget": "1MB"},
    "two budgets": two_budgets,
    "no budget": {"memory_budget": "much"},
    "no data": failing_data,
    "devices": missing_devices,
    "plans of fewer stages": plans_of(without_last_stage),
    "plans of fewer micro-batches": plans_of(for_three_micro_batches),
    "plan of another layer": plans_of(with_other_layer),
}


# Of the micro-batches in flight, one recomputes a layer of each stage.
PARTIAL = (
    "--size tiny --pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method block "
    "--recompute-num-layers 1 --num-microbatches-with-partial-activation-checkpoints 1"
)


def run(name: str, folder: Path) -> dict[str, Any]:
    if name in LAYOUTS:
        return layout(folder, name)
    if name == "chunks of stages":
        return chosen_chunks(folder)
    if name == "held parts of stages":
        return parts_of_stages(folder)
    if name == "Megatron":
        return trained(settings(folder, name, recompute=RecomputeConfig(**FULL)))
    if name == "Megatron pipeline":
        block = training_config(parse_train(PARTIAL.split())).step.recompute
        return trained(settings(folder, name, parallel=PIPELINE, recompute=block, **TIED))
    if name == "default batch":
        config = settings(folder, name, accumulation=None)
        assert config.optim == OptimFlags(**{**vars(config.optim), "accumulation": None})
        trained(config)
        return json.loads((folder / "default_batch" / "config.json").read_text())["optim"]
    refused = REFUSED[name]
    return trained(settings(folder, name, **refused)) if isinstance(refused, dict) else refused(folder)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    the_folder = Path(sys.argv[1])
    serve(lambda name: run(name, the_folder))
