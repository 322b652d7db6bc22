"""What is printed on a terminal ends between words; elsewhere one line stays one."""

import io

import pytest
from rich.console import Console

from recollect.printing import columns_of, print_line

LONG = "Error: --png needs the package `matplotlib`, which is not installed. Run: pip install 'recollect[plot]'"


def printed(text: str, width: int, *, is_terminal: bool = True) -> list[str]:
    file = io.StringIO()
    print_line(Console(file=file, width=width, force_terminal=is_terminal, color_system=None), text)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", range(30, 110, 7))
def test_a_terminal_gets_whole_words_and_whole_commands(width: int) -> None:
    lines = printed(LONG, width)
    assert " ".join(lines) == LONG
    command = "pip install 'recollect[plot]'"
    assert all(len(line) <= width for line in lines if command not in line)
    assert any(command in line for line in lines)
    assert printed(LONG, width, is_terminal=False) == [LONG]


def test_numbers_stay_with_their_units_and_lines_under_their_label() -> None:
    text = "layers.0\n  keeps       add 2.0 MiB, mlp.linear_fc1.mm 11.0 MiB, add#1 2.5 MiB"
    assert printed(text, 50) == [
        "layers.0",
        "  keeps       add 2.0 MiB, mlp.linear_fc1.mm",
        "              11.0 MiB, add#1 2.5 MiB",
    ]


def test_lines_that_fit_are_as_they_were() -> None:
    assert printed("[a]  b\n    c", 20) == ["[a]  b", "    c"]


def test_a_text_with_its_own_layout_has_at_least_80_columns() -> None:
    widths = [columns_of(Console(width=width, force_terminal=True)) for width in (40, 80, 132)]
    assert widths == [80, 80, 132]
    assert columns_of(Console(width=132, file=io.StringIO())) == 80
