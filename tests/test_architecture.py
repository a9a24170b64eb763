"""Rules of the source tree: which package may import which, how large modules may be, and that none keeps state."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
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
ABOVE = {  # packages of its own layer that each package may not import
    "infra.node": ("infra.head", "infra.testcluster"),
    "infra.head": ("infra.testcluster",),
    "infra.testcluster": ("infra.head",),
    "flows": ("flows.cli",),
}
RUNS_ON_NODES = ("infra.node", "t5train.files", "t5train.errors", "t5train.progress")
RUNS_ON_NODES += ("t5train.host_resources", "t5train.quantities")
LAZY_IMPORTS = {  # imported only inside functions, when the head or a rank needs it
    "infra.node.compiled_operators": {"deepspeed"},
    "infra.node.inspection.hardware": {"torch"},
    "infra.node.inspection.all_reduce": {"torch"},
    "infra.node.inspection.software": {"t5train.spec", "t5train.records.identity", "t5train.records.metrics"},
    "infra.node.inspection.network_interfaces": {"psutil"},
    "infra.node.stages.dask_settings": {"dask", "distributed"},
    "infra.node.stages.dask_worker": {
        *("distributed", "t5train.data.worker_processes", "t5train.data.native.segmenter_build")
    },
    "infra.node.stages.predictor": {
        *("torch", "t5train.data.worker_processes", "t5train.inference.model_folder"),
        "t5train.inference.predict.devices",
    },
}
KERNELS = ("t5train.engine.fused_update", "t5train.engine.partition_update", "t5train.engine.update_kernels")
KERNELS += ("t5train.model.kernels.",)
MAX_MODULES = 16
WATCHED = {*LAYERS, "prefect"}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
MAX_LINES = 400
CONTAINERS = {"list", "dict", "set", "deque", "defaultdict", "Counter", "ExitStack"}

RunPython = Callable[..., subprocess.CompletedProcess[str]]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> str:
    return module.partition(".")[0]


MODULES = {module_name(path): path for top in LAYERS for path in sorted((ROOT / top).rglob("*.py"))}
LIBRARY = [name for name in MODULES if layer(name) in {"t5train", "infra"}]
RUNNABLE = [name for name in MODULES if not name.endswith("__main__")]


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text("utf-8"), name)


@cache
def imported(name: str) -> list[str]:
    """Dotted names of the modules that a module imports, at its top or inside a function."""
    return list(_imported(name))


def _imported(name: str) -> Iterator[str]:
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively: absolute imports can be searched for"
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in MODULES else node.module


def test_each_layer_imports_only_itself_and_the_layers_below() -> None:
    upward = {name: ({layer(each) for each in imported(name)} & WATCHED) - LAYERS[layer(name)] for name in MODULES}
    assert not {name: layers for name, layers in upward.items() if layers}


def test_modules_form_no_import_cycle() -> None:
    graph = {name: {module for module in imported(name) if module in MODULES} for name in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


def children_of(package: str) -> dict[str, set[str]]:
    """Map each module and package directly below a package to the others of these that it imports."""
    found: dict[str, set[str]] = {}
    for name in MODULES:
        if name.startswith(f"{package}."):
            child = name.removeprefix(f"{package}.").partition(".")[0]
            below = {each for each in imported(name) if each.startswith(f"{package}.")}
            others = {each.removeprefix(f"{package}.").partition(".")[0] for each in below}
            found.setdefault(child, set()).update(others - {child})
    return found


PACKAGES = sorted({name.rpartition(".")[0] for name in MODULES if "." in name})


def test_siblings_in_a_package_form_no_import_cycle() -> None:
    cycles = {}
    for package in PACKAGES:
        try:
            TopologicalSorter(children_of(package)).prepare()
        except CycleError as error:
            cycles[package] = error.args[1]
    assert not cycles


def test_lower_packages_do_not_import_higher_ones() -> None:
    upward = {
        name: {each for each in imported(name) if each.startswith(above)}
        for package, above in ABOVE.items()
        for name in MODULES
        if name.startswith(package) and not name.startswith(above)
    }
    assert not {name: found for name, found in upward.items() if found}


def is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def imports_of(module: ast.Module) -> Iterator[tuple[str, bool]]:
    """Names that a module imports, each with whether the import is at its top. Omits typing-only imports."""
    nested = {
        id(node)
        for top in module.body
        for node in ast.walk(top)
        if isinstance(top, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    typing_only = {
        id(node)
        for top in module.body
        if isinstance(top, ast.If) and ast.unparse(top.test) == "TYPE_CHECKING"
        for statement in top.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(module):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in nested) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield (submodule if submodule in MODULES else node.module), id(node) not in nested


def is_on_nodes(module: str) -> bool:
    return module in {"infra", "t5train"} or any(
        module == each or module.startswith(f"{each}.") for each in RUNS_ON_NODES
    )


def test_code_that_runs_on_nodes_needs_only_the_standard_library() -> None:
    leaving = {
        name: found
        for name in MODULES
        if is_on_nodes(name)
        and (
            found := {
                module
                for module, at_top in imports_of(tree(name))
                if not is_standard(module)
                and not is_on_nodes(module)
                and (at_top or not module.startswith(tuple(LAZY_IMPORTS.get(name, ()))))
            }
        )
    }
    assert not leaving


def test_module_names_are_unique() -> None:
    stems = [path.stem for path in MODULES.values() if not path.stem.startswith("__")]
    assert not [stem for stem, count in Counter(stems).items() if count > 1]


def test_no_package_has_too_many_modules() -> None:
    assert not {package: names for package in PACKAGES if len(names := children_of(package)) > MAX_MODULES}


def test_every_package_docstring_says_what_belongs_elsewhere() -> None:
    packages = [name for name, path in MODULES.items() if path.stem == "__init__"]
    assert not [name for name in packages if "Not here:" not in (ast.get_docstring(tree(name)) or "")]


def test_every_module_has_a_docstring_a_specific_name_and_few_lines() -> None:
    assert not [name for name in MODULES if not ast.get_docstring(tree(name))], "these have no docstring"
    assert not [name for name, path in MODULES.items() if path.stem in VAGUE_NAMES]
    paths = MODULES | {str(path): path for path in (ROOT / "tests").rglob("*.py")}
    lines = {name: len(path.read_text("utf-8").splitlines()) for name, path in paths.items()}
    too_long = {name: count for name, count in lines.items() if count > MAX_LINES}
    assert not too_long, "split each of these modules"


def module_state(module: ast.Module) -> Iterator[str]:
    """Statements that keep state between calls: ``global``, context variables, and initially empty containers."""
    yield from (ast.unparse(node) for node in ast.walk(module) if isinstance(node, ast.Global))
    for node in module.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Call):
            name = ast.unparse(value.func).partition("[")[0].rpartition(".")[2]
            is_state = name == "ContextVar" or (name in CONTAINERS and not value.args)
        else:
            is_state = isinstance(value, ast.List | ast.Dict) and not ast.unparse(value).strip("[]{}")
        if is_state:
            yield ast.unparse(node)


def test_no_module_keeps_state() -> None:
    kept = {name: list(module_state(tree(name))) for name in MODULES}
    assert not {name: state for name, state in kept.items() if state}, (
        "keep this state in an object, and pass the object on"
    )


@pytest.mark.parametrize("code", ["x = {}", "x: dict[str, int] = {}", "x = set[str]()", "x = ContextVar('x')"])
def test_module_state_is_detected(code: str) -> None:
    assert list(module_state(ast.parse(code)))


def device_bound(module: ast.AST) -> Iterator[int]:
    """Lines that work with one vendor's accelerators only, unlike the accelerator interfaces of DeepSpeed and torch."""
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            yield node.lineno
        if isinstance(node, ast.Import | ast.ImportFrom) and "torch.cuda" in ast.unparse(node):
            yield node.lineno
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.lower() == "nccl":
            yield node.lineno


def test_the_library_is_not_bound_to_one_vendors_accelerators() -> None:
    bound = {name: list(device_bound(tree(name))) for name in LIBRARY}
    assert not {name: lines for name, lines in bound.items() if lines}


@pytest.mark.parametrize("code", ["torch.cuda.synchronize()", "x.cuda()", "import torch.cuda", "f(backend='nccl')"])
def test_a_device_bound_line_is_detected(code: str) -> None:
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


@pytest.mark.slow
def test_the_library_can_be_imported_without_prefect_and_without_triton(run_python: RunPython) -> None:
    modules = [name for name in LIBRARY if name in RUNNABLE and not name.startswith(KERNELS)]
    import_without(run_python, "prefect,triton", modules)


def test_the_head_does_not_import_torch(run_python: RunPython) -> None:
    light = ("t5train.spec", "t5train.records", "t5train.data", "t5train.files")
    light += tuple(f"t5train.release.{name}" for name in ("publication", "verification", "certificate", "object_store"))
    light += tuple(f"t5train.checkpoint.{name}" for name in ("sidecar", "tags", "retention", "resume", "resume_point"))
    light += ("t5train.model.parameters", "t5train.model.model_shape", "t5train.engine.memory_estimate")
    light += ("t5train.report",)
    modules = [name for name in RUNNABLE if layer(name) != "t5train" or name.startswith(light)]
    import_without(run_python, "torch,deepspeed,transformers", modules)


def test_a_blocked_import_is_detected(run_python: RunPython) -> None:
    result = run_python(IMPORT_BLOCKING, "json", "t5train.spec")
    assert "json is blocked" in result.stderr
