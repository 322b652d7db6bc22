"""Code shared by the commands: the training step that they record or measure, built from flags, and their output.

That is tables on the console, and files and pictures that are checked before the work begins.
"""

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import recollect
from recollect.cli.commands import FakeStep, ModelStep, RecordedStep
from recollect.errors import ConfigError, RecollectError
from recollect.extras import needed
from recollect.fields import writing
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.lab.train.files import write_text
from recollect.lab.train.model_flags import ModelFlags
from recollect.lab.train.optim_flags import OptimFlags
from recollect.lab.train.optimizer_step import SMALLER, build_optimizer, check_memory, resolve_device
from recollect.pictures.page import require_plotly
from recollect.pictures.style import require_matplotlib
from recollect.planning.planners import Engine
from recollect.printing import columns_of, print_line
from recollect.profile.profile import Profile
from recollect.recording.step_recording import Gradients
from recollect.warning import warn_user


def wide_console(console: Console, width: int) -> Console:
    """Return a console of a given width unless a terminal has its own: in a file, no column needs to be broken.

    A terminal of less than 80 columns breaks lines itself: tables would lose columns.
    """
    width = columns_of(console) if console.is_terminal else width
    return console if console.is_terminal and console.width >= width else Console(width=width, file=console.file)


def describe_step(profile: Profile) -> str:
    return f"{profile.model_class}, {profile.batch}; {profile.times_text or f'times measured on {profile.device_name}'}"


def check_folder(path: Path, flag: str = "") -> None:
    """Check that a file can be written, before the work for its content begins."""
    with writing(path, flag=flag):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def write_file(path: Path, text: str, console: Console, *, flag: str = "", note: str = "") -> None:
    """Write a file atomically and say so; `note` is added to the message."""
    with writing(path, flag=flag):
        write_text(path, text)
    print_line(console, f"Written to {path}{note}.")


def check_pictures(png: Path | None, html: Path | None) -> None:
    if png is not None:
        require_matplotlib()
    if html is not None:
        require_plotly()
    for flag, path in (("--png", png), ("--html", html)):
        if path is not None:
            check_folder(path, flag)


def build_step(
    flags: ModelStep, device: torch.device, config: TransformerConfig | None = None
) -> tuple[nn.Module, dict[str, Tensor], torch.optim.Optimizer]:
    """Build model, batch and optimizer of a step: the model in training mode, a batch of equal tokens, passed as keywords."""
    if flags.hf_config is not None:
        warn_of_model_flags(flags.model)
    if device.type != "meta":
        model, batch = build_model(flags, torch.device("meta"), config)
        fakes, advice = {"fake": False}, "Add --fake, which records it without memory."
        given = (fakes, advice) if isinstance(flags, FakeStep) else (_sizes(flags), SMALLER)
        check_memory(model, batch["labels"].nbytes, device, *given)
    model, batch = build_model(flags, device, config)
    return model, batch, build_optimizer(model, OptimFlags())


def build_model(
    flags: ModelStep, device: torch.device, config: TransformerConfig | None = None
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build model and batch of `build_step`, without a check of what the device holds."""
    try:
        with device:
            if flags.hf_config is not None:
                model = _hugging_face_model(flags.hf_config)
            else:
                model = GPTModel(flags.model.dimensions(seq_length=flags.seq_length) if config is None else config)
            model = model.to(torch.bfloat16 if flags.dtype == "bf16" else torch.float32).train()
            tokens = torch.zeros(flags.num_sequences, flags.seq_length, dtype=torch.int64)
    except (RuntimeError, TypeError) as problem:
        if "verflow" not in str(problem):
            raise
        reason = "a tensor has more bytes than 64 bits can count"
        raise ConfigError(settings=_sizes(flags), reason=reason, advice=SMALLER) from None
    return model, {"tokens" if flags.hf_config is None else "input_ids": tokens, "labels": tokens}


def _sizes(flags: ModelStep) -> Mapping[str, object]:
    return {"batch_size": flags.num_sequences, "seq_length": flags.seq_length}


def step_recorder(
    flags: RecordedStep,
    config: TransformerConfig | None = None,
    *,
    holds_output: bool = True,
    gradients: Gradients = "held",
    host_link: bool = False,
    engine: Engine = "tape",
) -> Callable[[int], Profile]:
    """Build the step and return a function that records it with a given number of loss chunks."""
    if flags.fake and flags.device not in ("auto", "cpu"):
        warn_user(f"--device {flags.device}: without effect with --fake; --hardware says what to model.")
    # A fake step needs only shapes.
    device = torch.device("meta") if flags.fake else resolve_device(flags.device)
    model, batch, optimizer = build_step(flags, device, config)
    return lambda loss_chunks: recollect.record(
        model,
        batch,
        optimizer=optimizer,
        fake=flags.fake,
        hardware=flags.hardware,
        holds_output=holds_output,
        gradients=gradients,
        loss_chunks=loss_chunks,
        host_link=host_link,
        engine=engine,
    )


def warn_of_model_flags(given: ModelFlags) -> None:
    """Warn of flags of recollect's own models beside `--hf-config`; Megatron's command lines always pad the vocabulary."""
    default = ModelFlags()
    if replace(given, make_vocab_size_divisible_by=default.make_vocab_size_divisible_by) != default:
        warn_user("--hf-config describes the whole model: other flags of the model are without effect.")


def _hugging_face_model(path: Path) -> nn.Module:
    with needed("transformers", by="--hf-config"):
        import transformers
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise RecollectError(
            f"--hf-config {path}: no such file, expected a config.json of a causal language model, downloaded before."
        )
    try:
        config: Any = transformers.AutoConfig.from_pretrained(str(path))
        config.use_cache = False  # a key-value cache is for generation; in training it only wastes memory
        builder: Any = transformers.AutoModelForCausalLM
        model: nn.Module = builder.from_config(config)
    except (OSError, ValueError, KeyError) as problem:
        raise RecollectError(
            f"--hf-config {path}: transformers cannot build the model ({str(problem).splitlines()[0]}), expected the "
            f"config.json of a causal language model."
        ) from None
    return model
