"""Parse texts such as "16GiB" or "60%" into bytes, and format seconds for people.

GiB is 2**30 bytes, GB is 10**9 bytes, and so on; a lone "G" could mean either and is rejected. Inside recollect, bytes
are plain ints and seconds plain floats.
"""

import math
import operator
import re
from fractions import Fraction

from recollect.errors import QuantityError

_PREFIXES = "kmgtp"
_SCALES: dict[str, int] = {
    "b": 1,
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate(_PREFIXES, start=1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate(_PREFIXES, start=1)},
}
_NUMBER = r"[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_NUMBER_AND_SUFFIX = re.compile(rf"(?P<number>{_NUMBER})\s*(?P<suffix>\S*)", re.IGNORECASE | re.ASCII)
# After the number: a percentage of the peak without recompute, or of the device's memory.
_PERCENT = re.compile(r"(?P<number>.*?)\s*%\s*(?P<of>of\s+(?:the\s+)?device)?", re.IGNORECASE | re.DOTALL)
_EXPECTED = "write a whole number of bytes, or a text such as '16GiB' (2**30 bytes each) or '80GB' (10**9 bytes each)"
# Larger exponents would build integers that take minutes to compute; no machine has 10**30 bytes.
_LARGEST_BYTES = 10**30
_LONGEST_TEXT = 64
# A budget of so few bytes, as text without a suffix, is a percentage whose sign was forgotten.
_MOST_PERCENT = 100
# No step fits into fewer bytes; 1 asks for the least peak, which the error then tells.
_FEWEST_BYTES = 1024


def parse_bytes(value: str | int) -> int:
    """Return bytes given as an int or as text.

    Args:
        value: an int (bytes), or text: a number, then one of B, KiB, MiB, GiB, TiB, PiB (powers of 1024) or KB, MB,
            GB, TB, PB (powers of 1000), in upper or lower case. Text without a suffix must be a whole number of bytes.

    Returns:
        Bytes, 0 or more. A fraction of a byte is dropped.

    Example:
        >>> parse_bytes("16GiB"), parse_bytes("80 GB"), parse_bytes("1.5 KiB"), parse_bytes(512)
        (17179869184, 80000000000, 1536, 512)
    """
    if not isinstance(value, str):
        return _whole_bytes(value)
    number, suffix = _split(value, _EXPECTED)
    scale = 1 if not suffix else _SCALES.get(suffix.lower())
    if scale is None:
        raise QuantityError(value, _suffix_problem(suffix))
    if not suffix and number.denominator != 1:
        raise QuantityError(value, f"a fraction of a byte; {_EXPECTED}")
    return _checked(value, math.floor(number * scale))


def parse_budget(value: str | int, *, reference_bytes: int | None, device_bytes: int | None = None) -> int:
    """Return a budget in bytes; it may be given as a percentage of a reference or of the device's memory.

    Args:
        value: as for `parse_bytes`, or a percentage such as "60%", "62.5 %" or "90% of the device".
        reference_bytes: the peak that a plain percentage is of, 0 or more; None if there is no such peak.
        device_bytes: size of the device's memory; None or 0 if unknown.

    Returns:
        Bytes, 0 or more, rounded down.

    Example:
        >>> parse_budget("60%", reference_bytes=1000), parse_budget("1KiB", reference_bytes=1000)
        (600, 1024)
        >>> parse_budget("90% of the device", reference_bytes=1000, device_bytes=80 * 2**30)
        77309411328
    """
    reference_bytes = None if reference_bytes is None else _whole_bytes(reference_bytes)
    if not isinstance(value, str) or "%" not in value:
        _refuse_lone_number(value)
        return parse_bytes(value)
    expected = "write a percentage such as '60%' or '90% of the device'"
    percentage = _PERCENT.fullmatch(value.strip())
    if percentage is None:
        raise QuantityError(value, f"unknown text after the percent sign; {expected}")
    number, suffix = _split(percentage["number"], expected, given=value)
    if suffix:
        raise QuantityError(value, f"{suffix!r} before the percent sign is unknown; {expected}")
    if percentage["of"] is None:
        if reference_bytes is None:
            raise QuantityError(
                value,
                "a percentage of the peak without recompute, which differs from batch to batch; "
                "write bytes, such as '16GiB', or '90% of the device'",
            )
        return _checked(value, math.floor(number * reference_bytes / 100))
    if not device_bytes:
        raise QuantityError(
            value,
            "the device's memory is known only for CUDA devices and the hardware of a fake profile. Give bytes, such as "
            "'16GiB', or a part of the peak without recompute, such as '60%'",
        )
    return _checked(value, math.floor(number * _whole_bytes(device_bytes) / 100))


def check_budget(value: str | int, *, device_bytes: int | None) -> None:
    """Check that a budget can be parsed and is not a mistake, before the peak that a percentage refers to is known.

    `device_bytes`: None or 0 if unknown. A wrong size above 0 does no harm.
    """
    # Any peak will do that is large enough for each fraction of it to be some bytes.
    peak_bytes = _LARGEST_BYTES // 10**9
    num_bytes = parse_budget(value, reference_bytes=peak_bytes, device_bytes=device_bytes and peak_bytes)
    if num_bytes != 1 and num_bytes < _FEWEST_BYTES:
        percentage = f"'{num_bytes}%' or " if num_bytes <= _MOST_PERCENT else ""
        meant = (
            f"did you mean {percentage}'{num_bytes}GiB'?"
            if num_bytes
            else "write a percentage such as '60%', or '16GiB'"
        )
        raise QuantityError(value, f"no step fits into {num_bytes} bytes; {meant}")


def _refuse_lone_number(value: object) -> None:
    """Raise for "60" and 0.6, which are meant as parts of the peak, and name the percentage."""
    if isinstance(value, float) and 0 < value <= 1:
        percent = f"{100 * value:.4g}%"
    elif isinstance(value, str) and (match := re.fullmatch(_NUMBER, value.strip())):
        number = float(match[0].replace("_", ""))
        if not 0 < number <= _MOST_PERCENT:
            return
        percent = f"{100 * number:.4g}%" if number < 1 else f"{number:.4g}%"
    else:
        return
    raise QuantityError(
        value,
        f"has no unit; write {percent!r} for that part of the peak without recompute, or an amount such as "
        f"'{str(value).strip()}GiB'",
    )


def format_seconds(seconds: float) -> str:
    """Format a duration for people.

    Example:
        >>> [format_seconds(seconds) for seconds in (0.00034, 0.0123, 1.5, 125, 3725)]
        ['340 us', '12.3 ms', '1.50 s', '2 min 5 s', '1 h 2 min']
    """
    if not math.isfinite(seconds):
        raise QuantityError(seconds, "not a finite number of seconds")
    sign = "-" if seconds < 0 else ""
    magnitude = abs(float(seconds))
    if magnitude < 59.95:
        return sign + _short_seconds(magnitude)
    if magnitude < 3599.5:
        minutes, rest = divmod(round(magnitude), 60)
        return f"{sign}{minutes} min {rest} s"
    hours, minutes = divmod(round(magnitude / 60), 60)
    return f"{sign}{hours} h {minutes} min"


def _short_seconds(magnitude: float) -> str:
    if magnitude == 0:
        return "0 s"
    # Each limit is where three digits would round up to the next unit.
    for scale, suffix, limit in ((1e9, "ns", 999.5), (1e6, "us", 999.5), (1e3, "ms", 999.5)):
        scaled = magnitude * scale
        if scaled < limit:
            return f"{scaled:.3g} {suffix}"
    return f"{magnitude:.2f} s" if magnitude < 9.995 else f"{magnitude:.1f} s"


def _whole_bytes(value: object) -> int:
    if isinstance(value, bool):
        raise QuantityError(value, f"a bool is not a number of bytes; {_EXPECTED}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        is_small = isinstance(value, float) and 0 < value < 1e6
        expected = f"write '{value:g}GiB', or a whole number of bytes" if is_small else _EXPECTED
        raise QuantityError(value, f"a {type(value).__name__} is not a number of bytes; {expected}") from None
    return _checked(value, number)


def _split(text: str, expected: str, *, given: str | None = None) -> tuple[Fraction, str]:
    given = text if given is None else given
    stripped = text.strip()
    if not stripped:
        raise QuantityError(given, f"empty; {expected}")
    if len(stripped) > _LONGEST_TEXT:
        raise QuantityError(given, f"longer than {_LONGEST_TEXT} characters; {expected}")
    if "," in stripped:
        raise QuantityError(given, "has a comma; write '16000MB' for thousands, and '1.5GiB' for decimals")
    match = _NUMBER_AND_SUFFIX.fullmatch(stripped)
    if match is None:
        raise QuantityError(given, f"does not begin with a number, or has more than one suffix; {expected}")
    digits = match["number"].replace("_", "")
    exponent = digits.lower().partition("e")[2]
    if exponent and abs(int(exponent)) > 30:
        raise QuantityError(given, f"the exponent is out of range; {expected}")
    return Fraction(digits), match["suffix"]


def _suffix_problem(suffix: str) -> str:
    if len(suffix) == 1 and suffix.lower() in _PREFIXES:
        letter = suffix.upper()
        return f"{suffix!r} could mean {letter}iB (a power of 1024) or {letter}B (a power of 1000); write which"
    return f"unknown suffix {suffix!r}; {_EXPECTED}"


def _checked(given: object, num_bytes: int) -> int:
    if num_bytes < 0:
        raise QuantityError(given, f"negative; {_EXPECTED}")
    if num_bytes > _LARGEST_BYTES:
        raise QuantityError(given, f"too large; {_EXPECTED}")
    return num_bytes
