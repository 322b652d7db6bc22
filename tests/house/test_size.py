"""No file and no function grows until one gets lost in it: maxima, because averages hide the worst."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "src").rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def long_functions(source: str) -> list[str]:
    """Functions of more than `MAX_FUNCTION_LINES` lines; the docstring is not counted."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            has_docstring = isinstance(first, ast.Expr) and ast.get_docstring(node) is not None
            docstring_lines = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
            num_lines = (node.end_lineno or 0) - node.lineno + 1 - docstring_lines
            if num_lines > MAX_FUNCTION_LINES:
                found.append(f"{node.name} (line {node.lineno}): {num_lines} lines")
    return found


def test_size() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
    num_lines = {name: source.count("\n") for name, source in sources.items()}
    assert {name: count for name, count in num_lines.items() if count > MAX_FILE_LINES} == {}
    found = {name: long_functions(source) for name, source in sources.items()}
    assert {name: functions for name, functions in found.items() if functions} == {}


def test_the_check_can_fail() -> None:
    assert FILES
    line = "    pass\n"
    body = line * MAX_FUNCTION_LINES
    docstring = "    '''One.\n\n    Two.\n    '''\n"
    assert long_functions(f"def fits():\n{docstring}{body.removesuffix(line)}") == []
    assert long_functions(f"class A:\n  def b(self):\n{body}") == [f"b (line 2): {MAX_FUNCTION_LINES + 1} lines"]
