"""How much memory the host has: that of the machine, or of the container that this process runs in."""

from __future__ import annotations

import os
from pathlib import Path

from recollect.byte_format import format_bytes
from recollect.errors import ConfigError
from recollect.quantities import parse_bytes

# Where Linux says how much a group of processes may use: version 2 and 1 of its control groups.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


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
    """Check that there is so much host memory.

    Raises:
        ConfigError: there is not.
        QuantityError: it is no amount of bytes.

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
