"""Format bytes for people: "1.5 GiB". Below `recollect.quantities`, because errors print bytes too."""

import operator

_PREFIXES = "KMGTP"


def format_bytes(num_bytes: int) -> str:
    """Format bytes for people.

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


def least_amount(num_bytes: int) -> str:
    """Print bytes as an amount to paste as a budget, as `recollect.quantities.parse_bytes` reads it, rounded up to be enough.

    Example:
        >>> least_amount(512), least_amount(1025), least_amount(16 * 2**30), least_amount(2**20 - 1)
        ('512B', '1.1KiB', '16.0GiB', '1.0MiB')
    """
    number = operator.index(num_bytes)
    if number < 1024:
        return f"{number}B"
    for power, prefix in enumerate(_PREFIXES, start=1):
        # Exact, where a float would round down a sum of many digits.
        tenths = -(-number * 10 // 1024**power)
        suffix = f"{prefix}iB"
        if tenths < 10240:
            break
    return f"{tenths // 10}.{tenths % 10}{suffix}"
