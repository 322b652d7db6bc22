"""Find wrong or useless settings of transformers, Accelerate, FSDP, DeepSpeed, torchtitan and the like."""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping

from recollect.doctor.rule import RULES, Finding
from recollect.doctor.settings import Settings
from recollect.errors import ConfigError, ConfigWarning
from recollect.integrations.deepspeed import ActivationCheckpointing
from recollect.integrations.megatron.roll import is_moe_config

_SWITCHES = ("gradient_checkpointing", "activation_checkpointing")
_KWARGS = ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
_ADAPTERS = ("lora_r", "lora_rank", "lora_target_modules", "lora_target", "use_peft", "peft_type")


def is_checkpointing(settings: Settings) -> bool:
    return any(settings.values.get(name) is True for name in _SWITCHES)


def findings(settings: Settings) -> Iterator[Finding]:
    """Yield the findings in one scope's settings, clashes first; uncertain ones have not ended a run yet."""
    for found in _findings(settings):
        yield dataclasses.replace(found, fatal=found.fatal and found.certainty == "certain")


def _findings(settings: Settings) -> Iterator[Finding]:
    yield from _deepspeed(settings)
    if is_checkpointing(settings):
        yield from _fsdp(settings)
        yield from _reentrant(settings)
        if settings.get("use_cache") is True:
            yield RULES["cache-and-checkpointing"].finding(settings.shown(*_SWITCHES, "use_cache"))
    yield from _torchtitan(settings)


def _deepspeed(settings: Settings) -> Iterator[Finding]:
    section = settings.get("activation_checkpointing")
    if not isinstance(section, Mapping):
        return
    shown, clash = f"{settings.place}: activation_checkpointing: {dict(section)}", RULES["deepspeed-clash"]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConfigWarning)
            ActivationCheckpointing.of({"activation_checkpointing": section})
        for warning in caught:
            yield clash.finding(shown, certainty="likely", reason=str(warning.message), advice="Leave it out.")
    except ConfigError as problem:
        given = ", ".join(f"{name}: {value}" for name, value in problem.settings.items())
        yield clash.finding(shown, reason=f"{given}: {problem.reason}", advice=problem.advice)
    if not settings.values.get("gradient_checkpointing"):
        yield RULES["deepspeed-section-alone"].finding(shown)


def _fsdp(settings: Settings) -> Iterator[Finding]:
    inside = settings.section("fsdp_config")
    checkpoints = inside.get("activation_checkpointing") or inside.get("fsdp_activation_checkpointing")
    names = (*_SWITCHES, "fsdp", "fsdp_config", "fsdp_activation_checkpointing", "distributed_type")
    if checkpoints or settings.get("fsdp_activation_checkpointing"):
        yield RULES["fsdp-checkpoints-twice"].finding(settings.shown(*names))
    elif settings.get("fsdp") or settings.get("distributed_type") == "FSDP":
        yield RULES["fsdp-gathers-twice"].finding(settings.shown(*names), certainty="likely")


def _reentrant(settings: Settings) -> Iterator[Finding]:
    kwargs = settings.get(*_KWARGS)
    reentrant = kwargs.get("use_reentrant") if isinstance(kwargs, Mapping) else settings.get("use_reentrant")
    shown = settings.shown(*_SWITCHES, *_KWARGS, "use_reentrant")
    if isinstance(kwargs, Mapping) and reentrant is None:
        yield RULES["reentrant-by-default"].finding(shown, certainty="likely")
    if isinstance(kwargs, Mapping) and kwargs.get("preserve_rng_state") is False:
        yield RULES["random-state-not-kept"].finding(shown)
    is_adapter = any(settings.get(name) for name in _ADAPTERS) or any(
        settings.get(name) in ("lora", "qlora") for name in ("finetuning_type", "adapter")
    )
    if reentrant is True and settings.get("ddp_find_unused_parameters", "find_unused_parameters") is True:
        evidence = settings.shown(*_SWITCHES, *_KWARGS, "ddp_find_unused_parameters", "find_unused_parameters")
        yield RULES["ready-twice"].finding(evidence, certainty="likely")
    if reentrant is True and is_adapter:
        evidence = settings.shown(*_SWITCHES, *_KWARGS, "use_reentrant", *_ADAPTERS, "finetuning_type", "adapter")
        yield RULES["no-input-requires-grad"].finding(evidence, certainty="possible")
    unknown = {"saved": "(not run yet)", "recomputed": "(not run yet)"}
    zero_stage = settings.section("zero_optimization").get("stage", settings.get("zero_stage"))
    if reentrant is not True and is_adapter and zero_stage == 3:
        evidence = settings.shown(
            *_SWITCHES, *_KWARGS, *_ADAPTERS, "finetuning_type", "zero_optimization", "zero_stage"
        )
        yield RULES["metadata-zero3"].finding(evidence, certainty="possible", **unknown)
    if reentrant is not True and is_moe_config(settings.values):
        evidence = settings.shown(*_SWITCHES, *_KWARGS, "num_local_experts", "num_experts", "n_routed_experts")
        yield RULES["metadata-routing"].finding(evidence, certainty="possible", **unknown)


def _torchtitan(settings: Settings) -> Iterator[Finding]:
    section = settings.section("activation_checkpoint")
    mode, compiles = section.get("mode"), _compiles_model(settings)
    shown = f"{settings.place}: activation_checkpoint.mode: {mode}, compile of the model: {'on' if compiles else 'off'}"
    if mode == "memory_budget" and not compiles:
        yield RULES["torchtitan-budget-needs-compile"].finding(shown)
    elif mode == "memory_budget":
        budget = section.get("memory_budget", 0.5)
        yield RULES["compile-budget"].finding(f"{shown}, memory_budget: {budget}", budget=budget)
    elif mode == "selective" and compiles:
        yield RULES["torchtitan-selective-and-compile"].finding(shown)


def _compiles_model(settings: Settings) -> bool:
    section = settings.section("compile")
    if section.get("enable") is True:
        return "model" in section.get("components", ("model",))
    return settings.section("training").get("compile") is True  # where earlier versions of torchtitan have it
