"""Range checks for the dataclasses that hold flags."""


def at_least(flags: object, least: int, *names: str) -> None:
    """Check that flags that are given are at least `least`.

    Raises:
        ValueError: names the first flag below, and its value.
    """
    for name in names:
        value = getattr(flags, name)
        if value is not None and value < least:
            raise ValueError(f"{name}: got {value}, expected at least {least}.")


def within(name: str, value: float, low: float, high: float) -> None:
    """Check that a flag is between `low` and `high`.

    Raises:
        ValueError: names the flag and its value.
    """
    if not low <= value <= high:
        raise ValueError(f"{name}: got {value}, expected {low:g} to {high:g}.")
