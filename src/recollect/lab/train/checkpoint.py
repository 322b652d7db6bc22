"""Checkpoints: written atomically, verified when read, and complete enough to resume with the same bits.

A checkpoint is a folder `step_XXXXXXXX` with a manifest, its files with their sizes and checksums. The manifest is the last
file that is written, and has its own checksum. The position in the data follows from the step.
"""

import json
import random
import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recollect.errors import CheckpointError
from recollect.lab.train.files import remove, write_text

FORMAT = 1
CHANGEABLE = ("optim.steps", "step.memory_budget", "step.host_budget", "step.recompute")
"""Settings that a resumed run may change: recompute changes no bit, and it may train for more steps."""
# That of one process was a file, which is refused.
_NAME = re.compile(r"step_\d{8}(\.pt)?")
_MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint besides tensors and random number states."""

    step: int
    identity: dict[str, Any]
    """Settings that determine the numbers, see `TrainConfig.identity`."""
    environment: dict[str, Any]
    """`environment()` of the first process."""
    layout: dict[str, Any]
    """The layout of the model over the processes that wrote it."""
    files: dict[str, list[int]]
    """Bytes and CRC-32 of each file, by name."""


def environment() -> dict[str, Any]:
    """Return the facts that determine a run's bits besides its settings; a resumed run warns about differences."""
    return {
        "torch version": str(torch.__version__),
        "numpy version": np.__version__,
        "CPU threads": torch.get_num_threads(),
        "CUDA device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the random number generators of a run, as types that `weights_only` loading allows."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 - the global one is meant
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": (name, [int(key) for key in keys], position, has_gauss, gauss),
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, gauss))  # noqa: NPY002


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, oldest first."""
    return sorted(path for path in folder.glob("step_*") if _NAME.fullmatch(path.name))


def keep_newest(folder: Path, keep: int) -> None:
    for old in list_checkpoints(folder)[:-keep]:
        remove(old)


def checksum_of(path: Path) -> list[int]:
    """Return a file's bytes and CRC-32."""
    crc, count = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc, count = zlib.crc32(chunk, crc), count + len(chunk)
    return [count, crc]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    content = json.dumps({"format": FORMAT, **asdict(manifest)}, default=str)
    write_text(folder / _MANIFEST, json.dumps({"crc": zlib.crc32(content.encode()), "content": content}) + "\n")


def read_manifest(folder: Path) -> Manifest | str:
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


def refuse_damage(path: Path, problem: str | None) -> None:
    if problem is None:
        return
    older = [other for other in list_checkpoints(path.parent) if other.name < path.name]
    good = next((other for other in reversed(older) if find_damage(other) is None), None)
    advice = f"Remove it to resume from the older {good.name}." if good else "No older one is intact: start a new run."
    raise CheckpointError(f"checkpoint {path}: got {problem}, expected an intact checkpoint. {advice}")


def check_identity(path: Path, stored: dict[str, Any], current: dict[str, Any]) -> None:
    """Check that a checkpoint has this run's configuration, except for `CHANGEABLE` settings."""
    for name in [*current, *(name for name in stored if name not in current)]:
        before, now = stored.get(name), current.get(name)
        if before != now and name not in CHANGEABLE:
            raise CheckpointError(
                f"checkpoint {path}: was written with {name} = {before!r}, this run has {now!r}, expected the same. "
                f"Use the old setting, or start a new run in a different --run-dir."
            )


def find_damage(path: Path, *, share: int = 0, shares: int = 1) -> str | None:
    """Describe the problem of a checkpoint, or of one of several shares of its files; None if it has none."""
    manifest = read_manifest(path)
    if isinstance(manifest, str):
        return manifest
    for name in sorted(manifest.files)[share::shares]:
        size, crc = manifest.files[name]
        try:
            # Before reading: a truncated file is known at once.
            now = (path / name).stat().st_size
            if now != size:
                return f"{now} bytes instead of {size} in its file {name}"
            if checksum_of(path / name) != [size, crc]:
                return f"changed bytes in its file {name}"
        except FileNotFoundError:
            return f"a folder without its file {name}"
        except OSError as problem:
            return f"an unreadable file {name} ({problem.strerror})"
    return None
