"""Rich display in notebooks. Below everything else: `recollect.pictures.notebook` draws, and is imported on demand.

It is the only import that points up; `tests/house/test_layers.py` lists it.
"""

from importlib import import_module


class ShownInNotebooks:
    """Is displayed in Jupyter as static HTML; in consoles and logs it is plain text."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return import_module("recollect.pictures.notebook").html_of(self)


class Lines(str, ShownInNotebooks):
    """A text of several lines, which a notebook shows as lines.

    Example:
        >>> Lines("budget 16.0 GiB, held")._repr_html_()
        '<pre>budget 16.0 GiB, held</pre>'
    """

    __slots__ = ()
