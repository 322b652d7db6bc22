"""Read a YAML configuration of Megatron-LM or Megatron-Bridge. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recollect.cli.commands import RecordedStep
from recollect.errors import RecollectError
from recollect.integrations.megatron import RecomputeConfig, TrainingSetting
from recollect.lab.bench.settings import read_yaml
from recollect.lab.models.config import TransformerConfig

# Names stand at the top level, or in these sections of a Bridge configuration and of Megatron-LM's own YAML.
_SECTIONS = ("model", "language_model", "model_parallel", "train", "training", "dataset")
_DIMENSIONS = ("num_layers", "hidden_size", "num_attention_heads")
# Our flags of the step by Megatron's names.
_STEP = {"seq_length": "seq_length", "sequence_length": "seq_length", "micro_batch_size": "batch_size"}
_VOCABULARY = ("padded_vocab_size", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class MegatronFile:
    """The content of a configuration file, by topic; names without a value (null) are left out.

    Attributes:
        path: the file.
        recompute: fields of `RecomputeConfig`.
        model: fields of `TransformerConfig`.
        setting: fields of `TrainingSetting` that are not the model's.
        step: flags of the recorded step.
        ignored: unknown names.
    """

    path: Path
    recompute: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    setting: Mapping[str, Any] = field(default_factory=dict)
    step: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def step_flags(self, flags: RecordedStep) -> RecordedStep:
        """Return the flags of the step, with the file's values for flags left at their defaults."""
        defaults = {f.name: f.default for f in dataclasses.fields(flags)}
        changes = {name: value for name, value in self.step.items() if getattr(flags, name) == defaults[name]}
        # The file describes a model, so that the batch of the default one is none for it.
        return dataclasses.replace(flags, **{"batch_size": flags.batch_size or 1, **changes})

    def model_config(self, flags: RecordedStep) -> TransformerConfig:
        """Return the file's model if the file has its dimensions, else the named model with the file's changes.

        Raises:
            RecollectError: fields clash.
        """
        named = flags.model.dimensions(seq_length=flags.seq_length)
        changes = {**self.model, **flags.model.changes()}
        try:
            if all(name in self.model for name in _DIMENSIONS):
                return TransformerConfig(**{"vocab_size": named.vocab_size, **changes})
            return named.changed(**changes)
        except (TypeError, ValueError) as problem:
            raise RecollectError(f"--yaml {self.path}: {problem}") from None

    def training_setting(self, config: TransformerConfig) -> TrainingSetting:
        """Return the other settings that Megatron's rules for recompute depend on."""
        return TrainingSetting.of(config, **self.setting)


def read_megatron_file(path: Path) -> MegatronFile:
    """Read a configuration.

    Raises:
        RecollectError: the file cannot be read, is not a mapping, or gives one name two values.
    """
    where = f"--yaml {path}"
    data = read_yaml(path, where)
    if not isinstance(data, Mapping):
        raise RecollectError(f"{where}: got a {type(data).__name__}, expected a mapping of Megatron's names.")
    values: dict[str, Any] = {}
    ignored = []
    for section in (data, *(data[name] for name in _SECTIONS if isinstance(data.get(name), Mapping))):
        for name, value in section.items():
            if section is data and name in _SECTIONS and isinstance(value, Mapping):
                continue
            if isinstance(value, Mapping) and "_target_" not in value:
                ignored.append(str(name))
            elif name in values and values[name] != value:
                raise RecollectError(f"{where}: {name} is given twice, as {values[name]!r} and {value!r}; remove one.")
            else:
                values[name] = value
    return _sorted(path, {name: value for name, value in values.items() if value is not None}, ignored)


def _sorted(path: Path, values: dict[str, Any], ignored: list[str]) -> MegatronFile:
    recompute, model, setting, step = (dict[str, Any]() for _ in range(4))
    fields = {kind: {f.name for f in dataclasses.fields(kind)} for kind in (RecomputeConfig, TransformerConfig)}
    settings = {f.name for f in dataclasses.fields(TrainingSetting)}
    for name, value in values.items():
        if name in fields[RecomputeConfig]:
            recompute[name] = tuple(value.split(",")) if isinstance(value, str) and name.endswith("_modules") else value
        elif name in _VOCABULARY:
            model["vocab_size"] = max(value, model.get("vocab_size", 0))
        elif name in fields[TransformerConfig]:
            model[name] = _function_name(value) if name == "activation_func" else value
        elif name in settings:
            setting[name] = value
        elif name in _STEP:
            step[_STEP[name]] = value
        elif name == "bf16":
            step["dtype"] = "bf16" if value else "fp32"
        elif not str(name).startswith("_"):
            ignored.append(str(name))
    return MegatronFile(
        path=path, recompute=recompute, model=model, setting=setting, step=step, ignored=tuple(dict.fromkeys(ignored))
    )


def _function_name(value: Any) -> Any:
    """Return the last part of a function's name, such as "silu"; Bridge writes the full name, or a mapping with `_target_`."""
    name = value.get("_target_") if isinstance(value, Mapping) else value
    return name.rpartition(".")[2] if isinstance(name, str) else value
