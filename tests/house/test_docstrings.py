"""Docstrings keep up with signatures, and the public functions have all that a reader needs."""

import ast
import re
from pathlib import Path

import recollect

SOURCE = Path(__file__).parents[2] / "src"
FILES = sorted(SOURCE.rglob("*.py"))


Function = ast.FunctionDef | ast.AsyncFunctionDef


def section(docstring: str, title: str) -> str:
    """The indented text under a title such as "Args:"; empty if there is none."""
    match = re.search(rf"^{title}:[^\n]*\n((?:[ \t]+[^\n]*\n|\n)*)", docstring + "\n", re.MULTILINE)
    return match[1] if match else ""


def documented_arguments(docstring: str) -> list[str]:
    """The names in the section "Args:", without the stars."""
    return re.findall(r"^    \*{0,2}(\w+)(?:,|:)", section(docstring, "Args"), re.MULTILINE)


def arguments(function: Function) -> list[str]:
    """The names of the parameters in order, without self, cls, and those that begin with an underscore."""
    spec = function.args
    named = [*spec.posonlyargs, *spec.args, *([spec.vararg] if spec.vararg else []), *spec.kwonlyargs]
    named += [spec.kwarg] if spec.kwarg else []
    return [arg.arg for arg in named if arg.arg not in ("self", "cls") and not arg.arg.startswith("_")]


def stale_docstrings(source: str) -> list[str]:
    """Functions whose docstring has a section "Args:" that does not list the parameters in order."""
    stale = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        documented = documented_arguments(ast.get_docstring(node) or "")
        if documented and documented != arguments(node):
            stale.append(f"{node.name} (line {node.lineno}): documents {documented}, takes {arguments(node)}")
    return stale


def missing_parts(function: Function) -> list[str]:
    docstring = ast.get_docstring(function) or ""
    titles = ["Args"] if arguments(function) else []
    titles += ["Returns", "Example"]
    return [title for title in titles if not section(docstring, title)]


def test_documented_arguments_are_the_arguments() -> None:
    found = {str(path.relative_to(SOURCE)): stale_docstrings(path.read_text(encoding="utf-8")) for path in FILES}
    assert {name: functions for name, functions in found.items() if functions} == {}


def test_public_functions_are_documented_in_full() -> None:
    found = {name: missing_parts(public_function(name)) for name in recollect.__all__ if name.islower()}
    assert {name: parts for name, parts in found.items() if parts} == {}


def test_what_users_see_is_documented() -> None:
    """The linter asks it of classes; of methods it would ask inside, too, where a name may say it all."""
    missing = [
        f"{name}.{method.name}"
        for name in recollect.__all__
        if not name.islower()
        for method in getattr(public_node(name), "body", [])
        if isinstance(method, Function) and not method.name.startswith("_") and not ast.get_docstring(method)
    ]
    assert missing == []


def public_node(name: str) -> ast.stmt | None:
    home = recollect._HOME_OF_NAME.get(name)
    if home is None:
        return None
    tree = ast.parse(SOURCE.joinpath(*home.split(".")).with_suffix(".py").read_text(encoding="utf-8"))
    return next((node for node in tree.body if getattr(node, "name", None) == name), None)


def public_function(name: str) -> ast.FunctionDef:
    function = public_node(name)
    assert isinstance(function, ast.FunctionDef), name
    return function


def test_the_checks_can_fail() -> None:
    good = "\n".join(
        [
            "def f(self, a, *b, c=1, _d=2, **e):",
            '    """X.',
            "",
            "    Args:",
            "        a: one.",
            "            more: x.",
            "        *b: two.",
            "        c: three.",
            "        **e: four.",
            "",
            "    Example:",
            "        >>> f()",
            '    """',
        ]
    )
    assert stale_docstrings(good) == []
    assert stale_docstrings(good.replace("c: three", "d: three")) == [
        "f (line 1): documents ['a', 'b', 'd', 'e'], takes ['a', 'b', 'c', 'e']"
    ]
    (function,) = ast.parse(good).body
    assert isinstance(function, ast.FunctionDef)
    assert missing_parts(function) == ["Returns"]
