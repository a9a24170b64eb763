"""Help that a newcomer can use: panels, examples that are valid commands, versions, completion; all without torch.

The list of commands and the versions import next to nothing, so that they appear at once.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from flows.cli import __main__
from flows.cli.command_help import COMMANDS, Command, CommandGroup, imported
from t5train.files.run_folder import RUNS
from t5train.spec import setting_names
from t5train.spec.recipes import RECIPES

RunPython = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).parents[3]

IMPORTED = """
import atexit, sys

atexit.register(lambda: print("imported:", *sys.modules))
sys.argv[0] = "t5-pretrain"
from flows.cli import main
main()
"""
OWN = {"flows", "tasks", "infra", "t5train", "deployments"}


def single_commands(
    entries: Mapping[str, Command | CommandGroup], group: tuple[str, ...] = ()
) -> Iterator[tuple[str, Command]]:
    """The words of each command, and its entry."""
    for name, entry in entries.items():
        if isinstance(entry, Command):
            yield " ".join((*group, name)), entry
        else:
            yield from single_commands(entry.commands, (*group, name))


SINGLE_COMMANDS = dict(single_commands(COMMANDS))


def examples_of(command: str) -> list[str]:
    """The examples of a command or of a group."""
    entry = COMMANDS[command]
    if isinstance(entry, CommandGroup):
        return list(entry.examples)
    return [line.strip() for line in str(imported(command, entry).epilog).splitlines()[1:]]


@pytest.mark.parametrize("command", SINGLE_COMMANDS)
def test_a_list_of_commands_shows_the_first_line_of_the_help_of_each(command: str) -> None:
    listed: Any = typer.main.get_command(__main__.app)
    for word in command.split():
        listed = listed.commands[word]
    assert listed.help == imported(listed.name, SINGLE_COMMANDS[command]).help.splitlines()[0]


@pytest.mark.parametrize("example", [example for command in COMMANDS for example in examples_of(command)])
def test_an_example_is_a_valid_command(example: str) -> None:
    words = [word for word in shlex.split(example.partition(" > ")[0]) if not word.startswith("T5_PRETRAIN_")]
    assert words[0] == "t5-pretrain"
    command: Any = typer.main.get_command(__main__.app)
    arguments = words[1:]
    while hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    command.make_context("t5-pretrain", list(arguments))  # raises an error if the arguments are not valid


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of the usual width."""
    monkeypatch.setenv("COLUMNS", "80")


def test_help_lists_commands_in_panels_with_run_first(printed: Callable[..., str]) -> None:
    short = printed("-h")
    panels = re.findall(r"╭─ ([A-Z][a-z ]+) ─", short)
    assert panels == ["Options", "Train", "Single stages", "Operate"]
    assert short.index("│ run ") < short.index("│ init ") < short.index("│ recipes ")
    assert printed("--help") == short
    assert max(map(len, short.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_is_in_a_panel_fits_a_terminal_and_ends_with_its_examples(
    printed: Callable[..., str], command: str
) -> None:
    text, examples = printed(command, "-h"), examples_of(command)
    lines = [line.rstrip() for line in text.splitlines()]
    assert COMMANDS[command].panel
    assert examples
    assert all(f"t5-pretrain {command}" in example and len(example) <= 78 for example in examples)
    assert max(map(len, lines)) <= 80
    assert "<bool>" not in text
    assert all(f" {example}" in lines for example in examples)


def test_help_versions_and_configuration_files_need_neither_torch_nor_prefect(run_without: RunPython) -> None:
    def shown(*arguments: str) -> str:
        result = run_without("torch transformers deepspeed prefect", *arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert "Train" in shown("-h")
    assert "Examples:" in shown("run", "-h")
    assert shown("init", "smoke").startswith("# Settings of a run, from the recipe 'smoke'.")
    first, second = shown("--version").splitlines()
    assert re.fullmatch(r"t5-pretrain \d+\.\d+\.\d+", first)
    assert re.fullmatch(r"Python 3\.\d+\.\d+, torch \d\S*, deepspeed \d\S*, transformers \d\S*, prefect \S.*", second)


SLOW = {"prefect", "torch", "transformers", "deepspeed", "pyarrow", "numpy", "fsspec"}
SLOW |= {"sacrebleu", "rouge_score", "fastapi", "uvicorn"}


@pytest.mark.parametrize("words", [("--version",), ("--help",), ("data", "--help"), ("data", "index"), ("nonsense",)])
def test_a_list_of_commands_and_the_versions_import_next_to_nothing(
    run_python: RunPython, words: tuple[str, ...]
) -> None:
    modules = run_python(IMPORTED, *words).stdout.rpartition("imported: ")[2].split()
    own = [module for module in modules if module.partition(".")[0] in OWN]
    assert "flows.cli.command_help" in own
    assert not SLOW & {*modules}
    assert len(own) <= 30, own


def completed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str) -> list[str]:
    """What bash offers at the end of a line."""
    words = line.split(" ")
    monkeypatch.setenv("_T5_PRETRAIN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    with pytest.raises(SystemExit):
        __main__.app(prog_name="t5-pretrain")
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("t5-pretrain in", ["init"]),
        ("t5-pretrain run zero", [name for name in RECIPES if name.startswith("zero")]),
        ("t5-pretrain init ", list(RECIPES)),
        ("t5-pretrain run smoke --set ", [f"{name}=" for name in setting_names()]),
        ("t5-pretrain run smoke --set optimizer.se", ["optimizer.seed=", "optimizer.seed=..."]),
        (
            "t5-pretrain train smoke --set optimizer.prec",
            ["optimizer.precision=", *(f"optimizer.precision={each}" for each in ("fp32", "bf16", "fp16"))],
        ),
        ("t5-pretrain init smoke --set layout.zero_stage=", [f"layout.zero_stage={stage}" for stage in range(4)]),
        ("t5-pretrain init smoke --set model.compile=t", ["model.compile=true"]),
        ("t5-pretrain init smoke --set cluster.accelerator=c", ["cluster.accelerator=cpu", "cluster.accelerator=cuda"]),
        ("t5-pretrain init smoke --set nothing=", []),
    ],
)
def test_a_shell_completes_commands_recipes_and_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, offered: list[str]
) -> None:
    assert completed(monkeypatch, capsys, line) == offered


@pytest.mark.parametrize("command", ["status", "rm", "board"])
def test_a_shell_completes_the_names_of_runs_under_the_given_root(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    line = f"t5-pretrain {command} --root {tmp_path} wiki-"
    assert completed(monkeypatch, capsys, line) == []
    for name in ("wiki-base", "wiki-large", "smoke-1a2b3c4d"):
        (tmp_path / RUNS / name).mkdir(parents=True)
    assert completed(monkeypatch, capsys, line) == ["wiki-base", "wiki-large"]


def test_completion_is_installed_for_the_shell_it_is_called_from(tmp_path: Path) -> None:
    program = f"{shlex.quote(sys.executable)} -m flows.cli --install-completion; exit $?"
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-c", program], env=environment, capture_output=True, check=True, timeout=60)
    assert "completion" in (tmp_path / ".bashrc").read_text()
