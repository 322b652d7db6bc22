"""Settings to measure side by side: no recompute, Megatron's recompute settings, or a memory budget. Imports no torch."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recollect.errors import BenchError
from recollect.integrations.megatron import RecomputeConfig
from recollect.integrations.megatron.rule import did_you_mean
from recollect.integrations.megatron.settings import with_module_lists
from recollect.quantities import check_budget

_GRANULARITY, _BUDGET = "recompute_granularity", "memory_budget"
KEEP_ALL: Mapping[str, Any] = {_GRANULARITY: None}
_SPELLINGS = "'none', 'selective core_attn,layernorm', 'full uniform 4', 'full block 2' or 'memory_budget 60%'"


@dataclass(frozen=True)
class Setting:
    """The values to recompute."""

    fields: Mapping[str, Any]
    """As in a settings file: `memory_budget`, bytes or a percentage of the peak without recompute; or Megatron's names, of
    which missing ones have its defaults."""
    name: str = ""
    """In messages and tables; default: the setting in a few words."""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", _name_of(self.fields))
        if self.budget is not None:
            check_budget(self.budget, device_bytes=1)

    @property
    def is_plain(self) -> bool:
        return self.fields == KEEP_ALL

    @property
    def budget(self) -> str | None:
        return self.fields.get(_BUDGET)

    @property
    def config(self) -> RecomputeConfig:
        """Megatron's configuration with defaults, checked against its rules."""
        known = [field.name for field in dataclasses.fields(RecomputeConfig)]
        for name in self.fields:
            if name not in known:
                meant = did_you_mean(name, known)
                raise BenchError(
                    f"setting {self.name!r}: got {name!r}, expected names of Megatron's recompute settings. {meant}".rstrip()
                )
        return RecomputeConfig(**self.fields)


def parse_setting(text: str) -> Setting:
    """Parse a setting.

    That is "none"; "selective" and modules, separated by spaces or commas (default: Megatron's); "full", a method and a number
    of layers; or "memory_budget" and bytes or a percentage.
    """
    first, *rest = text.split() or [""]
    if first == "none" and not rest:
        return Setting(KEEP_ALL)
    if first == _BUDGET and rest:
        return Setting({_BUDGET: " ".join(rest)})
    if first == "selective":
        modules = tuple(name for word in rest for name in word.split(",") if name)
        return Setting({_GRANULARITY: "selective", **({"recompute_modules": modules} if modules else {})})
    if first == "full":
        values: dict[str, Any] = {_GRANULARITY: "full"}
        for word in rest:
            values["recompute_num_layers" if word.isdecimal() else "recompute_method"] = (
                int(word) if word.isdecimal() else word
            )
        if len(values) == 1 + len(rest):
            return Setting(values)
    raise BenchError(f"setting {text!r}: cannot be read, expected {_SPELLINGS}.")


def read_settings(path: Path) -> list[Setting]:
    """Read a YAML file with a list of settings, or a mapping with the list under `settings`.

    An entry is a text as for `parse_setting`, or a mapping of Megatron's names (also under `model`, as in Megatron-Bridge) or
    `memory_budget`, optionally with a `name`.
    """
    where = f"settings file {path}"
    data = read_yaml(path, where)
    entries = data.get("settings") if isinstance(data, Mapping) else data
    if not isinstance(entries, list) or not entries:
        raise BenchError(f"{where}: expected a list of settings, or one under the key 'settings'.")
    return [_setting(entry, f"{where}, entry {number}") for number, entry in enumerate(entries, start=1)]


def read_yaml(path: Path, where: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise BenchError(f"{where}: cannot be read ({problem.strerror}), expected a YAML file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise BenchError(f"{where}: not YAML: {' '.join(str(problem).split())}") from None


def _setting(entry: Any, where: str) -> Setting:
    if isinstance(entry, str):
        try:
            return parse_setting(entry)
        except BenchError as problem:
            raise BenchError(f"{where}: {problem}") from None
    if not isinstance(entry, Mapping) or not isinstance(entry.get("model") or {}, Mapping):
        raise BenchError(f"{where}: got {entry!r}, expected {_SPELLINGS}, or a mapping of Megatron's names.")
    values = {key: value for key, value in entry.items() if key not in ("name", "model")}
    values = with_module_lists({**values, **(entry.get("model") or {})})
    name = str(entry.get("name", ""))
    if _BUDGET in values:
        if len(values) > 1:
            others = ", ".join(key for key in values if key != _BUDGET)
            raise BenchError(
                f"{where}: got memory_budget with {others}, expected a single way to choose what to recompute."
            )
        values[_BUDGET] = str(values[_BUDGET])
    return Setting(values or KEEP_ALL, name)


def named_settings(settings: Sequence[Setting]) -> list[Setting]:
    """Check the settings and return them after "no recompute", the reference of all others."""
    found = list(settings)
    if not any(setting.is_plain for setting in found):
        found.insert(0, Setting(KEEP_ALL))
    for setting in found:
        if setting.budget is None:
            setting.config  # noqa: B018 - report clashing settings before the work begins
    found.sort(key=lambda setting: not setting.is_plain)
    seen: set[str] = set()
    for setting in found:
        if setting.name in seen:
            raise BenchError(f"setting {setting.name!r}: given twice. Remove one, or give it a different `name`.")
        seen.add(setting.name)
    return found


def _name_of(values: Mapping[str, Any]) -> str:
    """Name a setting as `parse_setting` spells it, followed by its other fields."""
    if values == KEEP_ALL:
        return "none"
    if _BUDGET in values:
        return f"{_BUDGET} {values[_BUDGET]}"
    parts = [str(values.get(_GRANULARITY))]
    parts += [str(values[key]) for key in ("recompute_method", "recompute_num_layers") if key in values]
    if (modules := values.get("recompute_modules")) is not None:
        parts.append(",".join(map(str, modules if isinstance(modules, list | tuple) else [modules])) or "no modules")
    known = (_GRANULARITY, "recompute_method", "recompute_num_layers", "recompute_modules")
    return " ".join([*parts, *(f"{key}={value}" for key, value in values.items() if key not in known)])
