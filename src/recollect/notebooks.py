"""Rich display in notebooks. Below everything else: `recollect.pictures.notebook` draws, imported when it is asked.

That is the one import that points up; `tests/house/test_layers.py` lists it.
"""

from __future__ import annotations

from importlib import import_module


class ShownInNotebooks:
    """Shows itself in Jupyter, as static HTML; in consoles and logs it is the text that it prints."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        html: str = import_module("recollect.pictures.notebook").html_of(self)
        return html


class Lines(str, ShownInNotebooks):
    """A text of some lines, which a notebook shows as lines.

    Example:
        >>> Lines("budget 16.0 GiB, held")._repr_html_()
        '<pre>budget 16.0 GiB, held</pre>'
    """

    __slots__ = ()
