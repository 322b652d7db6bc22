"""What is wrong, or does not help, in settings of transformers, Accelerate, FSDP, DeepSpeed and what is built on them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

from recollect.doctor.finding import Finding, Rule
from recollect.doctor.metadata_mismatch import ROUTING, ZERO3
from recollect.doctor.rules_checkpoint import CHECKPOINT_RULES
from recollect.doctor.rules_libraries import LIBRARY_RULES
from recollect.doctor.settings import Settings
from recollect.errors import ConfigError, ConfigWarning
from recollect.integrations.deepspeed import ActivationCheckpointing
from recollect.integrations.megatron.roll import is_moe_config

__all__ = ["HUGGING_FACE_RULES", "findings", "is_checkpointing"]

_BY_NAME: dict[str, Rule] = {rule.name: rule for rule in (*CHECKPOINT_RULES, *LIBRARY_RULES)}

DEEPSPEED_CLASH = Rule(
    name="deepspeed-clash",
    sees="settings of DeepSpeed's section activation_checkpointing that clash, or have no effect",
    problem="In DeepSpeed's activation_checkpointing: {reason}.",
    cause="The section's settings depend on each other.",
    fix=("{advice}",),
    source="deepspeed/runtime/activation_checkpointing",
)
DEEPSPEED_CPU = Rule(
    name="deepspeed-cpu-checkpointing",
    sees="cpu_checkpointing without partition_activations, in DeepSpeed",
    problem="cpu_checkpointing without partition_activations offloads nothing.",
    cause="DeepSpeed moves only partitioned activations to the host.",
    fix=(
        "Set partition_activations: true as well; it works without tensor parallelism, too.",
        'Or recompute instead: recollect.attach(model, optimizer, budget="80%").',
    ),
    source="deepspeedai/DeepSpeed#522, #541, #598",
    certainty="likely",
)
DEEPSPEED_SECTION = Rule(
    name="deepspeed-section-alone",
    sees="DeepSpeed's section activation_checkpointing, and no gradient checkpointing of the model",
    problem="The section activation_checkpointing recomputes nothing by itself.",
    cause="It configures deepspeed.checkpointing.checkpoint, which the model's code has to call; transformers' do not.",
    fix=(
        "With transformers: gradient_checkpointing: true (activation_checkpointing in newer ones) in the training arguments.",
        "In code of your own: call deepspeed.checkpointing.checkpoint on each layer.",
        'Or: recollect.attach(model, optimizer, budget="80%").',
    ),
    source="deepspeedai/DeepSpeed#5704, deepspeedai/DeepSpeedExamples#332",
    certainty="possible",
)
HUGGING_FACE_RULES = (DEEPSPEED_CLASH, DEEPSPEED_CPU, DEEPSPEED_SECTION)

_SWITCHES = ("gradient_checkpointing", "activation_checkpointing")
_KWARGS = ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
_ADAPTERS = ("lora_r", "lora_rank", "lora_target_modules", "lora_target", "use_peft", "peft_type")


def is_checkpointing(settings: Settings) -> bool:
    """Return whether the model's own gradient checkpointing is on."""
    return any(settings.values.get(name) is True for name in _SWITCHES)


def findings(settings: Settings) -> Iterator[Finding]:
    """Yield what the settings of one scope show.

    Args:
        settings: of a run; those of several files together.

    Yields:
        Clashes first.
    """
    yield from _deepspeed(settings)
    if not is_checkpointing(settings):
        return
    yield from _fsdp(settings)
    yield from _reentrant(settings)
    if settings.get("use_cache") is True:
        yield _BY_NAME["cache-and-checkpointing"].finding(settings.shown(*_SWITCHES, "use_cache"))


def _deepspeed(settings: Settings) -> Iterator[Finding]:
    section = settings.get("activation_checkpointing")
    if not isinstance(section, Mapping):
        return
    shown = f"{settings.place}: activation_checkpointing: {dict(section)}"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConfigWarning)
            ActivationCheckpointing.of({"activation_checkpointing": section})
        for warning in caught:
            advice = "Leave it out."
            yield DEEPSPEED_CLASH.finding(shown, certainty="likely", reason=str(warning.message), advice=advice)
    except ConfigError as problem:
        given = ", ".join(f"{name}: {value}" for name, value in problem.settings.items())
        yield DEEPSPEED_CLASH.finding(shown, reason=f"{given}: {problem.reason}", advice=problem.advice)
    if section.get("cpu_checkpointing") and not section.get("partition_activations"):
        yield DEEPSPEED_CPU.finding(shown)
    if not settings.values.get("gradient_checkpointing"):
        yield DEEPSPEED_SECTION.finding(shown)


def _fsdp(settings: Settings) -> Iterator[Finding]:
    config = settings.get("fsdp_config")
    inside = config if isinstance(config, Mapping) else {}
    checkpoints = inside.get("activation_checkpointing") or inside.get("fsdp_activation_checkpointing")
    names = (*_SWITCHES, "fsdp", "fsdp_config", "fsdp_activation_checkpointing", "distributed_type")
    if checkpoints or settings.get("fsdp_activation_checkpointing"):
        yield _BY_NAME["fsdp-checkpoints-twice"].finding(settings.shown(*names))
    elif settings.get("fsdp") or settings.get("distributed_type") == "FSDP":
        yield _BY_NAME["fsdp-gathers-twice"].finding(settings.shown(*names), certainty="likely")


def _reentrant(settings: Settings) -> Iterator[Finding]:
    kwargs = settings.get(*_KWARGS)
    reentrant = kwargs.get("use_reentrant") if isinstance(kwargs, Mapping) else settings.get("use_reentrant")
    shown = settings.shown(*_SWITCHES, *_KWARGS, "use_reentrant")
    if isinstance(kwargs, Mapping) and reentrant is None:
        yield _BY_NAME["reentrant-by-default"].finding(shown, certainty="likely")
    if isinstance(kwargs, Mapping) and kwargs.get("preserve_rng_state") is False:
        yield _BY_NAME["random-state-not-kept"].finding(shown)
    is_adapter = any(settings.get(name) for name in _ADAPTERS) or any(
        settings.get(name) in ("lora", "qlora") for name in ("finetuning_type", "adapter")
    )
    if reentrant is True and settings.get("ddp_find_unused_parameters", "find_unused_parameters") is True:
        evidence = settings.shown(*_SWITCHES, *_KWARGS, "ddp_find_unused_parameters", "find_unused_parameters")
        yield _BY_NAME["ready-twice"].finding(evidence, certainty="likely")
    if reentrant is True and is_adapter:
        evidence = settings.shown(*_SWITCHES, *_KWARGS, "use_reentrant", *_ADAPTERS, "finetuning_type", "adapter")
        yield _BY_NAME["no-input-requires-grad"].finding(evidence, certainty="possible")
    unknown = {"saved": "(not run yet)", "recomputed": "(not run yet)"}
    if reentrant is not True and is_adapter and _zero_stage(settings) == 3:
        evidence = settings.shown(
            *_SWITCHES, *_KWARGS, *_ADAPTERS, "finetuning_type", "zero_optimization", "zero_stage"
        )
        yield ZERO3.finding(evidence, certainty="possible", **unknown)
    if reentrant is not True and is_moe_config(settings.values):
        evidence = settings.shown(*_SWITCHES, *_KWARGS, "num_local_experts", "num_experts", "n_routed_experts")
        yield ROUTING.finding(evidence, certainty="possible", **unknown)


def _zero_stage(settings: Settings) -> object:
    section = settings.get("zero_optimization")
    return section.get("stage") if isinstance(section, Mapping) else settings.get("zero_stage")
