"""No code in Python runs where an object dies: an interrupt of the program that came there would be printed and forgotten."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src"
RUN_CODE = {"finalize", "WeakMethod", "WeakSet", "WeakKeyDictionary", "WeakValueDictionary"}
# Copies have to be over before their memory is free; the rest is rare (ends of threads, the multipliers of 8-bit products), or
# runs no code in Python: a dict's `pop`, at the end of a deep copy.
EXCEPT = {
    "engine/offload/carriers.py", "engine/offload/flight.py", "engine/offload/offloaded.py", "thread_end.py",
    "lab/models/fp8.py", "engine/placed_forward.py",
}  # fmt: skip


def destructors(source: str) -> list[str]:
    """Functions and weak references of a module that run code in Python when an object dies."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            found.append(node.name)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func).removeprefix("weakref.").partition("[")[0]
            if called in RUN_CODE or (called == "ref" and len(node.args) > 1):
                found.append(called)
    return found


def test_no_code_runs_where_an_object_dies() -> None:
    found = {str(path.relative_to(ROOT / "recollect")): destructors(path.read_text()) for path in ROOT.rglob("*.py")}
    assert {name for name, its in found.items() if its} == EXCEPT


def test_the_check_can_fail() -> None:
    source = "class A:\n  def __del__(self): ...\nseen = WeakSet[A]()\nweakref.ref(a, print), weakref.ref(a)"
    assert sorted(destructors(source)) == ["WeakSet", "__del__", "ref"]
