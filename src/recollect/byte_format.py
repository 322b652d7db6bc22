"""Print bytes for people: "1.5 GiB". Below `recollect.quantities`, because errors print bytes too."""

from __future__ import annotations

import operator

__all__ = ["format_bytes"]

_PREFIXES = "KMGTP"


def format_bytes(num_bytes: int) -> str:
    """Print bytes for people.

    Args:
        num_bytes: any int; a difference may be negative.

    Returns:
        One decimal and a power-of-1024 suffix; below 1 KiB, the exact number.

    Example:
        >>> format_bytes(512), format_bytes(1536), format_bytes(16 * 2**30), format_bytes(-(2**20))
        ('512 B', '1.5 KiB', '16.0 GiB', '-1.0 MiB')
    """
    magnitude = abs(operator.index(num_bytes))
    sign = "-" if num_bytes < 0 else ""
    if magnitude < 1024:
        return f"{sign}{magnitude} B"
    value = float(magnitude)
    suffix = "B"
    for prefix in _PREFIXES:
        value /= 1024
        suffix = f"{prefix}iB"
        # Not `< 1024`: 1023.96 would be printed as 1024.0 of the smaller unit.
        if round(value, 1) < 1024:
            break
    return f"{sign}{value:.1f} {suffix}"
