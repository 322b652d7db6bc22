"""Parse a command's flags, and name flags in errors, whether tyro, the value's class or the library refuses one."""

import ast
import contextlib
import dataclasses
import difflib
import functools
import io
import operator
import re
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Union, get_args, get_type_hints

import tyro
from docstring_parser import parse_from_object
from tyro.conf import arg
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
    UnsupportedTypeAnnotationError,
)

from recollect.errors import BudgetTooSmallError, RecollectError, settings_text
from recollect.integrations.megatron.arguments import NO_VALUE
from recollect.integrations.megatron.rule import did_you_mean
from recollect.lab.models.config import TransformerConfig
from recollect.lab.parallel.layout import DeviceLayout
from recollect.lab.parallel.pipeline_layout import PipelineLayout
from recollect.lab.train.model_flags import FIELD_OF_FLAG

REGISTRY: Final = ConstructorRegistry()
_NONE: Final = "None"
_KINDS: Final = {"INT": "a whole number", "FLOAT": "a number", "{auto}|INT": "auto or a whole number"}
# Of lines around text, and of lines without: tyro draws them in ASCII where others cannot be printed.
_BOX: Final = "╭╮╰╯─│|+ "
_RULE: Final = re.compile(r"-*")
_QUOTED_AT_START: Final = re.compile(r"(?:\w+: got |\w+ )?'([^']*)'(?=[:,] )")
_FIELD_AT_START: Final = re.compile(r"^(?:\w+\.)?(\w+)(?=: )")
# Not a part of a path or a call, nor an argument of one.
_FIELD: Final = re.compile(r"(?<![\w./'-])([a-z]\w*_\w+)(?![\w=(/]|\.\w)")
_FIELD_AND_VALUE: Final = re.compile(r"(?<![\w./'-])(?<!\w\()([a-z]\w*_\w+)=(\([^()]*\)|(['\"]?)[\w.%]+\3)")


def parsed(kind: Any, name: str, args: Sequence[str], **options: Any) -> Any:
    """Return a command's flags as its dataclass; the name "" is the top level's, whose only flag is `--help`."""
    said = io.StringIO()
    prog = f"recollect {name}".strip()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, prog=prog, args=args, registry=REGISTRY, **options)
    except SystemExit as end:
        if not end.code:
            raise
        reason = _reason(said.getvalue(), args, flags_of(kind), prog)
        raise RecollectError(f"{reason} See {prog} --help.") from None


@functools.cache
def flags_of(kind: Any) -> dict[str, str]:
    """Return the flags of all fields of a command's dataclass and of nested ones, and of all aliases.

    Example:
        >>> from recollect.cli.commands import MakePlan
        >>> [flags_of(MakePlan)[name] for name in ("num_layers", "micro_batch_size", "num_moe_experts")]
        ['--num-layers', '--micro-batch-size', '--num-experts']
    """
    found: dict[str, str] = {}
    hints = get_type_hints(kind, include_extras=True)
    for field in kind.__dataclass_fields__.values():  # `dataclasses.fields` leaves those out that only __init__ takes
        made = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        if dataclasses.is_dataclass(made):
            nested: Any = type(made)
            found |= flags_of(nested)
            continue
        aliases = [getattr(note, "aliases", None) or () for note in getattr(hints[field.name], "__metadata__", ())]
        for flag in (f"--{field.name.replace('_', '-')}", *(alias for its in aliases for alias in its)):
            found[flag[2:].replace("-", "_")] = flag
    return {field: found[flag] for flag, field in FIELD_OF_FLAG.items() if flag in found} | found


def in_flags(error: Exception, flags: Mapping[str, str], args: Sequence[str]) -> str:
    """Return the text of an error or a warning with flags in place of the settings that they set."""
    text = str(error)
    settings: Mapping[str, object] = getattr(error, "settings", {})
    # "2 x context_parallel_size" is one of them, too.
    named = {name: name.rpartition(" ")[2] for name in settings}
    if named and all(field in flags or field.startswith("--") for field in named.values()):
        known = [name.removesuffix(field) + flags.get(field, field) for name, field in named.items()]
        shown = ", ".join(map(_given, known, settings.values()))
        text = text.replace(f"got {settings_text(settings)}", shown, 1)
    if (quoted := _QUOTED_AT_START.match(text)) and (flag := _flag_before(quoted[1], args)):
        text = f"{flag}: got {text[quoted.start(1) - 1 :]}"
    if isinstance(error, BudgetTooSmallError) and "memory_budget" in flags:
        text = f"{flags['memory_budget']}: {text}"
    # A path may end like a flag, as in plan.json.
    start = text.partition(": ")[0]
    if not text.startswith("--") and (flag := _flag_before(start, args)):
        text = f"{flag} {text}"
    elif start not in args:
        text = _FIELD_AT_START.sub(lambda field: flags.get(field[1], field[0]), text)
    text = _FIELD_AND_VALUE.sub(lambda found: _as_given(found, flags), text)
    return _FIELD.sub(lambda field: flags.get(field[1], field[0]), text)


def _as_given(setting: re.Match[str], flags: Mapping[str, str]) -> str:
    """Return a setting such as `loss_chunks=1` as its flag; unchanged if it has none."""
    value: object = setting[2]
    with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(setting[2])
    return _given(flags[setting[1]], value) if setting[1] in flags else setting[0]


def _given(flag: str, value: object) -> str:
    if value is True or str(value) == NO_VALUE:
        return flag
    if value is None or value is False:
        return f"no {flag}"
    return f"{flag} {' '.join(map(str, value)) if isinstance(value, (tuple, list)) else value}".rstrip()


def _flag_before(value: str, args: Sequence[str]) -> str:
    """Return the flag that a value was given to, or several that it may be of; "" if there is none."""
    return " or ".join(dict.fromkeys(flag for flag, given in _pairs(args) if given == value))


def _pairs(args: Sequence[str]) -> list[tuple[str, str]]:
    """Return flags and what is given to them, by `--flag value` or `--flag=value`."""
    inline = ((name, value) for name, is_inline, value in (word.partition("=") for word in args) if is_inline)
    found = [*zip(args, args[1:], strict=False), *inline]
    return [(flag.replace("_", "-"), value) for flag, value in found if flag.startswith("--")]


def _reason(said: str, args: Sequence[str], flags: Mapping[str, str], prog: str) -> str:
    """Condense tyro's boxed error to a sentence or two; return unknown errors unchanged."""
    lines = [text for line in said.splitlines()[1:] if not _RULE.fullmatch(text := line.strip(_BOX))]
    takes = next((after for line, after in zip(lines, lines[1:], strict=False) if line == "Argument helptext:"), "")
    text = " ".join(lines).partition(" For full helptext")[0]
    # Also beside a flag that is missing, which may be the one that was meant.
    if found := re.search(r"Unrecognized options: (\S+?)(?:,|$| )", text):
        if not found[1].startswith("-"):
            return f"{found[1]}: belongs to no flag."
        known = [flag.strip("-") for flag in (*flags.values(), "--help")]  # dashes make all of them look alike
        close = difflib.get_close_matches(found[1].strip("-"), known, n=2)
        meant = f" Did you mean {' or '.join(repr(f'--{flag}') for flag in close)}?" if close else ""
        return f"{found[1]}: no such flag of {prog}.{meant}"
    if found := re.match(r"Missing from .*?: (--\S+) \S+ (.*) \(required\)", text):
        return f"{found[1]}: missing. {found[2]}"
    if found := re.match(r"Missing value for argument '(\S+)'", text):
        return f"{_as_written(found[1], args)}: got no value, expected one."
    if found := re.match(r"invalid choice '(.*)' for argument '(\S+)'\. Expected one of \((.*)\)", text):
        choices = [choice for choice in re.findall(r"'(.*?)'", found[3]) if choice != _NONE]
        expected = f"expected one of {', '.join(choices)}. {did_you_mean(found[1], choices)}".rstrip()
        return f"{_as_written(found[2], args)}: got {found[1]!r}, {expected}"
    if found := re.match(r"Error parsing (--\S+): ", text):
        flag = _as_written(found[1], args)
        value = next((value for given, value in _pairs(args) if given == flag), "")
        kind = takes.rpartition(", ")[2].partition(" ")[2]
        return f"{flag}: got {value!r}, expected {_KINDS.get(kind, kind)}."
    reason = re.sub(r"^Error parsing \S+: ", "", text)
    return in_flags(ValueError(reason), flags, args)


def _as_written(names: str, args: Sequence[str]) -> str:
    """Return the name that was given, out of a flag's names separated by slashes."""
    given = {word.partition("=")[0].replace("_", "-") for word in args}
    return next((name for name in names.split("/") if name in given), names.rpartition("/")[2])


@REGISTRY.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | UnsupportedTypeAnnotationError | None:
    """Return how to read and show a type or None: `--num-layers INT`, not `{None}|INT`; "None" is still understood."""
    kinds = get_args(info.type)
    if info.type_origin not in (Union, types.UnionType) or types.NoneType not in kinds:
        return None
    rest = functools.reduce(operator.or_, (kind for kind in kinds if kind is not types.NoneType))
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(rest, info.markers))
    if isinstance(spec, UnsupportedTypeAnnotationError):
        return spec
    return PrimitiveConstructorSpec(
        nargs=spec.nargs,
        metavar=spec.metavar,
        instance_from_str=lambda words: None if words == [_NONE] else spec.instance_from_str(words),
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: [_NONE] if value is None else spec.str_from_instance(value),
        choices=None if spec.choices is None else (*spec.choices, _NONE),
    )


_under_way: list[Any] = []


@REGISTRY.struct_rule
def _with_plain_help(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Return the fields of a dataclass with help as one paragraph each, without "(default: None)", which says nothing."""
    if info.type in _under_way:
        return None
    _under_way.append(info.type)
    try:
        spec = ConstructorRegistry.get_struct_spec(info)
    finally:
        _under_way.pop()
    if not isinstance(spec, StructConstructorSpec):
        return None
    return dataclasses.replace(spec, fields=tuple(map(_plain, spec.fields)))


def _plain(field: StructFieldSpec) -> StructFieldSpec:
    def text() -> str | None:
        said = field.helptext() if callable(field.helptext) else field.helptext
        said = said or _texts().get(FIELD_OF_FLAG.get(field.name, field.name))
        return " ".join(said.split()) if said else said

    kind: Any = Annotated[field.type, arg(help_behavior_hint="")] if field.default in (None, ()) else field.type
    # Where tyro asks for it in help and errors alone: to find it in the source of the class takes longer than to parse.
    return dataclasses.replace(field, type=kind, helptext=text if callable(field.helptext) else text())


@functools.cache
def _texts() -> dict[str, str]:
    """Return the descriptions of models' and layouts' fields up to the first semicolon: the help of their flags."""
    kinds = (TransformerConfig, PipelineLayout, DeviceLayout)
    said = {of.arg_name: of.description or "" for kind in kinds for of in parse_from_object(kind).params}
    return {name: f"{text.rstrip('.').partition(';')[0]}." for name, text in said.items()}
