"""Random faults: an operator, a number, a condition, a result or a statement of the sources, changed at a random place."""

from __future__ import annotations

import ast
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

__all__ = ["RandomFault", "random_faults"]

_OTHERS: dict[type[ast.AST], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("+",)),
    ast.Div: ("/", ("*",)),
    ast.FloorDiv: ("//", ("*",)),
    ast.Mod: ("%", ("*",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
    ast.And: ("and", ("or",)),
    ast.Or: ("or", ("and",)),
}
"""The text of each operator, and of those to put in its place."""


@dataclass(frozen=True)
class RandomFault:
    """A fault at one place of a file.

    Attributes:
        file: its path in the repository.
        line: the number of the line that runs there.
        before: the line with the place.
        after: this line with the fault.
        text: the whole file with the fault.
    """

    file: str
    line: int
    before: str
    after: str
    text: str


def random_faults(root: Path, packages: Sequence[str], number: int, seed: int) -> list[RandomFault]:
    """Return faults at different places of packages of src/recollect, the same ones for the same sources and seed."""
    texts = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for package in packages
        for path in sorted((root / "src" / "recollect" / package).rglob("*.py"))
    }
    places = [(file, *change) for file, text in texts.items() for change in _Changes(text).found()]
    random.Random(seed).shuffle(places)
    faults: dict[tuple[str, int], RandomFault] = {}
    for file, line, begin, end, new in places:
        if len(faults) == number:
            break
        text = texts[file][:begin] + new + texts[file][end:]
        if (file, begin) not in faults and _compiles(text):
            row = texts[file].count("\n", 0, begin)
            before, after = (one.split("\n")[row].strip() for one in (texts[file], text))
            faults[file, begin] = RandomFault(file, line, before, after, text)
    return list(faults.values())


def _compiles(text: str) -> bool:
    try:
        compile(text, "fault", "exec")
    except SyntaxError:
        return False
    return True


class _Changes:
    """The changes that a file could get, as (line, begin, end, new text)."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = [line.encode() for line in text.split("\n")]
        self._starts = [0, *accumulate(len(line.decode()) + 1 for line in self._lines)]
        self._tree = ast.parse(text)
        spans = sorted(self._span(node) for node in self._left_out())
        self._out = [max(end for _, end in spans[: number + 1]) for number in range(len(spans))]
        self._out_begins = [begin for begin, _ in spans]

    def found(self) -> Iterator[tuple[int, int, int, str]]:
        for node in ast.walk(self._tree):
            for line, begin, end, new in self._of(node):
                number = bisect_right(self._out_begins, begin)
                if not number or self._out[number - 1] <= begin:
                    yield line, begin, end, new

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return self._position(node.lineno, node.col_offset), self._position(node.end_lineno, node.end_col_offset)

    def _position(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1][:column].decode())

    def _left_out(self) -> Iterator[ast.AST]:
        """Yield what tests need not notice: annotations, decorators, texts and errors' arguments, checks that only guard."""
        for node in ast.walk(self._tree):
            match node:
                case ast.FunctionDef(args=arguments, returns=returns, decorator_list=decorators):
                    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                    every += filter(None, (arguments.vararg, arguments.kwarg))
                    yield from filter(None, (returns, *(one.annotation for one in every), *decorators))
                case ast.ClassDef(decorator_list=decorators):
                    yield from decorators
                case ast.AnnAssign(annotation=annotation):
                    yield annotation
                case ast.keyword(arg="strict") | ast.Raise() | ast.Assert() | ast.JoinedStr():
                    yield node
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    yield node

    def _of(self, node: ast.AST) -> Iterator[tuple[int, int, int, str]]:
        match node:
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OTHERS:
                yield from self._operator(left, op, right)
            case ast.Compare(left=left, ops=ops, comparators=rights):
                for (one, other), op in zip(pairwise([left, *rights]), ops, strict=True):
                    yield from self._operator(one, op, other)
            case ast.BoolOp(op=op, values=values):
                for one, other in pairwise(values):
                    yield from self._operator(one, op, other)
            case ast.UnaryOp(op=ast.Not()):
                begin, _ = self._span(node)
                yield node.lineno, begin, begin + len("not "), ""
            case ast.Constant(value=bool() as value):
                yield node.lineno, *self._span(node), str(not value)
            case ast.Constant(value=int() as value):
                yield node.lineno, *self._span(node), str(value + 1)
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                begin, end = self._span(test)
                yield test.lineno, begin, end, f"(not ({self._text[begin:end]}))"
            # None says as much as False.
            case ast.Return(value=ast.Constant(value=False | None)):
                pass
            case ast.Return(value=ast.expr() as value):
                yield node.lineno, *self._span(value), "None"
            case ast.Expr(value=ast.Call()) | ast.Break() | ast.Continue():
                yield node.lineno, *self._span(node), "pass"

    def _operator(self, left: ast.AST, op: ast.AST, right: ast.expr) -> Iterator[tuple[int, int, int, str]]:
        text, others = _OTHERS[type(op)]
        begin = self._text.find(text, self._span(left)[1], self._span(right)[0])
        for new in others if begin >= 0 else ():
            yield right.lineno, begin, begin + len(text), new
