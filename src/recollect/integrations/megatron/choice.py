"""The recompute that a checked configuration asks for: one of four types, none of which can be inconsistent.

| Megatron's settings | here |
|---|---|
| recompute_granularity None | `NoRecompute()` |
| full, uniform, n | `UniformFull(n)` |
| full, block, n | `BlockFull(n)` |
| selective, modules | `Selective({module: what happens to its output})` |

The compiler reads these, so that no meaningless combination of settings can reach it. The names of modules, and what Megatron
does with the output of each, are read in Megatron-LM main at d98e8a64 (`TransformerConfig.recompute_modules`,
`offload_modules`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

from recollect.plans.action import Action

ModuleName = Literal[
    "core_attn",
    "mlp",
    "moe",
    "shared_experts",
    "layernorm",
    "moe_act",
    "mla_up_proj",
    "gdn_norm_out",
    "gdp_in_proj",
    "gdp_qkv",
    "mhc",
]
MODULES: Final[tuple[ModuleName, ...]] = get_args(ModuleName)

_ORDINARY = frozenset({"core_attn", "mlp", "moe", "shared_experts"})
MEGATRON_OUTPUT: Final[dict[ModuleName, Action]] = {
    name: Action.KEEP if name in _ORDINARY else Action.RECOMPUTE for name in MODULES
}
"""What Megatron does with what a module returns: "keep" under `CheckpointFunction`, "recompute" under
`CheckpointWithoutOutput`, which it calls output-discarding."""

OffloadName = Literal[
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
    "fused_group_mlp",
    "gdp_qkv",
]
OFFLOAD_MODULES: Final[tuple[OffloadName, ...]] = get_args(OffloadName)
"""In the order in which a layer runs them."""


@dataclass(frozen=True, slots=True)
class NoRecompute:
    """Keep everything."""

    def __str__(self) -> str:
        return "no recompute"


@dataclass(frozen=True, slots=True)
class _Full:
    """Full recompute by one of Megatron's methods."""

    method: ClassVar[str]

    num_layers: int

    def __post_init__(self) -> None:
        # A bool is an int to Python: `True` layers would pass for one.
        if type(self.num_layers) is not int or self.num_layers < 1:
            got = f"got {self.num_layers!r} layers"
            raise ValueError(f"{type(self).__name__}: {got}, expected a whole number, 1 or more")

    def __str__(self) -> str:
        return f"full, {self.method}, {self.num_layers}"


class UniformFull(_Full):
    """Keep the input of every `num_layers`th layer of a model chunk, and nothing else of its layers.

    Raises:
        ValueError: not a whole number, or less than 1.
    """

    method = "uniform"


class BlockFull(_Full):
    """Keep only the inputs of the first `num_layers` layers of each model chunk, and everything of the rest.

    Raises:
        ValueError: not a whole number, or less than 1.
    """

    method = "block"


@dataclass(frozen=True, init=False)
class Selective:
    """Drop what some modules compute; `outputs` says for each whether its output is kept or dropped too.

    It is made from actions or their words.

    Raises:
        ValueError: no module, an unknown one, or another word than "keep" and "recompute".

    Example:
        >>> str(Selective({"layernorm": "recompute", "core_attn": "keep"}))
        'selective, core_attn layernorm'
    """

    outputs: Mapping[ModuleName, Action]

    def __init__(self, outputs: Mapping[ModuleName, Action | str]) -> None:
        in_order = {name: outputs[name] for name in MODULES if name in outputs}
        if unknown := set(outputs) - set(in_order):
            raise ValueError(f"Selective: got module {min(unknown)!r}, expected some of {', '.join(MODULES)}")
        if not in_order:
            raise ValueError("Selective: got no module, expected at least one; without any it is NoRecompute()")
        for name, action in in_order.items():
            if action not in tuple(Action):
                raise ValueError(f"Selective: got {action!r} for the output of {name}, expected 'keep' or 'recompute'")
        actions = {name: Action(action) for name, action in in_order.items()}
        object.__setattr__(self, "outputs", MappingProxyType(actions))

    def __hash__(self) -> int:
        return hash(tuple(self.outputs.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        # A mappingproxy cannot be pickled or deep-copied.
        return Selective, (dict(self.outputs),)

    def __str__(self) -> str:
        return "selective, " + " ".join(self.outputs)


Choice: TypeAlias = NoRecompute | UniformFull | BlockFull | Selective
