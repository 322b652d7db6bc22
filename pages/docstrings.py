"""What the site's reader of docstrings has to be told about ours: a section of examples is titled "Example"."""

from __future__ import annotations

import re
from typing import Any

import griffe


class OneExample(griffe.Extension):
    """Reads "Example:" as the section that the reader knows as "Examples:"."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section in one docstring."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
