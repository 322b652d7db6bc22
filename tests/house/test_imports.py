"""The planner and the data it works on run where PyTorch is not installed; private names of PyTorch are in three files."""

import ast
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
TORCH_FREE_FILES = sorted(
    path
    for pattern in (
        "__init__.py",
        "byte_format.py",
        "costs/hardware*.py",
        "costs/roofline.py",
        "doctor/**/*.py",
        "errors.py",
        "fields.py",
        "integrations/deepspeed/section.py",
        "integrations/megatron/**/*.py",
        "integrations/nearest.py",
        "integrations/torchtitan_settings.py",
        "lab/bench/model_flops.py",
        "lab/bench/race.py",
        "lab/bench/report.py",
        "lab/bench/results.py",
        "lab/bench/settings.py",
        "pictures/**/*.py",
        "planning/**/*.py",
        "plans/**/*.py",
        "profile/**/*.py",
        "progress.py",
        "quantities.py",
        "replay.py",
        "simulation/**/*.py",
    )
    for path in (SOURCE / "recollect").glob(pattern)
)
# All in one process: a module that loads PyTorch raises, and is not there for those that import it either.
PROGRAM = """
import importlib, importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch was imported")

sys.meta_path.insert(0, Refuse())
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ImportError as error:
        print(f"{module}: {error}")
"""


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def problems_without_torch(modules: list[str]) -> list[str]:
    """Import modules where PyTorch cannot be; return those that need it, with what they raise."""
    command = [sys.executable, "-c", PROGRAM, *modules]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_modules_do_not_import_torch() -> None:
    assert len(TORCH_FREE_FILES) > 50
    assert problems_without_torch([module_name(path) for path in TORCH_FREE_FILES]) == []


def test_the_check_can_fail() -> None:
    modules = ["recollect.quantities", "recollect.measuring.meter", "recollect.measuring.device_memory"]
    assert problems_without_torch(modules) == [f"{module}: torch was imported" for module in modules[1:]]


def test_importing_the_package_is_light() -> None:
    program = (
        "import sys, recollect; print([name for name in ('torch', 'numpy', 'scipy', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_recording_does_not_import_the_compiler() -> None:
    program = """
import sys, torch, recollect
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
recollect.fit(model, torch.randn(4, 8), "90%", loss_fn=torch.sum)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", "each takes a second"


def private_torch_imports(source: str) -> list[str]:
    """Imports of private names of PyTorch: those with a part that begins with an underscore."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found += [name for name in names if name.startswith("torch.") and any(p[0] == "_" for p in name.split("."))]
    return found


def test_private_names_of_torch_are_imported_in_nine_files() -> None:
    found = {
        str(path.relative_to(SOURCE)): private_torch_imports(path.read_text(encoding="utf-8"))
        for path in (SOURCE / "recollect").rglob("*.py")
    }
    files = sorted(name for name, imported in found.items() if imported)
    assert files == [
        f"recollect/_torch_{name}.py"
        for name in ("compile", "dtensor", "dynamo", "fsdp", "functions", "memory", "parallel", "private", "reads")
    ]


def test_the_check_for_private_names_can_fail() -> None:
    assert private_torch_imports("from torch._C import x\nimport torch.utils._pytree\nimport torch.utils.data\n") == [
        "torch._C.x",
        "torch.utils._pytree",
    ]
