"""The digest of code depends on its modules, and on nothing else."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.node.code_bundle import bundle, own_bundle

ROOT = Path(__file__).parents[3]
GUARD = "infra/node/attempts/process_guard.py"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with two small packages."""
    for name in ("t5train/__init__.py", "t5train/data/shards.py", "infra/__init__.py", GUARD):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}: ß\n", "utf-8")
    return tmp_path


def test_the_bundle_depends_on_modules_and_not_on_times_modes_or_other_files(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first = bundle(checkout)
    other = shutil.copytree(checkout, tmp_path_factory.mktemp("other") / "place")
    for path in other.rglob("*.py"):
        os.utime(path, (1, 1))
        path.chmod(0o400)
    (other / "infra/__pycache__").mkdir()
    for name in ("infra/__pycache__/x.pyc", f"{GUARD}~", "infra/.#x.py", "infra/guard copy.py", "setup.py"):
        (other / name).write_text("else")
    assert bundle(other) == first


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / GUARD).write_text("x = 2\n"),
        lambda folder: (folder / GUARD).rename(folder / "infra/renamed.py"),
        lambda folder: (folder / "t5train/data/shards.py").unlink(),
        lambda folder: (folder / "infra/more.py").touch(),
    ],
)
def test_any_change_to_the_modules_changes_the_digest(checkout: Path, change: Callable[[Path], object]) -> None:
    first = bundle(checkout)
    change(checkout)
    assert bundle(checkout).digest != first.digest


def test_this_projects_bundle_contains_every_file_of_t5train_and_infra() -> None:
    sources = json.loads(own_bundle().content)
    found = {path for top in ("t5train", "infra") for path in (ROOT / top).rglob("*") if path.is_file()}
    # Hosts train, and neither tokenise nor serve, so they need no segmenter and no page.
    others = {".h", ".cpp", ".so", ".html"}
    found = {path for path in found if "__pycache__" not in path.parts and path.suffix not in others}
    assert {ROOT / name for name in sources} == found, "files that are not modules are not sent to hosts"
    assert sources[GUARD] == (ROOT / GUARD).read_text("utf-8")
