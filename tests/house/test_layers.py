"""Imports point down: a package imports only packages before it in the list, and no file imports itself by way of others."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
# From the bottom to the top; what stands beside the packages is named by its file.
LAYERS = (
    "byte_format",
    "lazy_names",
    "notebooks",
    "errors",
    "tracebacks",
    "garbage",
    "extras",
    "arguments",
    "quantities",
    "fields",
    "warning",
    "progress",
    "printing",
    "thread_end",
    "_torch_private",
    "_torch_settings",
    "_torch_memory",
    "_torch_functions",
    "_torch_dtensor",
    "_torch_fsdp",
    "_torch_replicate",
    "_torch_parallel",
    "_torch_reads",
    "_torch_dynamo",
    "_torch_compile",
    "weak_hooks",
    "weak_map",
    "tensors",
    "replay",
    "slots",
    "plans",
    "profile",
    "programs",
    "simulation",
    "planning",
    "pipelines",
    "measuring",
    "ranks",
    "engine",
    "costs",
    "loss",
    "applying",
    "recording",
    "observing",
    "verification",
    "fitting",
    "checkpointing",
    "sizing",
    "attaching",
    "capturing",
    "integrations",
    "doctor",
    "",  # the public names
    "lab",
    "pictures",
    "cli",
    "__main__",
)


# Loaded by name, when a notebook asks: data shows itself by a picture, which is drawn from data.
LOADED_WHEN_SHOWN = {"recollect.notebooks": "recollect.pictures.notebook"}


def modules(source: Path) -> dict[str, Path]:
    paths = {path.relative_to(source).with_suffix(""): path for path in source.rglob("*.py")}
    return {".".join(p.parts).removesuffix(".__init__"): path for p, path in paths.items()}


def imports(source: Path) -> dict[str, set[str]]:
    """The modules of the package that each one imports, if only for its types or inside a function."""
    known = modules(source)
    found: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found[name].update(alias.name for alias in node.names if alias.name in known)
            elif isinstance(node, ast.ImportFrom) and node.module in known:
                submodules = {f"{node.module}.{alias.name}" for alias in node.names} & known.keys()
                found[name].update(submodules or {node.module})
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                found[name].update(text for text in map(constant, node.args) if text in known)
        found[name].discard(name)
    return found


def constant(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def imports_at_start() -> dict[str, set[str]]:
    """Those of all modules, without what a notebook has loaded."""
    found = imports(SOURCE)
    for importing, imported in LOADED_WHEN_SHOWN.items():
        found[importing].remove(imported)
    return found


def layer(module: str) -> str:
    return module.removeprefix("recollect").removeprefix(".").partition(".")[0]


def arrows_up(graph: dict[str, set[str]]) -> list[str]:
    return sorted(
        f"{importing} imports {imported}"
        for importing, found in graph.items()
        for imported in found
        if LAYERS.index(layer(importing)) < LAYERS.index(layer(imported)) and layer(importing)
    )


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of imports; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_layer_is_listed() -> None:
    assert {layer(name) for name in modules(SOURCE)} == set(LAYERS)


def test_no_import_points_up() -> None:
    assert arrows_up(imports_at_start()) == []


def test_no_file_imports_itself_by_way_of_others() -> None:
    assert circle(imports_at_start()) == []


def test_imports_by_name_are_seen() -> None:
    assert arrows_up(imports(SOURCE)) == [f"{up} imports {down}" for up, down in LOADED_WHEN_SHOWN.items()]


def test_the_checks_can_fail() -> None:
    up = {"recollect.plans.plan": {"recollect.cli.entry"}, "recollect.cli.entry": {"recollect.plans.plan"}}
    assert arrows_up(up) == ["recollect.plans.plan imports recollect.cli.entry"]
    assert circle(up)[0] in up
