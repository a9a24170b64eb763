"""The house rules that a reader relies on without being able to see them: who imports whom, and what stays small."""

import ast
import subprocess
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {
    "t5train": {"t5train"},
    "infra": {"infra", "t5train"},
    "deployments": {"deployments"},
    "tasks": {"tasks", "infra", "t5train", "prefect"},
    "flows": {"flows", "tasks", "infra", "t5train", "prefect", "deployments"},
}
WATCHED = {*LAYERS, "prefect"}
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
MOST_LINES = 400

RunPython = Callable[..., subprocess.CompletedProcess[str]]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> str:
    return module.partition(".")[0]


MODULES = {module_name(path): path for top in LAYERS for path in sorted((ROOT / top).rglob("*.py"))}
TREES = {name: ast.parse(path.read_text("utf-8"), str(path)) for name, path in MODULES.items()}
LIBRARY = [name for name in MODULES if layer(name) in {"t5train", "infra"}]
RUNNABLE = [name for name in MODULES if not name.endswith("__main__")]


def imported(name: str) -> Iterator[str]:
    """Modules that a module imports, at its top or inside a function, as dotted names."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively: absolute imports can be searched for"
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in MODULES else node.module


def test_imports_run_one_way() -> None:
    upward = {name: ({layer(each) for each in imported(name)} & WATCHED) - LAYERS[layer(name)] for name in MODULES}
    assert not {name: layers for name, layers in upward.items() if layers}


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {name: {module for module in imported(name) if module in MODULES} for name in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


def test_every_module_says_what_it_is_and_stays_small() -> None:
    assert not [name for name in MODULES if not ast.get_docstring(TREES[name])], "these have no docstring"
    assert not [name for name, path in MODULES.items() if path.stem in NAMES_THAT_SAY_NOTHING]
    lines = {name: len(path.read_text("utf-8").splitlines()) for name, path in MODULES.items()}
    too_long = {name: count for name, count in lines.items() if count > MOST_LINES}
    assert not too_long, "an idea in each of these wants its own module"


def device_bound(tree: ast.AST) -> Iterator[int]:
    """Lines that work on one maker's accelerator only; DeepSpeed's and torch's accelerator interfaces work on all."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            yield node.lineno
        if isinstance(node, ast.Import | ast.ImportFrom) and "torch.cuda" in ast.unparse(node):
            yield node.lineno
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.lower() == "nccl":
            yield node.lineno


def test_the_library_is_bound_to_no_one_kind_of_accelerator() -> None:
    bound = {name: list(device_bound(TREES[name])) for name in LIBRARY}
    assert not {name: lines for name, lines in bound.items() if lines}


@pytest.mark.parametrize("code", ["torch.cuda.synchronize()", "x.cuda()", "import torch.cuda", "f(backend='nccl')"])
def test_a_device_bound_line_is_found(code: str) -> None:
    assert list(device_bound(ast.parse(code)))


IMPORT_BLOCKING = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

blocked = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Blocker())
for module in sys.argv[2:]:
    importlib.import_module(module)
"""


def import_without(run_python: RunPython, blocked: str, modules: list[str]) -> None:
    result = run_python(IMPORT_BLOCKING, blocked, *modules)
    assert result.returncode == 0, result.stderr


def test_the_library_is_imported_where_prefect_is_not_installed(run_python: RunPython) -> None:
    import_without(run_python, "prefect", [name for name in LIBRARY if name in RUNNABLE])


def test_the_orchestrating_host_imports_no_torch(run_python: RunPython) -> None:
    light = {"t5train.spec", "t5train.recipes", "t5train.records", "t5train.publish"}
    modules = [
        name for name in RUNNABLE if layer(name) != "t5train" or name in light or name.startswith("t5train.data")
    ]
    import_without(run_python, "torch,deepspeed,transformers", modules)


def test_a_blocked_import_is_noticed(run_python: RunPython) -> None:
    result = run_python(IMPORT_BLOCKING, "json", "t5train.spec")
    assert "json is blocked" in result.stderr
