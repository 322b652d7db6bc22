"""The memory of the host: the size of that of the machine, or what this process's groups may use; and mapped files."""

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from recollect.byte_format import format_bytes
from recollect.errors import ConfigError
from recollect.quantities import parse_bytes

# Where Linux says which groups this process is in, and what they may use.
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_CHUNK_BYTES = 1 << 20


def host_memory_bytes() -> int:
    """Return the bytes of memory that this process may use at most."""
    own = _OWN_GROUPS.read_text() if _OWN_GROUPS.is_file() else ""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits_bytes(own, _GROUPS)])


def limits_bytes(own: str, groups: Path) -> Iterator[int]:
    """Yield what a process's control groups may use, and those around them, as a job's of Slurm; of versions 1 and 2.

    `own`: the text of `/proc/self/cgroup`. `groups`: the folder of all.
    """
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        top, name = groups, "memory.max"
        if controllers:
            top, name = groups / "memory", "memory.limit_in_bytes"
            if "memory" not in controllers.split(","):
                continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            file = folder / name
            text = file.read_text(encoding="ascii").strip() if folder.is_relative_to(top) and file.is_file() else ""
            if text.isdecimal():
                yield int(text)


def check_host_budget(host_budget: int | str) -> None:
    nbytes, there = parse_bytes(host_budget), host_memory_bytes()
    if nbytes > there:
        raise ConfigError(
            settings={"host_budget": host_budget},
            reason=f"this machine, or the container or job that this runs in, has {format_bytes(there)} of memory",
            advice="Pass less than that: the process needs some for itself.",
        )


def mapped_file(nbytes: int) -> torch.Tensor:
    """Return bytes of a temporary file without a name: nothing of it remains, however the process ends.

    The operating system can write its pages out to disk, unlike the pages of other memory. OSError if that has no room for it.
    """
    with tempfile.TemporaryFile(prefix="recollect") as file:
        # Not with holes: a write to a page that the disk has no room for ends the process.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
        else:
            for begin in range(0, nbytes, _CHUNK_BYTES):
                file.write(bytes(min(_CHUNK_BYTES, nbytes - begin)))
            file.flush()
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
