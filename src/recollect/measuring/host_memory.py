"""The memory of the host: the size of that of the machine, or of this process's container; and mapped files."""

import mmap
import os
import tempfile
from pathlib import Path

import torch

from recollect.byte_format import format_bytes
from recollect.errors import ConfigError
from recollect.quantities import parse_bytes

# Files in which Linux says how much a group of processes may use: version 2 and 1 of its control groups.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_CHUNK_BYTES = 1 << 20


def host_memory_bytes() -> int:
    """Return the bytes of memory that this process may use at most.

    Example:
        >>> host_memory_bytes() > 2**20
        True
    """
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _LIMITS:
        text = path.read_text(encoding="ascii").strip() if path.is_file() else ""
        if text.isdecimal():
            found.append(int(text))
    return min(found)


def check_host_budget(host_budget: int | str) -> None:
    """Check that this much host memory is available.

    Raises:
        ConfigError: it is not.
        QuantityError: it is not an amount of bytes.

    Example:
        >>> check_host_budget("1MiB")
    """
    nbytes, there = parse_bytes(host_budget), host_memory_bytes()
    if nbytes > there:
        raise ConfigError(
            settings={"host_budget": host_budget},
            reason=f"this machine, or the container that this runs in, has {format_bytes(there)} of memory",
            advice="Pass less than that: the process needs some for itself.",
        )


def mapped_file(nbytes: int) -> torch.Tensor:
    """Return bytes of a temporary file without a name: nothing of it remains, however the process ends.

    The operating system can write its pages out to disk, unlike the pages of other memory.

    Raises:
        OSError: the disk has no room for it.

    Example:
        >>> mapped_file(100).shape
        torch.Size([100])
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
