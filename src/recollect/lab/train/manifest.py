"""The table of contents of a checkpoint that is a folder: its files with their sizes and checksums. Imports no torch.

It is the last file that is written, and has a checksum of its own.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recollect.lab.train.files import write_text

__all__ = ["FORMAT", "Manifest", "checksum_of", "damage_of", "read_manifest", "write_manifest"]

FORMAT = 1
_NAME = "manifest.json"
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint.

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
    write_text(folder / _NAME, json.dumps({"crc": zlib.crc32(content.encode()), "content": content}) + "\n")


def read_manifest(folder: Path) -> Manifest | str:
    """Return the manifest of a checkpoint, or what is wrong with it in words."""
    try:
        stored = json.loads((folder / _NAME).read_text())
        content, crc = stored["content"], stored["crc"]
        if zlib.crc32(content.encode()) != crc:
            return f"a changed {_NAME}"
        found = json.loads(content)
    except FileNotFoundError:
        return f"a folder without {_NAME}"
    except OSError as problem:
        return f"an unreadable {_NAME} ({problem.strerror})"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"a changed {_NAME}"
    version = found.pop("format")
    return Manifest(**found) if version == FORMAT else f"format {version!r} instead of {FORMAT}"


def damage_of(folder: Path, manifest: Manifest, names: Iterable[str]) -> str | None:
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
