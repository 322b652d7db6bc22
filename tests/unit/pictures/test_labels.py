"""The labels of the benchmarks' pictures find room."""

import itertools
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from labels import Mark, place_labels  # noqa: E402
from recollect.pictures.style import new_figure  # noqa: E402


def test_labels_stay_inside_and_apart() -> None:
    pytest.importorskip("matplotlib")
    figure, axes = new_figure(9, 5)
    # At each edge, and four in a heap.
    heap = [Mark(0.5 + 0.01 * i, 0.5 + 0.02 * (i % 2), f"schedule {i}") for i in range(4)]
    marks = [
        Mark(0, 0, "bottom left"),
        Mark(1, 0, "bottom right"),
        Mark(0, 1, "top left"),
        Mark(1, 1, "top right"),
        *heap,
    ]
    axes.set(xlim=(0, 1), ylim=(0, 1))
    place_labels(figure, axes, marks)
    renderer = figure.canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    assert len(boxes) == len(marks)
    for box in boxes:
        assert axes.bbox.x0 <= box.x0 <= box.x1 <= axes.bbox.x1
        assert axes.bbox.y0 <= box.y0 <= box.y1 <= axes.bbox.y1
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
