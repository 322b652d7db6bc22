"""`Settings`: a configuration's settings for recompute and memory, scope by scope.

`SettingsInText`: the settings mentioned in a log, a script or a command line.
"""

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from recollect.integrations.megatron.pipeline import num_virtual_stages
from recollect.integrations.megatron.settings import RecomputeSettings, TrainingSetting

_MEGATRON_NAMES = frozenset(f.name for kind in (RecomputeSettings, TrainingSetting) for f in dataclasses.fields(kind))
# Names of Megatron's command line for the same settings, and older names.
ALIASES = {
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
}
_OTHER_NAMES = frozenset(
    (
        *("seq_length", "micro_batch_size", "padded_vocab_size", "vocab_size", "hidden_size", "ffn_hidden_size"),
        *("use_flash_attn", "attention_backend", "use_distributed_optimizer", "cross_entropy_loss_fusion"),
        *("num_layers_per_virtual_pipeline_stage", "context_parallel_size", "recompute_activations"),
        *("enable_cuda_graph", "external_cuda_graph"),
        *("gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing", "use_reentrant"),
        *("activation_checkpointing_kwargs", "use_cache", "fsdp", "fsdp_config", "fsdp_activation_checkpointing"),
        *("fsdp_transformer_layer_cls_to_wrap", "fsdp_sharding_strategy", "fsdp_version", "distributed_type"),
        *("ddp_find_unused_parameters", "find_unused_parameters", "zero_stage", "zero_optimization"),
        *("lora_r", "lora_rank", "lora_target_modules", "lora_target", "use_peft", "adapter", "finetuning_type"),
        *("peft_type", "per_device_train_batch_size", "max_length", "max_seq_length", "cutoff_len", "sequence_len"),
        *("activation_memory_budget", "disable_gradient_checkpointing", "num_local_experts", "num_experts_per_tok"),
        *("activation_checkpoint", "selective_ac_option"),
        *("n_routed_experts", "num_experts", "n_experts", "moe_num_experts", "train_micro_batch_size_per_gpu"),
    )
)
KNOWN = _MEGATRON_NAMES | _OTHER_NAMES | frozenset(ALIASES)
# In code, most use_cache are an argument of `generate`.
_KNOWN_IN_CODE = KNOWN - {"use_cache"}
# Sections of Bridge's configuration and of Megatron-LM's YAML, whose names belong together.
_SECTIONS = frozenset(("model", "language_model", "model_parallel", "train", "training", "dataset", "ddp"))
# Settings of one section, which mean nothing outside of it.
_PARTS = frozenset(("fsdp_config", "activation_checkpointing", "zero_optimization", "deepspeed_config"))
_MOST_LEVELS = 12
_MOST_SCOPES = 20  # a log that names more settings than so many runs can have is prose
# Around words in shells and in sentences.
_EDGES = "\"'`.,;()"
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_FLAG = re.compile(r"^--?([A-Za-z][\w.-]*)(?:=(.*))?$", re.DOTALL)
_FLAG_IN_LINE = re.compile(r"--([A-Za-z][\w-]*)")
_WORD = re.compile(r"\"[^\"]*\"|'[^']*'|\S+")
_PLAIN_WORD = re.compile(r"[\w.,\[\]'+-]+")
# Of a shell: a pipe or a redirection; and the end of a command, a list or a quotation.
_OPERATOR = re.compile(r"\d?[|&<>]")
_ENDS = re.compile(r"^\d?[|&<>]|[;)`][.,]?$")
_ARGUMENT = re.compile(r"(?:^|\s)(\w+) \.{3,} ?(.*)$")  # of Megatron's list of arguments
_ASSIGNED = re.compile(
    r"(?<![\w-])([a-z_0-9]+)\s*=\s*(\"[^\"]*\"|'[^']*'|\[[^\]]*\]|\([^)]*\)|\{[^}]*\}|[\w+-]+(?:\.\d+)?)"  # of Python
)
_COMMENT = re.compile(r"(?:^|\s)#.*$")
# Without quotes, other names have numbers and truth values only: `=1Mi` in a sentence is none.
_NAMES_WITH_WORDS = frozenset(
    (
        *("recompute_granularity", "recompute_method", "recompute_modules", "offload_modules", "transformer_impl"),
        *("attention_backend", "fp8", "fp8_format", "fp8_recipe", "cuda_graph_impl", "cuda_graph_scope", "fsdp"),
        *("cuda_graph_modules", "moe_token_dispatcher_type", "finetuning_type", "adapter", "distributed_type"),
    )
)


@dataclass(frozen=True)
class Settings:
    """Values by name, in one scope."""

    place: str
    """Where they stand, such as "config.yaml" or "roll.yaml: actor_train.strategy_config"."""
    values: Mapping[str, Any]
    """By Megatron's, transformers', Accelerate's or DeepSpeed's names, with underscores."""
    lines: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The line of each name that has one."""
    variables: frozenset[str] = frozenset()
    """Names with values that a shell fills in."""

    def get(self, *names: str) -> Any:
        """Return the value of the first of these names that has one, else None."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def shown(self, *names: str) -> str:
        """Return the names that have a value, with their values, after the place: evidence for a finding."""
        given = [name for name in names if self.values.get(name) is not None]
        lines = {self.lines[name] for name in given if name in self.lines}
        place = f"{self.place}:{min(lines)}" if lines else self.place
        return f"{place}: {', '.join(f'{name}: {_shown(self.values[name])}' for name in given)}"

    def section(self, name: str) -> Mapping[str, Any]:
        found = self.values.get(name)
        return found if isinstance(found, Mapping) else {}

    def number(self, *names: str) -> int | None:
        """Return the value of the first of these names that is a whole number, else None."""
        value = self.get(*names)
        return value if type(value) is int else None


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def settings_in_data(data: Mapping[Any, Any], place: str) -> list[Settings]:
    """Return the scopes of a configuration: each mapping with known names, with the settings outside it and next to it."""
    return list(_scopes(data, place, {}, 0))


def _scopes(data: Mapping[Any, Any], place: str, outer: Mapping[str, Any], level: int) -> Iterator[Settings]:
    sections = [value for name, value in data.items() if name in _SECTIONS and isinstance(value, Mapping)]
    inner = {str(name): value for section in sections for name, value in section.items()}
    values = {**outer, **inner, **{str(name).replace("-", "_"): value for name, value in data.items()}}
    if level == 0 or KNOWN & {str(name) for name in (*data, *inner)}:
        yield Settings(place, renamed(values))
    known_outside = {name: value for name, value in values.items() if not isinstance(value, Mapping)}
    for name, value in data.items():
        if isinstance(value, Mapping) and name not in _SECTIONS | _PARTS and level < _MOST_LEVELS:
            separator = "." if level else ": "
            yield from _scopes(value, f"{place}{separator}{name}", known_outside, level + 1)


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {ALIASES.get(name, name): value for name, value in values.items()}
    if found.get("num_moe_experts") is None and type(found.get("num_experts")) is int:  # Megatron's flag
        found["num_moe_experts"] = found["num_experts"]
    sizes: list[Any] = [found.get("num_layers"), found.get("pipeline_model_parallel_size", 1)]
    sizes.append(found.get("num_layers_per_virtual_pipeline_stage"))
    if all(type(size) is int and size > 0 for size in sizes):
        ends = (found.get(f"account_for_{end}_in_pipeline_split") is True for end in ("embedding", "loss"))
        found["virtual_pipeline_model_parallel_size"] = num_virtual_stages(sizes[0] + sum(ends), *sizes[1:])
    if found.get("recompute_activations") is True and found.get("recompute_granularity") is None:
        found["recompute_granularity"] = "selective"
    if found.get("cuda_graph_impl") is None:
        for name, impl in (("enable_cuda_graph", "local"), ("external_cuda_graph", "transformer_engine")):
            if found.get(name) is True:
                found["cuda_graph_impl"] = impl
    # Only Megatron's command line has no flag for the switch itself.
    if found.get("cpu_offloading") is None and found.get("cpu_offloading_num_layers") not in (None, 0):
        found["cpu_offloading"] = True
    return found


class SettingsInText:
    """Collects settings from the lines of a text: flags, Megatron's list of arguments, and assignments in Python.

    Settings that appear together are one scope. A command that gives a different value than before begins a new one: runs of
    a sweep are not mixed.

    Example:
        >>> seen = SettingsInText()
        >>> seen.look("python pretrain_gpt.py --recompute-granularity full --num-layers 32", 1)
        >>> seen.look("python pretrain_gpt.py --recompute-granularity selective", 2)
        >>> [scope.values for scope in seen.settings("run.sh")]
        [{'recompute_granularity': 'full', 'num_layers': 32}, {'recompute_granularity': 'selective'}]
    """

    def __init__(self) -> None:
        self._scopes: list[dict[str, tuple[Any, int]]] = [{}]
        # Of a command that may continue on the next line, with the numbers of their lines.
        self._words: list[tuple[str, int]] = []
        self._variables: set[str] = set()

    def look(self, line: str, number: int) -> None:
        if self._words or "--" in line:
            self._look_at_command(line, number)
        elif " ..." in line:
            if (found := _ARGUMENT.search(line)) and found[1] in KNOWN:
                self._end({found[1]: (_value(found[2].strip()), number)})
        elif "=" in line:
            given = _ASSIGNED.findall(_COMMENT.sub("", line))
            known = {n: (_value(text), number) for n, text in given if n in _KNOWN_IN_CODE and _is_value(n, text)}
            self._end(known)

    def _look_at_command(self, line: str, number: int) -> None:
        """Take the words of a command line; a line that ends in a backslash continues on the next."""
        if not self._words and not any(_name(found[1]) in KNOWN for found in _FLAG_IN_LINE.finditer(line)):
            return
        text = _COMMENT.sub("", line).rstrip()
        self._words += [(word, number) for word in _WORD.findall(text.rstrip("\\"))]
        if text and not text.endswith("\\"):  # otherwise it continues; there may be a comment between two lines
            self._end_command()

    def _end_command(self) -> None:
        """Take the flags of a finished command; of those with shell variables, only the names."""
        flags: list[tuple[str, int, list[str]]] = []
        for word, number in self._words:
            bare = word.strip(_EDGES)
            if (flag := _FLAG.match(bare)) is not None:
                flags.append((_name(flag[1]), number, [] if flag[2] is None else [flag[2].strip(_EDGES)]))
            elif flags and bare and not _OPERATOR.match(word):
                flags[-1][2].append(bare)
            if _ENDS.search(word):
                flags.append(("", number, []))
        self._words = []
        command: dict[str, tuple[Any, int]] = {}
        for name, number, words in flags:
            if name in KNOWN and any("$" in word for word in words):
                self._variables.add(name)
            elif name in KNOWN:
                command.setdefault(name, (_flag_value(name, words), number))
        self._end(command)

    def _end(self, command: dict[str, tuple[Any, int]]) -> None:
        """Add settings given together to the scope, or to a new one if they contradict it."""
        scope = self._scopes[-1]
        is_other = any(name in scope and scope[name][0] != value for name, (value, _) in command.items())
        if is_other and len(self._scopes) < _MOST_SCOPES:
            self._scopes.append(dict(command))
        elif not is_other:
            self._scopes[-1] = {**command, **scope}

    def settings(self, place: str) -> list[Settings]:
        """Return the collected settings, one scope for each distinguishable run."""
        self._end_command()
        return [
            Settings(
                place,
                renamed({name: value for name, (value, _) in scope.items()}),
                {ALIASES.get(name, name): number for name, (_, number) in scope.items()},
                frozenset(renamed(dict.fromkeys(self._variables, 1))),
            )
            for scope in self._scopes
            if scope
        ]


def _name(flag: str) -> str:
    return flag.replace("-", "_")


def _is_value(name: str, text: str) -> bool:
    return name in _NAMES_WITH_WORDS or not isinstance(_value(text), str) or text[:1] in ("'", '"')


def _flag_value(name: str, words: list[str]) -> Any:
    if not name.endswith(("_modules", "_scope")):
        return _value(words[0]) if words else True
    parts: list[str] = []
    for word in words:
        if not _PLAIN_WORD.fullmatch(word):  # text after the command: a pipe, or prose
            break
        parts += (part for part in word.strip("[]").replace("'", "").split(",") if part)
    return tuple(parts)


def _value(text: str) -> Any:
    """Return a literal of Python, or of YAML where they differ, or the text itself."""
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
