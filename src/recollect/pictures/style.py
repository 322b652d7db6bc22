"""Colours and common parts of all matplotlib figures.

The colours are Paul Tol's "bright" scheme, distinguishable by people with colour blindness
(https://sronpersonalpages.nl/~pault/), and greys for memory that is alive through the whole step.
"""

from io import BytesIO
from pathlib import Path
from typing import Any

from recollect.extras import needed
from recollect.fields import writing

INK = "#333333"
PALE = "#777777"
OURS = "#4477aa"
CLASSIC = "#aa3377"
BOUND = "#999999"

CATEGORY_COLORS = {
    "parameters": "#8c8c8c",
    "optimizer state": "#b3b3b3",
    "buffers and batch": "#d4d4d4",
    "other allocations": "#eaeaea",
    "gradients": "#ccbb44",
    "kept values": "#4477aa",
    "outside of the units": "#aa3377",
    "returned values": "#88bbdd",
    "recomputed values": "#ee6677",
    "passing values": "#66ccee",
    "working memory": "#228833",
    "calibration": "#222222",
}

_DOTS_PER_INCH = 150
# Longer notes are cut off; a smaller font is hard to read.
_MOST_CHARACTERS = 118


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """Return a figure of given width and height in inches, and its axes."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot there is no global state, no display, and no figure to close.
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK)
    axes.set_axisbelow(True)
    return figure, axes


def require_matplotlib() -> None:
    with needed("matplotlib", by="a PNG"):
        import matplotlib  # noqa: F401 - only to see whether it is there


def set_title(axes: Any, title: str, note: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=22)
    shown = note if len(note) <= _MOST_CHARACTERS else note[: _MOST_CHARACTERS - 3] + "..."
    # parse_math=False: a dollar sign in a name is a dollar sign.
    axes.text(0, 1.02, shown, transform=axes.transAxes, fontsize=8.5, color=PALE, parse_math=False)


def save_png(figure: Any, out: Path | BytesIO) -> None:
    from PIL import Image  # a dependency of matplotlib

    drawn = BytesIO()
    figure.savefig(drawn, dpi=_DOTS_PER_INCH, format="png")
    # A palette takes a third of the bytes without a visible difference: pictures have few colours, blended with white.
    picture = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    with writing(out):
        picture.save(out, format="png", optimize=True, dpi=(_DOTS_PER_INCH, _DOTS_PER_INCH))
