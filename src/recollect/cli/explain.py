"""`recollect explain`: show the values that a Megatron configuration keeps and recomputes, layer by layer.

The configuration is in flags, or in a YAML file of Megatron-LM or Megatron-Bridge.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from recollect.byte_format import format_bytes
from recollect.cli.commands import Explain, RecordedStep
from recollect.cli.common import check_folder, describe_step, step_recorder, wide_console, write_file
from recollect.errors import RecollectError
from recollect.integrations.megatron import RecomputeConfig, TrainingSetting, megatron_plan
from recollect.lab.bench.settings import Setting, read_yaml
from recollect.lab.models.config import TransformerConfig
from recollect.planning.explain import Explained, Explanation, LayerGroup, explain_plan
from recollect.plans.text import label_paths
from recollect.printing import print_line
from recollect.profile.profile import Profile
from recollect.quantities import format_seconds

# Names are at the top level, or in these sections of a Bridge configuration or of Megatron-LM's own YAML.
_SECTIONS = ("model", "language_model", "model_parallel", "train", "training", "dataset")
_DIMENSIONS = ("num_layers", "hidden_size", "num_attention_heads")
# Our flags of the step by Megatron's names.
_STEP = {"seq_length": "seq_length", "sequence_length": "seq_length", "micro_batch_size": "batch_size"}
_VOCABULARY = ("padded_vocab_size", "vocab_size")
_TABLE_WIDTH = 120
_LONGEST_WORD = 36
_NONE = "-"
_BUDGET = "a budget of the same peak"
_LOOP = "and holds no output after its backward, so that a peak can differ from that of recollect plan, whose loop holds both."
_GRADIENT_BUFFER = (
    f"The loop has gradients all the time, as Megatron's buffer (--new-gradients: not in forward), {_LOOP}"
)
_NEW_GRADIENTS = f"The loop has gradients from backward to the optimizer's step, {_LOOP}"


@dataclass(frozen=True, kw_only=True)
class MegatronFile:
    """The content of a configuration file, by topic; names without a value (null) are left out."""

    path: Path
    """The file."""
    recompute: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `RecomputeConfig`."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TransformerConfig`."""
    setting: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TrainingSetting` that are not the model's."""
    step: Mapping[str, Any] = field(default_factory=dict)
    """Flags of the recorded step."""
    ignored: tuple[str, ...] = ()
    """Unknown names."""

    def step_flags(self, flags: RecordedStep) -> RecordedStep:
        """Return the flags of the step, with the file's values for flags left at their defaults."""
        defaults = {f.name: f.default for f in dataclasses.fields(flags)}
        changes = {name: value for name, value in self.step.items() if getattr(flags, name) == defaults[name]}
        # The file describes a model, so the default model's batch does not apply.
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


def run_explain(command: Explain, console: Console) -> None:
    """Record a step, plan it as configured and by budget, print both plans layer by layer, and write the numbers."""
    if command.json is not None:
        check_folder(command.json, "--json")
    file = None if command.yaml is None else read_megatron_file(command.yaml)
    if file is None and not command.recompute.fields():
        raise RecollectError(
            "recollect explain: got no configuration to explain, expected Megatron's flags for recompute, such as "
            "--recompute-activations or --recompute-granularity full --recompute-method uniform --recompute-num-layers 1, or "
            "--yaml FILE. To plan for a budget instead: recollect plan --memory-budget 60%."
        )
    words = {**(file.recompute if file else {}), **command.recompute.fields()}
    config = Setting(words).config
    profile, setting = _recorded(command, file, console, host_link=config.cpu_offloading or bool(config.offloaded))
    explanation = explain_plan(profile, megatron_plan(profile, config, setting))
    show(explanation, profile, console, with_names=command.names)
    print_line(console, _NEW_GRADIENTS if command.new_gradients else _GRADIENT_BUFFER, style="dim")
    if command.json is not None:
        data = {"configuration": dict(words), "hardware": profile.device_name, **explanation.to_data()}
        write_file(command.json, json.dumps(data, indent=2) + "\n", console, flag="--json")


def _recorded(
    command: Explain, file: MegatronFile | None, console: Console, *, host_link: bool
) -> tuple[Profile, TrainingSetting | None]:
    """Record the step given by flags and file, and return the file's training setting."""
    gradients = "freed" if command.new_gradients else "accumulated"
    loop: Any = {"holds_output": False, "gradients": gradients, "host_link": host_link}
    if file is None:
        return step_recorder(command.step, **loop)(1), None
    if file.ignored:
        print_line(console, f"{file.path}: ignored: {', '.join(file.ignored)}", style="dim")
    flags = file.step_flags(command.step)
    if flags.hf_config is not None:
        return step_recorder(flags, **loop)(1), TrainingSetting(**file.setting)
    model = file.model_config(flags)
    return step_recorder(flags, model, **loop)(1), TrainingSetting.of(model, **file.setting)


def show(explanation: Explanation, profile: Profile, console: Console, *, with_names: bool) -> None:
    """Print the totals side by side, then each plan layer by layer."""
    wide = wide_console(console, _TABLE_WIDTH)
    print_line(wide, describe_step(profile))
    plans = _plans(explanation)
    wide.print(totals_table(explanation))
    for line in peak_lines(plans):
        print_line(wide, line)
    wide.print()
    for name, explained in list(plans.items())[1:]:
        wide.print(layers_table(name, explained))
        if with_names:
            for group in explained.groups:
                for line in name_lines(group):
                    print_line(wide, line)
    if explanation.problem:
        print_line(wide, f"No plan for a budget: {explanation.problem}")


def _plans(explanation: Explanation) -> dict[str, Explained]:
    """Return the plans by their names, first that without recompute."""
    given = explanation.given.plan
    # The note of a plan made for a budget is no name.
    name = "given" if given.budget_bytes is not None else given.note or "given"
    plans = {"no recompute": explanation.plain, name: explanation.given}
    return plans if explanation.budget is None else {**plans, _BUDGET: explanation.budget}


def totals_table(explanation: Explanation) -> Table:
    """Return the whole step without recompute, as configured, and with a budget of the same peak."""
    table = Table(title="The whole step", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    columns = _plans(explanation)
    for name in columns:
        table.add_column(name, justify="right")
    plans = list(columns.values())
    table.add_row("predicted peak", *(format_bytes(plan.simulation.peak_bytes) for plan in plans))
    table.add_row("alive all the time", *[format_bytes(sum(explanation.persistent.values()))] * len(plans))
    table.add_row("kept for backward", *(format_bytes(plan.simulation.kept_bytes) for plan in plans))
    if any(plan.simulation.host_bytes for plan in plans):
        table.add_row("in host memory", *(format_bytes(plan.simulation.host_bytes) for plan in plans))
    table.add_row("ops recomputed", *(f"{plan.simulation.recomputed_ops:,}" for plan in plans))
    table.add_row("time of recompute", *(_seconds(plan.simulation.recompute_s) for plan in plans))
    if any(plan.wait_s for plan in plans):
        table.add_row("time of waiting for copies", *(_seconds(plan.wait_s) for plan in plans))
    table.add_row("predicted slowdown", *(_percent(plan.slowdown) for plan in plans), style="bold")
    if explanation.bound_slowdown is not None:
        bounds = [_NONE] * (len(plans) - 1)
        table.add_row("no plan can be below, by these times", *bounds, _percent(explanation.bound_slowdown))
    return table


def peak_lines(plans: Mapping[str, Explained]) -> list[str]:
    """Say where the peaks of the plans are, in one line if they are at the same place, and list their contents."""
    places = {plan.simulation.peak_note for plan in plans.values()}
    filled = {name: ", ".join(plan.tenants) for name, plan in plans.items()}
    if len(places) == 1:
        return [f"All peaks are in {places.pop()}.", *(f"  {name}:\n    {text}" for name, text in filled.items())]
    return [f"The peak of {n!r} is in {plan.simulation.peak_note}: {filled[n]}." for n, plan in plans.items()]


def layers_table(name: str, explained: Explained) -> Table:
    """Return a plan layer by layer; bytes, ops and seconds are per layer."""
    table = Table(title=f"{name}, per layer", title_justify="left", box=box.SIMPLE_HEAD)
    labels = [_label(group.paths) for group in explained.groups]
    # A path is not cut even in little room: it can be broken between its words.
    longest = max((len(word) for label in labels for word in label.split()), default=0)
    table.add_column("layers", min_width=min(longest, _LONGEST_WORD), overflow="fold")
    for head in ("number", "keeps", "values", "recomputes", "time"):
        table.add_column(head, justify="right", no_wrap=True)
    for label, group in zip(labels, explained.groups, strict=True):
        table.add_row(
            label,
            str(group.num_layers),
            format_bytes(group.layer.kept_bytes),
            str(len(group.kept)),
            _ops(group.layer.recomputed_ops),
            _seconds(group.layer.recompute_s),
        )
    table.add_row("outside of all layers", "", format_bytes(explained.outside_bytes), "", "", "", style="dim")
    total = format_bytes(explained.simulation.kept_bytes)
    ops, time = _ops(explained.simulation.recomputed_ops), _seconds(explained.simulation.recompute_s)
    table.add_row("together", "", total, "", ops, time, style="bold")
    return table


def _label(paths: Sequence[str]) -> str:
    """Return paths as plans print them, with spaces where a line may end.

    Example:
        >>> _label(["embedding", "layers.0", "layers.3", "layers.5"])
        'embedding, layers.{0, 3, 5}'
    """
    return re.sub(r",(?! )", ", ", label_paths(paths))


def name_lines(group: LayerGroup) -> list[str]:
    """List the values that a group of layers keeps and recomputes."""
    kept = [f"{name} {format_bytes(nbytes)}" for name, nbytes in group.kept.items()]
    if group.layer.generator_bytes:
        kept.append(f"states of the random generator {format_bytes(group.layer.generator_bytes)}")
    recomputed = [name if times == 1 else f"{name} x{times}" for name, times in group.recomputed.items()]
    lines = [f"{' '.join(group.paths)}"]
    return [*lines, f"  keeps       {_listed(kept)}", f"  recomputes  {_listed(recomputed)}"]


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "nothing"


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if seconds else _NONE


def _ops(number: int) -> str:
    return f"{number:,} op{'' if number == 1 else 's'}" if number else _NONE


def _percent(fraction: float) -> str:
    return f"{fraction:.1%}".replace("%", " %")
