"""Files of every format give the same rows, with the prefix of their task; what is not clear is refused."""

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from t5train.errors import InputError, SpecError
from t5train.inference.predict.source_rows import DOUBLED, PREFIXES_MISSING, SourceRow, source_files, source_rows
from t5train.progress import silent

TASKS = {"up": "raise: ", "down": "lower: "}
SOURCES, TARGETS = ["a b", "ü, c"], ["A B", "Ü, C"]


def _write(folder: Path, ending: str) -> Path:
    file = folder / f"rows{ending}"
    pairs = [{"source": source, "target": target} for source, target in zip(SOURCES, TARGETS, strict=True)]
    if ending == ".parquet":
        pq.write_table(pa.Table.from_pylist(pairs), file)
        return file
    lines = {
        ".jsonl": [json.dumps(each) for each in pairs],
        ".json": [json.dumps(each) for each in pairs],
        ".tsv": ["source\ttarget", *("\t".join(each.values()) for each in pairs)],
        ".csv": ["source,target", *(",".join(f'"{text}"' for text in each.values()) for each in pairs)],
        ".txt": SOURCES,
    }
    file.write_text("\n".join(lines[ending]), "utf-8")
    return file


def _rows(named: str, tasks: dict[str, str], counts: Counter[str] | None = None) -> list[SourceRow]:
    files = source_files(named, tasks, Path("unused"), silent)
    return list(source_rows([files], tasks, Counter() if counts is None else counts))


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".tsv", ".csv", ".parquet", ".txt"])
def test_files_of_every_format_give_the_same_rows(tmp_path: Path, ending: str) -> None:
    references = [None, None] if ending == ".txt" else TARGETS
    found = _rows(f"{_write(tmp_path, ending)}#task=up", TASKS)
    assert found == [
        SourceRow(str(number + 1), "up", f"raise: {source}", reference)
        for number, (source, reference) in enumerate(zip(SOURCES, references, strict=True))
    ]


@pytest.mark.parametrize(
    ("choices", "tasks", "task", "prefix"),
    [
        ("#task=down", TASKS, "down", "lower: "),
        ("#task=down&prefix=other: ", TASKS, "down", "other: "),
        ("#prefix=", TASKS, None, ""),
        ("", {"up": "raise: "}, "up", "raise: "),
        ("", {}, None, ""),
        ("#task=mine", {}, "mine", ""),
        ("#task=mine&prefix=do: ", TASKS, "mine", "do: "),
    ],
)
def test_the_prefix_is_the_recorded_one_of_the_task_unless_one_is_given(
    tmp_path: Path, choices: str, tasks: dict[str, str], task: str | None, prefix: str
) -> None:
    first = _rows(f"{_write(tmp_path, '.txt')}{choices}", tasks)[0]
    assert (first.task, first.source) == (task, f"{prefix}a b")


def test_nested_columns_are_read_and_a_missing_target_only_if_it_was_named(tmp_path: Path) -> None:
    file = tmp_path / "nested.jsonl"
    file.write_text(json.dumps({"translation": {"en": "a", "de": "b"}}))
    assert _rows(f"{file}#source=translation.en&target=translation.de", {})[0].reference == "b"
    assert _rows(f"{file}#source=translation.en", {})[0].reference is None
    with pytest.raises(InputError, match=r"no column 'translation\.fr'"):
        _rows(f"{file}#source=translation.en&target=translation.fr", {})


def test_sources_that_have_the_prefix_already_or_none_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "rows.txt"
    file.write_text("raise: a\nlower: b\nc\n")
    _rows(f"{file}#task=up", TASKS, counts := Counter())
    assert (counts[DOUBLED], counts[PREFIXES_MISSING]) == (1, 0)
    _rows(f"{file}#prefix=", TASKS, counts := Counter())
    assert (counts[DOUBLED], counts[PREFIXES_MISSING]) == (0, 1)


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        (
            "",
            "the model was fine-tuned on 2 tasks (up, down). Name that of the file (#task=NAME after it; of standard "
            "input, /dev/stdin#task=NAME)",
        ),
        ("#task=upp", "'upp' is none of the tasks that the model was fine-tuned on (up, down (did you mean 'up'?))"),
        ("#prefix=&source=x", "whose lines are sources: leave #source= out"),
        ("#prefix=&tusk=x", "but not 'tusk' (did you mean 'task'?)"),
    ],
)
def test_choices_that_are_not_clear_are_refused_in_one_line(tmp_path: Path, choices: str, said: str) -> None:
    with pytest.raises(SpecError) as raised:
        _rows(f"{_write(tmp_path, '.txt')}{choices}", TASKS)
    assert said in str(raised.value)
    assert "FILE" in str(raised.value)
    assert "pairs.train" not in str(raised.value)


@pytest.mark.parametrize("ending", [".txt", ".jsonl"])
def test_an_empty_source_is_refused_with_its_file_and_row(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"rows{ending}"
    file.write_text("a\n \nb\n" if ending == ".txt" else '{"source": "a"}\n{"source": null}\n')
    with pytest.raises(InputError, match=rf"rows\{ending} line 2 has an empty source"):
        _rows(str(file), {})


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.xyz", b"a", "FILE"),
        ("rows.jsonl", b"[1]\n", "line 1 is not an object"),
        ("rows.txt", b"caf\xe9\n", "line 1 is not UTF-8"),
        ("missing.jsonl", None, "does not exist"),
    ],
)
def test_files_that_cannot_be_read_are_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as raised:
        _rows(str(tmp_path / name), {})
    assert said in str(raised.value)
    assert "pairs.train" not in str(raised.value)
    assert "\n" not in str(raised.value)
