"""Read how a training is started, as one command line: a shell script, a file of flags, or YAML of Megatron-Bridge."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import yaml

from recollect.errors import ConfigError, RecollectError
from recollect.fields import parse_yaml
from recollect.integrations.megatron.arguments import foreign_flag
from recollect.integrations.megatron.pipeline import layout_stages
from recollect.integrations.megatron.settings import RecomputeSettings, TrainingSetting
from recollect.warning import warn_user

MEGATRONS_DEFAULTS: Final = ("--fake", "--pipeline-engine=megatron", "--make-vocab-size-divisible-by=128")
"""The words before the flags of Megatron's command lines."""

# A restricted bash without PATH starts no program and writes no file: it only says what would be started.
_PRELUDE: Final = """exit() { :; }; set() { :; }; cd() { :; }; source() { :; }; kill() { :; }; exec() { "$@"; }
command_not_found_handle() { :; }
"""
# Commands in its trace, except what only mentions one.
_TRACED: Final = re.compile(r"^\++ (?!\w+\+?=|(?:echo|printf|eval|exec) )(.* --num-layers[ =].*)$", re.MULTILINE)
_IN_A_WORD: Final = re.compile(r"\s--num-layers[\s=]")
# Of Bridge's `ConfigContainer` and Megatron-LM's YAML, with names of Megatron's flags; the first that has a name decides.
_SECTIONS: Final = (
    *("mixed_precision", "model", "language_model", "model_parallel", "dataset", "train", "training", "ddp"),
    *("optimizer", "tokenizer"),
)
_FLAG_OF: Final = {
    "sequence_length": "--seq-length",
    "core_attention": "--attention-backend",
    "padded_vocab_size": "--vocab-size",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
}
# Without flags, for those who compare the settings of a file.
_RECOMPUTE: Final = {field.name for field in fields(RecomputeSettings)}
_SETTINGS: Final = _RECOMPUTE | {field.name for field in fields(TrainingSetting)}
_PRECISIONS: Final = ("bf16_mixed", "fp16_mixed")
# Activation and whether it is gated.
_ACTIVATIONS: Final = {
    ("gelu", False): (),
    ("silu", True): ("--swiglu",),
    ("fast_gelu", False): ("--openai-gelu",),
    ("squared_relu", False): ("--squared-relu",),
    ("quick_gelu", True): ("--quick-geglu",),
}


def launch_words(
    path: Path, flags: Mapping[str, str], *, given_as: str = "--megatron", has_size: bool = False
) -> list[str]:
    """Return the command line that a file describes, with `--world-size` if it says how many processes start.

    The file is a shell script with one command of `pretrain_gpt.py`, has only its flags, or (.yaml, .yml) what Bridge's
    `ConfigContainer.to_yaml` writes, as any file of --yaml, for which `flags` has the flag of each setting. `given_as`: the
    flag that names the file, for errors. `has_size`: whether the number of processes is given besides.
    """
    where = f"{given_as} {path}"
    try:
        text = path.read_text(encoding="utf-8")
        if given_as == "--megatron" and path.suffix not in (".yaml", ".yml"):
            return command_words(_script_words(text, where), has_size=has_size)
        data = parse_yaml(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as problem:
        mark = getattr(problem, "problem_mark", None)
        at = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        reason = getattr(problem, "strerror", None) or getattr(problem, "problem", None) or str(problem)
        raise RecollectError(f"{where}: cannot be read ({at}{reason}).") from None
    if not isinstance(data, Mapping):
        got = "nothing" if data is None else f"a {type(data).__name__}"
        raise RecollectError(f"{where}: got {got}, expected a mapping of Megatron's names.")
    return list(_yaml_words(data, flags, where))


def command_words(words: Sequence[str], *, has_size: bool = False) -> list[str]:
    """Return the flags of the program that a command line starts, and `--world-size` by its launcher or `WORLD_SIZE`."""
    # A launcher of clusters may get the command as one word: srun sh -c "torchrun ...".
    if whole := next((word for word in words if _IN_A_WORD.search(word)), ""):
        words = shlex.split(whole)
    start = next((number for number, word in enumerate(words) if word.endswith(".py")), -1)
    if has_size:
        return [*words[start + 1 :]]
    given = {"--nproc-per-node": "1", "--nnodes": "1"}
    for word, value in zip(words[: max(start, 0)], words[1:], strict=False):
        name, _, inline = word.partition("=")
        if (name := name.replace("_", "-")) in given:
            given[name] = inline or value
    if not all(value.isdecimal() for value in given.values()):
        raise ConfigError(settings=given, reason="these are not numbers", advice="Write numbers, or pass --world-size.")
    size = int(given["--nproc-per-node"]) * int(given["--nnodes"])
    found = str(size) if size > 1 else os.environ.get("WORLD_SIZE")
    return [*([] if found is None else [f"--world-size={found}"]), *words[start + 1 :]]


def _script_words(text: str, where: str) -> list[str]:
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    if first.lstrip().startswith("--"):
        return shlex.split(text.replace("\\\n", " "), comments=True)
    try:
        run = subprocess.run(
            [shutil.which("bash") or "bash", "--restricted", "--noprofile", "--norc", "-x", "-c", _PRELUDE + text],
            env={**os.environ, "PATH": "", "BASH_ENV": "", "PS4": "+ "},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise RecollectError(f"{where}: cannot be read ({problem}). Pass its command after -- instead.") from None
    found = list(dict.fromkeys(_TRACED.findall(run.stderr)))
    if len(found) != 1:
        raise RecollectError(
            f"{where}: starts {len(found)} different commands with --num-layers, expected one. Pass it after -- instead: "
            "recollect plan --memory-budget 80GiB -- torchrun ... pretrain_gpt.py ..."
        )
    return shlex.split(found[0])


def _yaml_words(data: Mapping[str, Any], flags: Mapping[str, str], where: str) -> Iterator[str]:
    sections = [data[name] for name in _SECTIONS if isinstance(data.get(name), Mapping)] + [data]
    values = {name: value for section in reversed(sections) for name, value in section.items() if value is not None}
    others = {str(name): value for name, value in data.items() if name not in _SECTIONS}
    deeper = [place for name, value in others.items() for place in _recompute_in(value, name)]
    # As in ROLL's files: the model would seem to recompute nothing.
    if deeper and not _RECOMPUTE & values.keys():
        raise RecollectError(
            f"{where}: got settings for recompute under {', '.join(deeper)}, expected them at the top level, or under "
            f"{', '.join(_SECTIONS)}. Copy what is there, and the model's sizes, into a file like that."
        )
    precision = values.pop("mixed_precision", None)
    if isinstance(precision, str) and precision not in _PRECISIONS:
        raise ConfigError(
            settings={"mixed_precision": precision},
            reason=f"the name is none of {', '.join(_PRECISIONS)}",
            advice="Write its settings, such as fp8 and fp8_recipe, in place of the name.",
        )
    if any([values.pop("bf16", False), values.pop("fp16", False), isinstance(precision, str)]):
        yield "--bf16"
    if values.pop("add_bias_linear", True) is False:
        yield "--disable-bias-linear"
    if values.pop("share_embeddings_and_output_weights", True) is False:
        yield "--untie-embeddings-and-output-weights"
    if values.pop("should_pad_vocab", True) is False:
        yield "--make-vocab-size-divisible-by=1"
    yield from _activation(values.pop("activation_func", "gelu"), values.pop("gated_linear_unit", False))
    if (layout := values.pop("pipeline_model_parallel_layout", None)) is not None:
        if isinstance(layout, Mapping):
            raise ConfigError(
                settings={"pipeline_model_parallel_layout": layout["_target_"]},
                reason="the stages are lost: it was written after ConfigContainer.validate",
                advice="Write it before, or as a string: 'Et*4|(t*4|)*14t*4L'.",
            )
        values.pop("virtual_pipeline_model_parallel_size", None)
        yield f"--pipeline-model-parallel-layout={'|'.join(layout_stages(layout if isinstance(layout, list) else str(layout)))}"
    unread = []
    for name, value in values.items():
        flag = _FLAG_OF.get(name) or flags.get(name) or f"--{name.replace('_', '-')}"
        is_known = flag in flags.values() or foreign_flag(flag) is not None
        if isinstance(value, Mapping):  # an object: a function, a dtype, or one of Megatron's enumerations
            value = value.get("_name_", "")
        if value is False or value in ("", []) or name.startswith("_"):
            continue
        if not is_known:
            unread += [] if name in _SETTINGS else [name]
        elif isinstance(value, list) and name != "moe_layer_freq":
            yield from (flag, *map(str, value))
        else:
            yield flag if value is True else f"{flag}={str(value).replace(' ', '')}"
    if unread:
        warn_user(f"{where}: not read, as these are not flags of Megatron: {', '.join(unread)}.")


def _recompute_in(data: object, place: str) -> Iterator[str]:
    """Yield the places inside a value that hold settings for recompute which are not off."""
    if isinstance(data, Mapping):
        if any(data.get(name) for name in _RECOMPUTE):
            yield place
        for name, value in data.items():
            yield from _recompute_in(value, f"{place}.{name}")


def _activation(function: object, is_gated: bool) -> Sequence[str]:
    name = str(function.get("_target_") if isinstance(function, Mapping) else function).rpartition(".")[2]
    if (name, is_gated) not in _ACTIVATIONS:
        raise ConfigError(
            settings={"activation_func": name, "gated_linear_unit": is_gated},
            reason="no flag of Megatron sets this",
            advice="Use a gated silu, or gelu.",
        )
    return _ACTIVATIONS[name, is_gated]
