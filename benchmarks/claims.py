"""Measure the rules of thumb of recompute guides: the numbers of docs/claims.md.

    python benchmarks/claims.py                      # both parts, about five minutes
    python benchmarks/claims.py --parts modelled     # large models: bytes of fake tensors, times modelled for an H100
    python benchmarks/claims.py --parts measured     # small models: bytes and times of this CPU

Modelled: the named models at the guides' shapes, recorded on fake tensors in bf16. Bytes are what the step would allocate;
times come from the roofline of an H100 and are not measured. Measured: small models of the same kinds, peaks by
`recollect.measure_peak`, step times interleaved with steps without recompute as in `contest.py`, medians of ratios.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

import recollect
from contest import Contestant, Race, percentile
from flags import MachineFlags, RunFlags, parse
from recollect.costs.hardware import Hardware
from recollect.integrations.megatron import RecomputeConfig, megatron_plan
from recollect.lab.bench.race import keep_freed_memory
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.measuring.meter import storage_bytes
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recompute import Nothing, SwitchablePlan
from results_csv import Number, append
from subject import Step, StepFlags
from tables import markdown

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PartName = Literal["modelled", "measured"]


@dataclass(frozen=True, kw_only=True)
class Flags(MachineFlags, RunFlags):
    """Which parts to run, and for how long."""

    parts: tuple[PartName, ...] = ("modelled", "measured")
    """Parts to run."""
    models: tuple[str, ...] = ()
    """Models to run; all if empty."""
    seconds: float = 45.0
    """Seconds of rounds for each measured model."""
    hidden_size: int = 384
    """Width of the measured models."""
    seq_length: int = 512
    """Tokens in a sequence of the measured models."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the measured models."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model at a shape, and its settings; "+" joins modules, "uniform N" and "block N" are methods of `full`."""

    name: str
    config: TransformerConfig
    batch_size: int = 1
    seq_length: int = 2048
    settings: tuple[str, ...]
    has_optimizer: bool = False


_SELECTIVE = ("core_attn", "mlp", "layernorm", "core_attn+mlp", "core_attn+layernorm")
_MIXTRAL = ("core_attn", "moe_act", "moe", "layernorm", "core_attn+moe_act", "uniform 1")
_DEEPSEEK = ("core_attn", "mlp", "moe_act", "moe", "shared_experts", "mla_up_proj", "layernorm")
_DEEPSEEK += ("core_attn+mla_up_proj+moe_act", "uniform 1")


def _named(name: str, **fields: Any) -> TransformerConfig:
    return replace(NAMED_CONFIGS[name], **fields)


def modelled_models() -> list[Model]:
    """The guides' large models, with unfused attention, as in the guides' formulas, and fused attention, as used today."""
    found = []
    narrower = {"hidden_size": 8192, "num_attention_heads": 64, "ffn_hidden_size": 0, "kv_channels": 0}
    gpt_70b = _named("gpt3-175b", num_layers=80, num_query_groups=0, **narrower)
    for core in ("unfused", "fused"):
        # PyTorch's fused GPU kernels support dropout; a profile of fake CPU tensors would use unfused attention.
        no_dropout = {"core_attention": core, **({"attention_dropout": 0.0} if core == "fused" else {})}
        gpt3 = _named("gpt3-175b", **no_dropout)
        settings = (*_SELECTIVE, "uniform 1", "uniform 4", "uniform 10", "block 48")
        found.append(Model(name=f"GPT-3 175B, {core}", config=gpt3, settings=settings))
        shape = {"batch_size": 8, "settings": ("core_attn", "core_attn+mlp", "uniform 1")}
        found.append(Model(name=f"GPT 70B, {core}", config=replace(gpt_70b, **no_dropout), **shape))
        llama = _named("70b", **no_dropout)
        found.append(
            Model(name=f"Llama 70B, {core}", config=llama, seq_length=4096, settings=(*_SELECTIVE, "uniform 1"))
        )
        mixtral = _named("mixtral-8x7b", **no_dropout)
        found.append(Model(name=f"Mixtral 8x7B, {core}", config=mixtral, seq_length=4096, settings=_MIXTRAL))
        if core == "unfused":  # PyTorch on a CPU has no fused kernel for keys and values of different widths
            deepseek = _named("deepseek-v3-671b", **no_dropout)
            found.append(Model(name="DeepSeek-V3 671B, unfused", config=deepseek, seq_length=4096, settings=_DEEPSEEK))
        for length in (2048, 32_768):
            config = _named("7b-32k", **no_dropout)
            what = {"seq_length": length, "settings": ("core_attn", "uniform 1", "uniform 4", "uniform 6")}
            found.append(
                Model(name=f"Llama 7B at {length}, {core}", config=config, has_optimizer=length == 2048, **what)
            )
    return found


def measured_models(flags: Flags) -> list[Model]:
    """Small models of the four kinds, with 8 layers."""
    shape = {"hidden_size": flags.hidden_size, "num_attention_heads": flags.hidden_size // 64, "vocab_size": 1024}
    width = {"num_layers": 8, "num_query_groups": 0, "kv_channels": 0, **shape}
    found = []
    for core in ("unfused", "fused"):
        dense = {**width, "core_attention": core, "max_position_embeddings": flags.seq_length, "ffn_hidden_size": 0}
        gpt = _named("gpt-tiny", **dense, hidden_dropout=0.0, attention_dropout=0.0)
        settings = (*_SELECTIVE, "uniform 1", "uniform 3", "uniform 4", "block 4")
        size: dict[str, Any] = {"batch_size": 2, "seq_length": flags.seq_length}
        found.append(Model(name=f"GPT, {core}", config=gpt, settings=settings, **size))
    llama = _named("llama-tiny", **{**width, "ffn_hidden_size": 3 * flags.hidden_size})
    found.append(Model(name="Llama, fused", config=llama, settings=(*_SELECTIVE, "uniform 1"), **size))
    moe = {**width, "ffn_hidden_size": flags.hidden_size, "moe_ffn_hidden_size": flags.hidden_size}
    found.append(Model(name="Mixtral, fused", config=_named("mixtral-tiny", **moe), settings=_MIXTRAL, **size))
    latent = {"q_lora_rank": 192, "kv_lora_rank": 96, "qk_head_dim": 64, "qk_pos_emb_head_dim": 32, "v_head_dim": 64}
    experts = {"moe_ffn_hidden_size": 192, "moe_shared_expert_intermediate_size": 192, "moe_layer_freq": (0, *(1,) * 7)}
    sizes = {**width, **latent, **experts, "ffn_hidden_size": 1024, "core_attention": "unfused"}
    found.append(
        Model(name="DeepSeek-V3, unfused", config=_named("deepseek-v3-tiny", **sizes), settings=_DEEPSEEK, **size)
    )
    return found


def plan_of(profile: Profile, setting: str) -> Plan:
    """Return a setting's plan."""
    if setting.startswith(("uniform", "block")):
        method, count = setting.split()
        chosen: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": method}
        return megatron_plan(profile, RecomputeConfig(**chosen, recompute_num_layers=int(count)))
    modules = setting.split("+")
    return megatron_plan(profile, RecomputeConfig(recompute_granularity="selective", recompute_modules=modules))


@dataclass(kw_only=True)
class Result:
    """One setting of one model; bytes are activations: the peak minus parameters, gradients, optimizer state and batch."""

    model: str
    setting: str
    activation_bytes: int
    saved_fraction: float
    slowdown: float
    spread: tuple[float, float] | None = None
    extra: dict[str, float] = field(default_factory=dict)


def modelled(model: Model, hardware: str | Hardware = "H100") -> list[Result]:
    """Record a large model on fake tensors and predict its settings."""
    with torch.device("meta"):
        built = GPTModel(model.config).to(torch.bfloat16).train()
        tokens = torch.zeros(model.batch_size, model.seq_length, dtype=torch.int64)
    optimizer = torch.optim.AdamW(built.parameters()) if model.has_optimizer else None
    batch = {"tokens": tokens, "labels": tokens}
    profile = recollect.record(
        built, batch, optimizer=optimizer, fake=True, hardware=hardware, holds_output=False, gradients="accumulated"
    )
    plain = recollect.classic_plan(profile, "keep_all")
    resident_bytes = sum(profile.persistent.values())
    plain_bytes = (plain.predicted_peak_bytes or 0) - resident_bytes
    layer = profile.graph_of([call for call in profile.calls if call.repeated][-1])
    layer_bytes = sum(value.nbytes for value in layer.values if value.saved and value.producer is not None)
    extra = {"layer": layer_bytes, "resident": resident_bytes, "parameters": profile.persistent["parameters"]}
    found = [
        Result(
            model=model.name, setting="none", activation_bytes=plain_bytes, saved_fraction=0, slowdown=0, extra=extra
        )
    ]
    for setting in model.settings:
        plan = plan_of(profile, setting)
        nbytes = (plan.predicted_peak_bytes or 0) - resident_bytes
        saved = 1 - nbytes / plain_bytes
        slowdown = plan.predicted_slowdown or 0.0
        found.append(
            Result(model=model.name, setting=setting, activation_bytes=nbytes, saved_fraction=saved, slowdown=slowdown)
        )
    return found


class ReferenceStep(Step):
    """The step of a reference model of any configuration, with weights in the flags' dtype."""

    def __init__(self, flags: Flags, model: Model) -> None:
        torch.set_num_threads(flags.threads)
        torch.manual_seed(0)
        self.flags = StepFlags(threads=flags.threads)
        self.device = torch.device(flags.device)
        with self.device:
            self.model = GPTModel(model.config).to(DTYPES[flags.dtype]).train()
            drawn = torch.randint(model.config.vocab_size, (model.batch_size, model.seq_length + 1))
        self.batch = {"tokens": drawn[:, :-1].contiguous(), "labels": drawn[:, 1:].contiguous()}
        self.clear()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        resident = [*self.model.parameters(), *self.model.buffers(), *gradients, *self.batch.values()]
        self.resident_bytes = storage_bytes(resident)


def measured(flags: Flags, model: Model) -> list[Result]:
    """Measure peaks and interleaved step times of a small model."""
    step = ReferenceStep(flags, model)
    profile = step.record()
    contestants = [Contestant(name="none", recompute=Nothing())]
    for setting in model.settings:
        applied = recollect.apply(step.model, plan_of(profile, setting))
        contestants.append(Contestant(name=setting, recompute=SwitchablePlan(applied)))
    for one in contestants:
        with one.recompute.on():
            step.run()
            one.peak_bytes = step.peak_bytes() - step.resident_bytes
    Race(step, lambda text: None).run([contestants], seconds=flags.seconds, least_rounds=flags.least_rounds)
    plain = contestants[0]
    found = []
    for one in contestants:
        ratios = one.time_ratios_to(plain)
        slowdown, low, high = (percentile(ratios, percent) - 1 for percent in (50, 20, 80))
        found.append(
            Result(
                model=model.name,
                setting=one.name,
                activation_bytes=one.peak_bytes,
                saved_fraction=1 - one.peak_bytes / plain.peak_bytes,
                slowdown=slowdown,
                spread=(low, high),
                extra={"rounds": len(ratios)},
            )
        )
    return found


def table(results: list[Result]) -> str:
    """Write results as a table."""
    rows = []
    for one in results:
        spread = "" if one.spread is None else f"{one.spread[0]:+.1%} .. {one.spread[1]:+.1%}"
        cells = (one.model, one.setting, f"{one.activation_bytes / 1e9:.3f}", f"{one.saved_fraction:.1%}")
        rows.append((*cells, f"{one.slowdown:.1%}", spread, ", ".join(f"{k} {v:,.0f}" for k, v in one.extra.items())))
    return markdown(rows, ("model", "setting", "activations, GB", "saved", "slowdown", "spread", ""))


def numbers_of(results: list[Result], part: PartName) -> list[Number]:
    """Return results as rows."""
    numbers = []
    for one in results:
        name = f"{part} / {one.model} / {one.setting}"
        numbers += [
            Number("activations", "bytes", name, one.activation_bytes),
            Number("saved", "1", name, one.saved_fraction),
            Number("slowdown", "1", name, one.slowdown),
        ]
        numbers += [Number(f"{metric}", "1", name, value) for metric, value in one.extra.items()]
        if one.spread is not None:
            numbers += [Number(f"slowdown_p{p}", "1", name, s) for p, s in zip((20, 80), one.spread, strict=True)]
    return numbers


def main(flags: Flags) -> None:
    """Measure, print the tables, and append to results/claims.csv."""
    warnings.simplefilter("ignore")
    keep_freed_memory()
    for part in flags.parts:
        for model in modelled_models() if part == "modelled" else measured_models(flags):
            if flags.models and model.name not in flags.models:
                continue
            results = modelled(model) if part == "modelled" else measured(flags, model)
            print(table(results), flush=True)
            config = {**asdict(flags), "parts": part, "models": model.name, "out": flags.out.name}
            append(flags.out / "claims.csv", numbers_of(results, part), config)


if __name__ == "__main__":
    main(parse(Flags))
