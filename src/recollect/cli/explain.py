"""`recollect explain`: show the values that a Megatron configuration keeps and recomputes, layer by layer.

The configuration is in flags, or in a YAML file of Megatron-LM or Megatron-Bridge.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from recollect.byte_format import format_bytes
from recollect.cli.commands import Explain
from recollect.cli.common import check_folder, describe_step, step_recorder, wide_console, write_file
from recollect.doctor.settings import settings_in_data
from recollect.errors import RecollectError
from recollect.integrations.megatron import RecomputeConfig, TrainingSetting, megatron_plan
from recollect.integrations.megatron.settings import taken_settings
from recollect.lab.bench.settings import Setting, read_yaml
from recollect.pictures.words import percent
from recollect.planning.explain import Explained, Explanation, LayerGroup, explain_plan
from recollect.plans.text import label_paths
from recollect.printing import print_line
from recollect.profile.profile import Profile
from recollect.quantities import format_seconds

_TABLE_WIDTH = 120
_LONGEST_WORD = 36
_NONE = "-"
_BUDGET = "a budget of the same peak"
_LOOP = "and holds no output after its backward, so a peak can differ from recollect plan's, whose loop holds both."
_GRADIENT_BUFFER = (
    f"The loop has gradients all the time, as Megatron's buffer (--new-gradients: not in forward), {_LOOP}"
)
_NEW_GRADIENTS = f"The loop has gradients from backward to the optimizer's step, {_LOOP}"


def run_explain(command: Explain, console: Console) -> None:
    if command.json is not None:
        check_folder(command.json, "--json")
    values = {} if command.yaml is None else settings_in_data(read_yaml(command.yaml, "--yaml"), "")[0].values
    if command.yaml is None and not command.recompute.fields():
        raise RecollectError(
            "recollect explain: got no configuration to explain, expected Megatron's flags for recompute, such as "
            "--recompute-activations or --recompute-granularity full --recompute-method uniform --recompute-num-layers 1, or "
            "--yaml FILE. To plan for a budget instead: recollect plan --memory-budget 60%."
        )
    # A file may have settings for recompute and training that no flag has.
    words = {**taken_settings(RecomputeConfig, values), **command.recompute.fields()}
    config = Setting(words).config
    profile, setting = _recorded(
        command, taken_settings(TrainingSetting, values), host_link=config.cpu_offloading or bool(config.offloaded)
    )
    explanation = explain_plan(profile, megatron_plan(profile, config, setting))
    show(explanation, profile, console, with_names=command.names)
    print_line(console, _NEW_GRADIENTS if command.new_gradients else _GRADIENT_BUFFER, style="dim")
    if command.json is not None:
        data = {"configuration": dict(words), "hardware": profile.device_name, **explanation.to_data()}
        write_file(command.json, json.dumps(data, indent=2) + "\n", console, flag="--json")


def _recorded(command: Explain, given: Mapping[str, Any], *, host_link: bool) -> tuple[Profile, TrainingSetting | None]:
    """Record the step, and return the training setting of the file; None without one."""
    gradients = "freed" if command.new_gradients else "accumulated"
    loop: Any = {"holds_output": False, "gradients": gradients, "host_link": host_link}
    flags = command.step
    if command.yaml is None or flags.hf_config is not None:
        setting = None if command.yaml is None else TrainingSetting(**given)
        return step_recorder(flags, **loop)(1), setting
    model = flags.model.dimensions(seq_length=flags.seq_length)
    setting = TrainingSetting.of(model, **{name: value for name, value in given.items() if not hasattr(model, name)})
    return step_recorder(flags, model, **loop)(1), setting


def show(explanation: Explanation, profile: Profile, console: Console, *, with_names: bool) -> None:
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
    # The note of a plan made for a budget is not a name.
    name = "given" if given.budget_bytes is not None else given.note or "given"
    plans = {"no recompute": explanation.plain, name: explanation.given}
    return plans if explanation.budget is None else {**plans, _BUDGET: explanation.budget}


def totals_table(explanation: Explanation) -> Table:
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
    table.add_row("predicted slowdown", *(percent(plan.slowdown) for plan in plans), style="bold")
    if explanation.bound_slowdown is not None:
        bounds = [_NONE] * (len(plans) - 1)
        table.add_row("no plan can be below, by these times", *bounds, percent(explanation.bound_slowdown))
    return table


def peak_lines(plans: Mapping[str, Explained]) -> list[str]:
    """Print where the peaks of the plans are, in one line if all are at the same place, and list their contents."""
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
