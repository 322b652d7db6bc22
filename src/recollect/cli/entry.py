"""Entry point: parse the command, show its help, run it, and report errors in one line."""

import dataclasses
import difflib
import errno
import functools
import importlib
import io
import itertools
import operator
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from recollect import __version__
from recollect.cli import commands
from recollect.cli.parsing import flags_of, in_flags, parsed
from recollect.errors import ConfigError, RecollectError
from recollect.integrations.megatron.arguments import Arguments, describes_model, read_arguments
from recollect.integrations.megatron.launch import MEGATRONS_DEFAULTS, command_words, launch_words
from recollect.lab.train.config import ProcessFlags, demo_config, pretrain_gpt_config
from recollect.lab.train.launched import is_shown_here, shared_warnings
from recollect.printing import print_line
from recollect.warning import warn_user

TRAIN_HELP = """\
Train a language model within a memory budget.

examples:
  recollect train --demo
  recollect train --data notes/ --memory-budget 60% --run-dir runs/notes
  recollect train --data notes/ --memory-budget 50% --run-dir runs/notes \\
      --resume --steps 400
  recollect train --num-layers 12 --hidden-size 768 --num-attention-heads 12 \\
      --recompute-granularity full --recompute-method uniform \\
      --recompute-num-layers 1     (Megatron's flags: docs/megatron_flags.md)

the ten flags that matter most:
  --demo                train the demo, about three minutes on two CPU cores
  --data PATH ...       text files, JSONL files or folders of them
  --size NAME           the model, such as tiny, demo, 160m or 1b
  --seq-length N        tokens per sequence
  --batch-size N        sequences per micro-batch
  --steps N             optimizer steps
  --learning-rate X     its highest value
  --memory-budget B     bound on the peak of the step, such as 16GiB or 60%
  --run-dir FOLDER      for checkpoints, plan and metrics
  --resume              go on from the newest checkpoint there

All flags, in groups:
"""
PLAN_HELP = """\
Record a training step, choose what to keep and recompute, and write the plan.

examples:
  recollect plan --size 8b --fake --hardware H100 --dtype bf16 \\
      --seq-length 8192 --memory-budget 80GiB
  recollect plan --hf-config config.json --fake --memory-budget 24GiB

the six flags that matter most:
  --memory-budget B     bound on the peak of the step, such as 16GiB or 60%
  --hf-config PATH      the model, by its config.json of Hugging Face
  --size NAME           or one of recollect's own, such as demo, 1b, 8b or 70b
  --seq-length N        tokens per sequence
  --batch-size N        sequences per micro-batch
  --fake                record without the model's memory, for any --hardware

All flags, in groups:
"""
_COMMANDS: dict[str, Any] = {
    "train": commands.Train,
    "plan": commands.MakePlan,
    "frontier": commands.DrawFrontier,
    "timeline": commands.ShowTimeline,
    "coverage": commands.ShowCoverage,
    "calibrate": commands.Calibrate,
    "megatron": commands.RunMegatron,
    "tokenize": commands.Tokenize,
    "bench": commands.Bench,
    "explain": commands.Explain,
    "doctor": commands.Doctor,
    "env": commands.Env,
}
# Any: a type checker cannot see that a union of annotated types is a type.
_EVERY_COMMAND: Any = functools.reduce(
    operator.or_, (Annotated[kind, tyro.conf.subcommand(name)] for name, kind in _COMMANDS.items())
)
_DESCRIPTION = (
    "Fit PyTorch training into a memory budget.\n"
    "`recollect COMMAND --help` shows a command's flags, `recollect --version` the version."
)
_EXIT_ERROR = 2  # as for flags that do not parse
_EXIT_INTERRUPTED = 130  # what a shell reports after Ctrl-C


def main(args: Sequence[str] | None = None) -> int:
    """Run a command; by default with the flags of the process.

    Return the exit status: 0, 1 if `bench` found a regression or `doctor` nothing, 2 after an error (described in one line on
    stderr), 130 after Ctrl-C. With `--debug` errors are raised.
    """
    words = sys.argv[1:] if args is None else list(args)
    if words[:1] == ["--version"]:
        print(f"recollect {__version__}")
        return 0
    if os.environ.get("COLUMNS") == "0":  # as in some containers: unknown, and not none, for which nothing is printed
        del os.environ["COLUMNS"]
    if args is None and isinstance(sys.stdout, io.TextIOWrapper):
        # Frames and bullets should not end a command whose output goes to an encoding that lacks them.
        sys.stdout.reconfigure(errors="replace")
    errors = Console(file=sys.stderr)  # the current one, whatever replaces it while flags are parsed
    # A settings file contains setting names, not flags.
    is_of_flags = words[:1] and words[0] in _COMMANDS and "--yaml" not in words

    def text_of(problem: Exception) -> str:
        return in_flags(problem, flags_of(_COMMANDS[words[0]]), words) if is_of_flags else str(problem)

    if args is None and "--help" in words and hasattr(signal, "SIGPIPE"):
        # `recollect train --help | head` should end quietly when head exits.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _show_warning(errors, text_of(message))
            with shared_warnings():
                command = _parse(words)
            if not isinstance(command, commands.RunMegatron):
                return _run(command)
        return _run(command)  # the script shows its own warnings
    except RecollectError as error:
        if "--debug" in words:
            raise
        print_line(errors, f"Error: {text_of(error)}", style="red")
        return _EXIT_ERROR
    except KeyboardInterrupt:
        errors.print("Interrupted.", style="red")
        return _EXIT_INTERRUPTED


def _show_warning(console: Console, text: str) -> None:
    if is_shown_here(text):
        print_line(console, f"Warning: {text}", style="yellow")


def _parse(args: list[str]) -> Any:
    """Return the command with its flags, parsed on its own: for a union, tyro's errors name its internals."""
    name = args[0] if args else ""
    if name and name not in (*_COMMANDS, "-h", "--help"):
        close = difflib.get_close_matches(name, (*_COMMANDS, "--help", "--version"), n=1)
        meant = f" Did you mean recollect {close[0]}?" if close else ""
        raise RecollectError(f"recollect {name}: no such command, expected one of {', '.join(_COMMANDS)}.{meant}")
    if name not in _COMMANDS:
        command = parsed(_EVERY_COMMAND, "", args or ["--help"], description=_DESCRIPTION)  # prints help
    elif name == "train":
        command = parse_train(args[1:])
    elif name == "megatron":
        command = parse_megatron(args[1:])
    else:
        description = {"description": PLAN_HELP} if name == "plan" else {}
        words = _planned_words(_COMMANDS[name], args[1:]) if name in ("plan", "explain") else args[1:]
        command = parsed(_COMMANDS[name], name, words, **description)
    return command


def parse_train(args: list[str]) -> commands.Train:
    default = commands.Train()
    if "--demo" in args:
        default = commands.Train(config=demo_config())
    elif describes_model(args):
        default = commands.Train(config=pretrain_gpt_config())
    words = _without_foreign(_read(args, own=set(flags_of(commands.Train).values())))
    command: commands.Train = parsed(commands.Train, "train", words, description=TRAIN_HELP, default=default)
    return command


def _planned_words(kind: Any, args: list[str]) -> list[str]:
    """Return a command's own flags out of Megatron's: those given, after those of a file or behind `--`."""
    known = flags_of(kind)
    own = set(known.values())
    start = args.index("--") if "--" in args else len(args)
    given, behind = args[:start], args[start + 1 :]
    if not behind and start < len(args):
        raise RecollectError("--: got nothing behind it, expected a command such as torchrun ... pretrain_gpt.py ...")
    names = _names_in(given)
    has_size = "--world-size" in names
    words = command_words(behind, has_size=has_size) if behind else []
    for word, value in zip(given, [*given[1:], ""], strict=False):
        name, _, inline = word.partition("=")
        if name in ("--megatron", "--yaml") and name in own:
            words = launch_words(Path(inline or value), known, given_as=name, has_size=has_size)
            if not words and name == "--megatron":
                raise RecollectError(
                    f"--megatron {inline or value}: got nothing to plan for, expected flags of a model."
                )
    names |= _names_in(words)
    is_whole = words and "--megatron" in own
    if is_whole and not names & {"--vocab-size", "--size", "--hf-config"}:
        raise ConfigError(
            settings={"vocab_size": None},
            reason="Megatron has it from its tokenizer, which is not read",
            advice="Add --vocab-size, unpadded, such as 50257 or 128256.",
        )
    defaults = MEGATRONS_DEFAULTS if is_whole else ()
    beside = set(flags_of(commands.Train).values()) - own - set(flags_of(ProcessFlags).values())
    return _without_foreign(_read([*defaults, *words, *given], own=own, beside=beside, plans=True))


def _names_in(words: Sequence[str]) -> set[str]:
    return {word.partition("=")[0].replace("_", "-") for word in words}


def _read(words: list[str], **how: Any) -> Arguments:
    """Remove Megatron's flags that recollect has no setting for, or raise; see `read_arguments`."""
    if any("cuda-graph" in word.replace("_", "-") for word in words):
        from recollect.cli.graph_rules import check_graphs  # Few need it.

        check_graphs(words, trains=not how.get("plans"))
    return read_arguments(words, **how)


def _without_foreign(arguments: Arguments) -> list[str]:
    """Return recollect's own flags, after reporting which others have no effect, grouped by the reason."""
    why = arguments.without_effect
    names = {reason: ", ".join(name for name in why if why[name] == reason) for reason in why.values()}
    if names:
        warn_user(f"without effect here: {'; '.join(f'{name} ({reason})' for reason, name in names.items())}.")
    return arguments.rest


def parse_megatron(args: list[str]) -> commands.RunMegatron:
    """Parse the flags of `recollect megatron`, which may be anywhere; all others after the script belong to the script."""
    own: list[str] = []
    rest: list[str] = []
    words = iter(args)
    for word in words:
        if word.startswith("--recollect-"):
            own += [word, *([] if "=" in word else itertools.islice(words, 1))]
        else:
            (own if not rest and word.startswith("-") else rest).append(word)
    if not rest and "--help" not in own:
        raise RecollectError(
            "recollect megatron: got no script, expected one: recollect megatron pretrain_gpt.py --recollect-budget 70GiB ..."
        )
    command: commands.RunMegatron = parsed(commands.RunMegatron, "megatron", [*rest[:1], *own])
    return dataclasses.replace(command, script_flags=tuple(rest[1:]))


@contextmanager
def _interrupt_ends() -> Iterator[None]:
    """Let Ctrl-C end the process within the block: libraries that are being imported turn it into errors of their own."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_DFL) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)


def _run(command: Any) -> int:
    """Run a command through the function `run_NAME` of the module NAME, and return the exit status."""
    (name,) = (name for name, kind in _COMMANDS.items() if kind is type(command))
    # Imported only now, because torch takes seconds to import, and `--help` should not.
    with _interrupt_ends():
        module = importlib.import_module(f"recollect.cli.{name}")
    try:
        status: int | None = getattr(module, f"run_{name}")(command, Console())
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise RecollectError(f"{error.filename or 'the output'}: cannot be written ({error.strerror}).") from error
    return status or 0
