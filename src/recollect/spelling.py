"""Find the word that someone meant."""

import difflib
from collections.abc import Iterable


def nearest(word: object, known: Iterable[str]) -> str:
    """Return the known word that was meant, whatever the case: the longest in the word, or one that looks like it; else "".

    Example:
        >>> nearest("llama-8B", ["8b", "70b"]), nearest("demmo", ["demo"]), nearest("x", ["demo"])
        ('8b', 'demo', '')
    """
    given, found = str(word).lower(), {one.lower(): one for one in known}
    inside = sorted((one for one in found if one in given), key=len)[-1:]
    return "".join(found[one] for one in inside or difflib.get_close_matches(given, found, n=1))
