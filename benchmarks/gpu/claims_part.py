"""The rows of docs/claims.md that are modelled for an H100, measured: the guides' big models, cut to layers that fit.

A layer's part of the bytes and of the time does not hang on how many there are, so a few layers of GPT-3's width say what its
96 would. The cut model is modelled as well, with the table's entry for this device and on the same batch, and stands beside
what is measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.table import Table

from claims import Flags, Model, Result, measured, measured_models, modelled, modelled_models, numbers_of
from gpu.calibrate_part import table_entry
from gpu.part import Context
from recollect.costs.hardware import Hardware

# Layers by the beginning of a model's name: with gradients 4 bytes a parameter, and what the settings leave of 78 GiB.
_NUM_LAYERS = {
    "GPT-3 175B": 4,
    "GPT 70B": 2,
    "Llama 70B": 4,
    "Mixtral 8x7B": 4,
    "DeepSeek-V3 671B": 2,
    "Llama 7B at 2048": 16,
    "Llama 7B at 32768": 4,
}
# Of DeepSeek-V3's layers the first three are dense: one of these, then one with experts, 64 in place of 256. As many are
# chosen for a token, so the arithmetic and the activations are the same.
_DEEPSEEK = "DeepSeek-V3 671B"
# Scores of 32,768 by 32,768 tokens take 64 GiB a layer.
_TOO_LARGE = ("Llama 7B at 32768, unfused",)


def cut(model: Model) -> Model:
    """Return a model with few layers, and the settings that mean something there."""
    num_layers = next(number for name, number in _NUM_LAYERS.items() if model.name.startswith(name))
    shape: dict[str, Any] = {}
    pattern: dict[str, Any] = {}
    if model.name.startswith(_DEEPSEEK):
        pattern = {"moe_layer_freq": (0, 1), "num_moe_experts": 64, "mtp_num_layers": None}
        shape = {"seq_length": 2048}  # scores of 4,096 tokens and 128 heads do not fit beside the experts
    config = replace(model.config, num_layers=num_layers, **pattern)
    settings = [setting for setting in model.settings if not _is_of_more(setting, num_layers)]
    settings = [f"block {num_layers // 2}" if setting.startswith("block") else setting for setting in settings]
    name = f"{model.name}, {num_layers} layers"
    return replace(model, name=name, config=config, settings=tuple(settings), has_optimizer=False, **shape)


def _is_of_more(setting: str, num_layers: int) -> bool:
    return setting.startswith("uniform") and int(setting.split()[1]) > num_layers


def models(context: Context) -> list[Model]:
    """Return the models, fused attention first."""
    if context.is_dry_run:
        small = Flags(hidden_size=64, seq_length=16)
        return [replace(model, settings=model.settings[:2]) for model in measured_models(small)[:3:2]]
    big = sorted(modelled_models(), key=lambda model: "unfused" in model.name)
    return [cut(model) for model in big if model.name not in _TOO_LARGE]


def table(pairs: list[tuple[Result, Result]], hardware: Hardware) -> Table:
    """Return measured beside modelled."""
    found = Table(title=f"modelled: {hardware.name}", title_justify="left")
    for heading in ("model", "setting", "saved", "modelled", "slowdown", "20 .. 80 %", "modelled"):
        found.add_column(heading, justify="right")
    for here, there in pairs:
        spread = "" if here.spread is None else f"{100 * here.spread[0]:+.1f} .. {100 * here.spread[1]:+.1f}"
        cells = (f"{here.saved_fraction:.1%}", f"{there.saved_fraction:.1%}", f"{here.slowdown:+.1%}", spread)
        found.add_row(here.model, here.setting, *cells, f"{there.slowdown:+.1%}")
    return found


def run(context: Context) -> str:
    """Measure and model each."""
    hardware = table_entry(context.device)
    flags = Flags(
        device=str(context.device),
        dtype="bf16",
        seconds=0.0 if context.is_dry_run else 10.0,
        least_rounds=1 if context.is_dry_run else 3,
        threads=1,
    )
    pairs: list[tuple[Result, Result]] = []

    def one_model(model: Model) -> None:
        there = modelled(model, hardware)
        context.write(numbers_of(there, "modelled"), model=model.name, hardware=hardware.name)
        here = measured(flags, model)
        context.write(numbers_of(here, "measured"), model=model.name, hardware=hardware.name)
        both = list(zip(here, there, strict=True))
        pairs.extend(both)
        context.console.print(table(both, hardware))

    chosen = models(context)
    for model in chosen:
        if context.begins(model.name):
            context.attempt(model.name, lambda model=model: one_model(model))
    context.console.print(table(pairs, hardware))
    if not pairs:
        return "no model ran"
    off_saved = max(abs(here.saved_fraction - there.saved_fraction) for here, there in pairs)
    off_time = max(abs(here.slowdown - there.slowdown) for here, there in pairs)
    return (
        f"{len({here.model for here, _ in pairs})} of {len(chosen)} models; the model is off by at most "
        f"{100 * off_saved:.1f} points of what is saved and {100 * off_time:.1f} points of slowdown"
    )
