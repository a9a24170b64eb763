"""Count what a reader of the product has to know: lines, modules and folders, and the modules that commands use.

::

    python -m tests.acceptance.measure_size                        of this checkout
    python -m tests.acceptance.measure_size --tree ../before       of another one, such as a worktree of an older commit
    python -m tests.acceptance.measure_size -- run smoke           with what this command executes: it is run, in full

It prints one line for each count::

    product                                          64,278 lines  411 modules  49 folders
    imported by `t5-pretrain --version`              17 modules
    executed by `t5-pretrain run smoke --dry-run`    166 modules

Lines are all lines of the product's Python files; packages' ``__init__`` do not count as modules. A module is executed
if one of its functions is called by the command, in any thread of its own process. The exit code is the command's.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PRODUCT = ("t5train", "infra", "tasks", "flows")
_PROGRAM = """
import json, sys, threading
record, product, command = sys.argv[1], sys.argv[2].split(","), sys.argv[3:]
executed = set()
def note(frame, event, _):
    if event == "call" and frame.f_code.co_name != "<module>":
        executed.add(frame.f_code.co_filename)
from flows.cli import main
threading.setprofile(note)
sys.setprofile(note)
sys.argv = ["t5-pretrain", *command]
try:
    main()
finally:
    sys.setprofile(None)
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    ours = {name: file for name, file in files.items() if file and name.split(".")[0] in product}
    ours = {name: file for name, file in ours.items() if not file.endswith("__init__.py")}
    with open(record, "w") as file:
        json.dump({"imported": len(ours), "executed": len(executed & set(ours.values()))}, file)
"""


def use_of(tree: Path, command: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Run a command of t5-pretrain. Return how many modules it ``imported`` and ``executed``, and its exit code."""
    with TemporaryDirectory() as folder:
        record = Path(folder, "modules.json")
        arguments = [sys.executable, "-c", _PROGRAM, str(record), ",".join(PRODUCT), *command]
        ended = subprocess.run(arguments, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, stdout=2, check=False)
        return json.loads(record.read_text()), ended.returncode


def main() -> int:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[2], help="the checkout to measure")
    parser.add_argument("command", nargs="*", default=["run", "smoke", "--dry-run"], help="what to run, after --")
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    files = [path for package in PRODUCT for path in (tree / package).rglob("*.py")]
    lines, folders = sum(len(path.read_bytes().splitlines()) for path in files), {path.parent for path in files}
    modules = [path for path in files if path.name != "__init__.py"]
    print("product".ljust(48), f"{lines:,} lines  {len(modules)} modules  {len(folders)} folders", flush=True)
    for command, what in ((["--version"], "imported"), (arguments.command, "executed")):
        counts, code = use_of(tree, command)
        print(f"{what} by `t5-pretrain {' '.join(command)}`".ljust(48), f"{counts[what]} modules", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
