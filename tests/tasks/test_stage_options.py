"""The user's settings of Prefect do not change what flows and tasks do."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import flows
import tasks
from tests.support.prefect_servers import HOSTILE

DECLARED = """
import importlib, json, pkgutil
import flows, tasks
from prefect import Flow, Task

found = {}
for package in (flows, tasks):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.name.rpartition(".")[2] != "__main__":
            for name, each in vars(importlib.import_module(module.name)).items():
                if isinstance(each, Flow | Task):
                    found[f"{type(each).__name__} {each.name}"] = {
                        "retries": each.retries, "retry_delay_seconds": each.retry_delay_seconds,
                        "persist_result": each.persist_result, "result_storage": str(each.result_storage),
                        "result_serializer": each.result_serializer, "log_prints": each.log_prints,
                        "timeout_seconds": each.timeout_seconds,
                    } | ({"refresh_cache": each.refresh_cache} if isinstance(each, Task) else {})
print(json.dumps(found))
"""
OPTIONS = {
    "retries": 0,
    "retry_delay_seconds": 0,
    "persist_result": False,
    "result_storage": os.devnull,
    "result_serializer": "pickle",
    "log_prints": False,
    "timeout_seconds": None,
}


def test_every_flow_and_task_has_its_options_whatever_the_users_settings_are(tmp_path: Path) -> None:
    environment = os.environ | HOSTILE | {"PREFECT_HOME": str(tmp_path)}
    command = [sys.executable, "-P", "-c", DECLARED]
    made = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    found = json.loads(made.stdout)
    assert {"Flow t5-pretrain", "Flow t5-regression", "Task Train", "Task Run a case", "Task Publish"} <= found.keys()
    for name, options in found.items():
        wanted = OPTIONS | ({"retry_delay_seconds": 5} if name == "Task Train" else {})
        assert options == wanted | ({"refresh_cache": False} if name.startswith("Task") else {}), name


def test_every_decorator_that_makes_a_flow_or_a_task_is_given_the_options() -> None:
    seen = []
    for package in (flows, tasks):
        for path in Path(package.__path__[0]).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("flow", "task"):
                    unpacked = [ast.unparse(each.value) for each in node.keywords if each.arg is None]
                    seen.append(path.name)
                    assert f"{node.func.id.upper()}_OPTIONS" in " ".join(unpacked), f"{path}, line {node.lineno}"
                names = [ast.unparse(each) for each in getattr(node, "decorator_list", [])]
                assert not {"flow", "task"} & set(names), f"{path}: a decorator without options"
    assert sorted(seen) == ["finetune.py", "pretrain.py", "regression.py", "regression_tasks.py", "stages.py"]
