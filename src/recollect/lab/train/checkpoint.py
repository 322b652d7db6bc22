"""Checkpoints: written atomically, verified when read, and complete enough to resume with the same bits.

A checkpoint is one `torch.save` file that loads with `weights_only=True`: step, settings, model, optimizer, random number
states. The position in the data follows from the step. Torch stores a CRC of each record but does not verify it when reading;
`find_damage` does.

That of several processes is a folder with a manifest, its files with their sizes and checksums. The manifest is the last file
that is written, and has a checksum of its own.
"""

from __future__ import annotations

import json
import pickle
import random
import re
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recollect.errors import CheckpointError
from recollect.lab.train.files import remove, remove_partial, write_atomically, write_text

FORMAT = 1
CHANGEABLE = ("optim.steps", "step.memory_budget", "step.recompute")
"""Settings that a resumed run may change: what it recomputes changes no bit, and more steps are more steps."""
_NAME = re.compile(r"step_(\d{8})(\.pt)?")
_MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """State between two optimizer steps.

    Attributes:
        step: optimizer steps completed.
        identity: settings that determine the numbers, see `TrainConfig.identity`.
        model: the model's state dict.
        optimizer: the optimizer's state dict.
        rng: `rng_state()`.
        environment: `environment()` of the writing process.
    """

    step: int
    identity: dict[str, Any]
    model: dict[str, Any]
    optimizer: dict[str, Any]
    rng: dict[str, Any]
    environment: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint that is a folder.

    Attributes:
        step: optimizer steps completed.
        identity: settings that determine the numbers, see `TrainConfig.identity`.
        environment: `checkpoint.environment()` of the first process.
        layout: how the model was spread over the processes that wrote it.
        files: bytes and CRC-32 of each file, by name.
    """

    step: int
    identity: dict[str, Any]
    environment: dict[str, Any]
    layout: dict[str, Any]
    files: dict[str, list[int]]


def environment() -> dict[str, Any]:
    """Return what determines the bits besides the settings; a resumed run warns about differences."""
    return {
        "torch version": str(torch.__version__),  # a subclass of str, which `weights_only` would not load
        "numpy version": np.__version__,
        "CPU threads": torch.get_num_threads(),
        "CUDA device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def rng_state(*, own_device: bool = False) -> dict[str, Any]:
    """Return the states of all random number generators, as types that `weights_only` loading allows.

    Args:
        own_device: of CUDA, that of the current device alone, for one process of several: it may have another place among
            those of its machine when it starts again.
    """
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 - the global one is meant
    return {
        "torch": torch.get_rng_state(),
        "cuda": _cuda_states(own_device),
        "python": random.getstate(),
        "numpy": (name, [int(key) for key in keys], position, has_gauss, gauss),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"][0])
    elif state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, gauss))  # noqa: NPY002


def _cuda_states(own_device: bool) -> list[torch.Tensor]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_rng_state()] if own_device else torch.cuda.get_rng_state_all()


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps."""
    return folder / f"step_{step:08d}.pt"


def folder_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of several processes, which is a folder."""
    return checkpoint_path(folder, step).with_suffix("")


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, of one process and of several, oldest first."""
    return sorted(path for path in folder.glob("step_*") if _NAME.fullmatch(path.name))


def keep_newest(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the newest."""
    for old in list_checkpoints(folder)[:-keep]:
        remove(old)


def write_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write `checkpoint` into `folder`, remove all but the newest `keep`, and return its path.

    Args:
        folder: created if missing.
        checkpoint: the state.
        keep: number of checkpoints to keep, at least 1.

    Raises:
        CheckpointError: the folder cannot be created or written to; older checkpoints stay.
    """
    path = checkpoint_path(folder, checkpoint.step)
    content = {"format": FORMAT, **{name: getattr(checkpoint, name) for name in Checkpoint.__slots__}}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_partial(folder)
        write_atomically(path, lambda file: torch.save(content, file))
    except (OSError, RuntimeError) as problem:  # torch reports a full disk as RuntimeError
        reason = getattr(problem, "strerror", None) or str(problem).splitlines()[0]
        raise CheckpointError(
            f"checkpoint {path}: cannot be written ({reason}), expected a writable folder with free space. "
            f"Older checkpoints are kept; free space or choose another --run-dir."
        ) from None
    keep_newest(folder, keep)
    return path


def checksum_of(path: Path) -> list[int]:
    """Return a file's bytes and CRC-32.

    Raises:
        OSError: it cannot be read.
    """
    crc, count = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc, count = zlib.crc32(chunk, crc), count + len(chunk)
    return [count, crc]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into the folder of its checkpoint, atomically."""
    content = json.dumps({"format": FORMAT, **asdict(manifest)}, default=str)
    write_text(folder / _MANIFEST, json.dumps({"crc": zlib.crc32(content.encode()), "content": content}) + "\n")


def read_manifest(folder: Path) -> Manifest | str:
    """Return the manifest of a checkpoint that is a folder, or what is wrong with it in words."""
    try:
        stored = json.loads((folder / _MANIFEST).read_text())
        content, crc = stored["content"], stored["crc"]
        if zlib.crc32(content.encode()) != crc:
            return f"a changed {_MANIFEST}"
        found = json.loads(content)
    except FileNotFoundError:
        return f"a folder without {_MANIFEST}"
    except OSError as problem:
        return f"an unreadable {_MANIFEST} ({problem.strerror})"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"a changed {_MANIFEST}"
    version = found.pop("format")
    return Manifest(**found) if version == FORMAT else f"format {version!r} instead of {FORMAT}"


def load_checkpoint(path: Path, *, is_mapped: bool = False) -> Checkpoint:
    """Read a file that was verified.

    Args:
        path: the file.
        is_mapped: leave tensors in it until they are read, for a process that needs parts of them.
    """
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    return Checkpoint(**{name: content[name] for name in Checkpoint.__slots__})


def refuse_damage(path: Path, problem: str | None) -> None:
    """Refuse a checkpoint that has a problem.

    Raises:
        CheckpointError: it has; names the newest intact older one.
    """
    if problem is None:
        return
    older = [other for other in list_checkpoints(path.parent) if other.name < path.name]
    good = next((other for other in reversed(older) if find_damage(other) is None), None)
    advice = f"Remove it to resume from the older {good.name}." if good else "No older one is intact: start a new run."
    raise CheckpointError(f"checkpoint {path}: got {problem}, expected an intact checkpoint. {advice}")


def check_identity(path: Path, stored: dict[str, Any], current: dict[str, Any]) -> None:
    """Check that a checkpoint has this run's configuration, except for what is `CHANGEABLE`.

    Args:
        path: the checkpoint, for the message.
        stored: settings of the run that wrote it.
        current: settings of this run.

    Raises:
        CheckpointError: names the first differing setting and both values.
    """
    for name in [*current, *(name for name in stored if name not in current)]:
        before, now = stored.get(name), current.get(name)
        if before != now and name not in CHANGEABLE:
            raise CheckpointError(
                f"checkpoint {path}: was written with {name} = {before!r}, this run has {now!r}, expected the same. "
                f"Use the old setting, or start a new run in another --run-dir."
            )


def find_damage(path: Path, *, share: int = 0, shares: int = 1) -> str | None:
    """Describe what is wrong with a checkpoint; None if nothing is.

    Args:
        path: a file, or a folder.
        share: which of the files in a folder to look at, so that several processes share the work; the first has a single file.
        shares: number of shares.
    """
    if not path.is_dir():
        return _damage_of_file(path) if share == 0 else None
    found = read_manifest(path)
    if not isinstance(found, Manifest):
        return found
    return _damage_of_files(path, found, sorted(found.files)[share::shares])


def _damage_of_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> str | None:
    """Describe what is wrong with some files of a checkpoint; None if nothing is."""
    for name in names:
        size, crc = manifest.files[name]
        path = folder / name
        try:
            # Before reading: a truncated file is known at once.
            now = path.stat().st_size
            if now != size:
                return f"{now} bytes instead of {size} in its file {name}"
            if checksum_of(path) != [size, crc]:
                return f"changed bytes in its file {name}"
        except FileNotFoundError:
            return f"a folder without its file {name}"
        except OSError as problem:
            return f"an unreadable file {name} ({problem.strerror})"
    return None


def _damage_of_file(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        if broken is not None:
            return f"changed bytes in its record {broken!r}"
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except zipfile.BadZipFile:
        return f"a truncated or foreign file of {path.stat().st_size} bytes"
    except OSError as problem:
        return f"an unreadable file ({problem.strerror})"
    except pickle.UnpicklingError:
        return "a file with more than tensors and plain values in it"
    except (RuntimeError, EOFError) as problem:
        return f"a file that torch cannot load ({str(problem).splitlines()[0]})"
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return f"format {content.get('format') if isinstance(content, dict) else None!r} instead of {FORMAT}"
    missing = [name for name in Checkpoint.__slots__ if name not in content]
    return f"a file without {', '.join(missing)}" if missing else None
