"""Find wrong or useless Megatron settings, by recollect's rules for clashing settings and by the doctor's own."""

import dataclasses
from collections.abc import Iterator

from recollect.byte_format import format_bytes
from recollect.doctor.rule import RULES, Certainty, Finding
from recollect.doctor.settings import Settings
from recollect.errors import ConfigError
from recollect.integrations.megatron.pipeline import chunk_sizes
from recollect.integrations.megatron.roll import with_roll_defaults
from recollect.integrations.megatron.rule import Clash
from recollect.integrations.megatron.rules import RULES as CLASHES
from recollect.integrations.megatron.settings import RecomputeSettings, TrainingSetting, taken_settings

_RECOMPUTE = {f.name for f in dataclasses.fields(RecomputeSettings)}
_SMALL = frozenset({"core_attn", "layernorm"})  # under fused attention
# Where the number of layers is not set, they come from a recipe or a checkpoint.
_OF_MODEL = frozenset(
    (
        *("num_moe_experts", "multi_latent_attention", "experimental_attention_variant", "enable_mhc_connections"),
        *("attention_dropout", "hidden_dropout"),
    )
)
_LOGITS_MATTER = 2**30
_BYTES_A_LOGIT = 10  # bf16, fp32, and the gradient in fp32
_NUMBERS = {f.name for f in dataclasses.fields(TrainingSetting) if f.type in ("int", "int | None")}


def is_megatron(settings: Settings) -> bool:
    """Return whether settings are about recompute or offload in Megatron's terms, or describe a model in them."""
    given = {name for name, value in settings.values.items() if value not in (None, False, (), [])}
    # Names that only Megatron and its derivatives use.
    return bool(given & (_RECOMPUTE | {"tensor_model_parallel_size", "pipeline_model_parallel_size"}))


def findings(settings: Settings, *, out_of_memory: str = "", nan: str = "") -> Iterator[Finding]:
    """Yield the findings in the settings of one scope, clashes first; with the lines of a log that show such problems."""
    is_roll = "strategy_config" in settings.place or "strategy_args" in settings.place
    values = with_roll_defaults(settings.values) if is_roll else settings.values
    taken = taken_settings(RecomputeSettings, values)
    if "recompute_granularity" not in taken and taken.get("recompute_modules") == ("core_attn",):
        del taken["recompute_modules"]  # which TransformerConfig itself sets, and YAML of it has
    config = RecomputeSettings(**taken)
    setting = TrainingSetting()
    try:
        given = taken_settings(TrainingSetting, settings.values)
        # Templates have text where a number belongs.
        setting = TrainingSetting(**{k: v for k, v in given.items() if k not in _NUMBERS or isinstance(v, int)})
    except (ConfigError, TypeError) as problem:
        if isinstance(problem, ConfigError):
            yield _clash("setting", settings, problem, "ValueError")
    clashes = list(_clashes(settings, config, setting))
    yield from clashes
    # Further findings depend on the corrected settings.
    if not clashes:
        yield from _modules(settings, config, out_of_memory)
        yield from _layers(settings, config, setting)
        yield from _fp8(settings, config, nan)
    yield from _memory(settings, out_of_memory)


def _clashes(settings: Settings, config: RecomputeSettings, setting: TrainingSetting) -> Iterator[Finding]:
    """Yield the broken ones of recollect's rules; after a wrong type, values cannot be compared."""
    for rule in CLASHES:
        try:
            clash = rule.clash(config, setting)
        except ConfigError as problem:  # the layers cannot be divided among the stages
            yield _clash("stages", settings, problem, "AssertionError")
            continue
        if clash is not None and not any(_is_unknown(settings, name) for name in clash.settings):
            yield _clash(rule.name, settings, clash, rule.megatron)
            if rule.name == "types":
                return


def _is_unknown(settings: Settings, name: str) -> bool:
    """Return whether a setting that is not here is given elsewhere, and not Megatron's default."""
    if settings.values.get(name) is not None:
        return False
    is_elsewhere = name in _OF_MODEL and settings.get("num_layers") is None
    return is_elsewhere or name in settings.variables or name == "transformer_engine_version"


def _clash(name: str, settings: Settings, clash: Clash | ConfigError, megatron: str) -> Finding:
    is_error = "Error" in megatron
    shown = settings.shown(*clash.settings)
    missing = [f"{name} is not set" for name in clash.settings if settings.values.get(name) is None]
    return Finding(
        rule=f"megatron-{name}",
        certainty="certain" if is_error else "likely",
        problem=f"{'Settings clash' if is_error else 'A setting does not do what it seems to'}: {clash.reason}.",
        cause=f"Megatron's answer: {megatron}.",
        evidence=("; ".join((shown, *missing)) if shown[-1:] != " " else "; ".join((settings.place, *missing)),),
        fix=(clash.advice,),
        source=f"docs/megatron.md, rule {name}",
        fatal=is_error,
    )


def _is_fused(settings: Settings) -> bool:
    """Return whether attention is fused; Transformer Engine's is, unless told otherwise."""
    if settings.get("use_flash_attn"):
        return True
    backend = str(settings.get("attention_backend")).rpartition(".")[2]
    return settings.get("transformer_impl") != "local" and backend not in ("unfused", "local", "math")


def _modules(settings: Settings, config: RecomputeSettings, out_of_memory: str) -> Iterator[Finding]:
    modules = set(config.modules)
    if not modules:
        return
    shown = settings.shown("recompute_granularity", "recompute_modules", "transformer_impl", "attention_backend")
    is_fused = _is_fused(settings)
    evidence = (shown, out_of_memory) if out_of_memory else (shown,)
    if modules <= _SMALL and "layernorm" in modules and (is_fused or "core_attn" not in modules):
        yield RULES["layernorm-saves-little"].finding(*evidence)
    elif modules == {"core_attn"} and is_fused:
        is_said = settings.get("use_flash_attn", "attention_backend", "transformer_impl") is not None
        yield RULES["core-attn-fused"].finding(*evidence, certainty="likely" if is_said else "possible")
    if {"mlp", "core_attn"} <= modules and is_fused:
        yield RULES["mlp-and-core-attn"].finding(shown)
    elif "mlp" in modules:
        width = settings.number("ffn_hidden_size")
        yield RULES["mlp-is-slow"].finding(shown, size=f" (FFN {width})" if width else "")
    if "moe" in modules:
        yield RULES["router-counts-twice"].finding(shown)


def _layers(settings: Settings, config: RecomputeSettings, setting: TrainingSetting) -> Iterator[Finding]:
    if config.recompute_granularity != "full":
        return
    shown = settings.shown(
        *("recompute_granularity", "recompute_method", "recompute_num_layers", "num_layers"),
        *("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    )
    layers = config.recompute_num_layers
    sizes = chunk_sizes(setting, setting.num_layers) if setting.num_layers else []
    if config.recompute_method == "uniform" and layers is not None and sizes and 1 < max(sizes) <= layers:
        yield RULES["one-huge-region"].finding(shown, layers=layers)
    else:
        yield RULES["full-is-slow"].finding(shown)
    if setting.pipeline_model_parallel_size > 1 and config.recompute_method == "block":
        yield RULES["stage-imbalance"].finding(shown, stages=setting.pipeline_model_parallel_size)
    if settings.get("num_moe_experts"):
        yield RULES["router-counts-twice"].finding(settings.shown("recompute_granularity", "num_moe_experts"))


def _fp8(settings: Settings, config: RecomputeSettings, nan: str) -> Iterator[Finding]:
    if not settings.get("fp8"):
        return
    what = "layernorm" if "layernorm" in config.modules else ""
    if config.recompute_granularity == "full":
        what = "whole layers"
    if not what or (what == "whole layers" and not nan):
        return
    shown = settings.shown("fp8", "fp8_recipe", "recompute_granularity", "recompute_modules")
    evidence = (shown, nan) if nan else (shown,)
    certainty: Certainty = "likely" if nan else "possible"
    said = ", and NaN in the log" if nan else " may give NaN"
    yield RULES["fp8-and-recompute"].finding(*evidence, certainty=certainty, what=what, nan=said)


def _memory(settings: Settings, out_of_memory: str) -> Iterator[Finding]:
    vocabulary = settings.number("padded_vocab_size", "vocab_size")
    length, batch = settings.number("seq_length"), settings.number("micro_batch_size")
    parts = settings.number("tensor_model_parallel_size") or 1
    context = settings.number("context_parallel_size") or 1
    if vocabulary and length and batch and not settings.get("cross_entropy_loss_fusion"):
        tokens = length * batch // context
        size = tokens * vocabulary // parts * _BYTES_A_LOGIT
        if size >= _LOGITS_MATTER:
            names = ("seq_length", "micro_batch_size", "padded_vocab_size", "vocab_size", "tensor_model_parallel_size")
            yield RULES["logits-large"].finding(
                settings.shown(*names),
                certainty="likely" if out_of_memory else "possible",
                size=format_bytes(size),
                tokens=tokens,
                vocabulary=vocabulary,
                split=f" / {parts} ranks" if parts > 1 else "",
            )
    has_model = settings.number("num_layers") and settings.number("hidden_size")
    if out_of_memory and has_model and not settings.get("use_distributed_optimizer"):
        shown = settings.shown("num_layers", "hidden_size", "use_distributed_optimizer")
        yield RULES["optimizer-not-sharded"].finding(f"{shown}; no --use-distributed-optimizer", out_of_memory)
