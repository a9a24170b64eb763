"""The stage of pairs: splits that do not leak, what is counted and shown, and a record that is reused."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5train.data.pairs import pairs as stage
from t5train.data.pairs.pair_sources import require_pair_source
from t5train.data.pairs.pairs import Pair, build_pairs, count_of, normalised, read_pairs, tasks_of
from t5train.data.passages import ODDITIES, SPLITS
from t5train.errors import InputError, SpecError
from t5train.progress import silent
from t5train.records.stage_records import Pairs
from t5train.spec import PairsSpec, build


def spec_of(**settings: Any) -> PairsSpec:
    return build({"recipe": "smoke", "pairs": settings}).pairs


def write(path: Path, pairs: Sequence[tuple[str, str]]) -> str:
    path.write_text("".join(json.dumps({"source": one, "target": other}) + "\n" for one, other in pairs))
    return str(path)


def numbered(count: int, first: int = 0) -> list[tuple[str, str]]:
    return [(f"source {number}", f"target {number}") for number in range(first, first + count)]


def all_pairs(pairs: Pairs, task: int = 0) -> dict[str, list[Pair]]:
    return {split: list(read_pairs(pairs, split, task)) for split in SPLITS}


def test_each_pair_is_in_one_split_with_the_prefix_of_its_task_and_in_the_order_of_its_file(tmp_path: Path) -> None:
    named = [write(tmp_path / f"{name}.jsonl", numbered(500)) + f"#prefix={name}: " for name in "ab"]
    made = build_pairs(spec_of(train=named, split=[800, 120, 80]), tmp_path / "root")
    assert tasks_of(made) == [("a", "a: "), ("b", "b: ")]
    for number, name in enumerate("ab"):
        found = all_pairs(made, number)
        wanted = [Pair(f"{name}: {source}", target) for source, target in numbered(500)]
        assert sorted(pair for pairs in found.values() for pair in pairs) == sorted(wanted)
        for split, pairs in found.items():
            assert pairs == [pair for pair in wanted if pair in pairs]
            assert len(pairs) == count_of(made, f"{split}_pairs", number) == made.counts[f"{split}_pairs"] / 2
            share = {"train": 400, "validation": 60, "test": 40}[split]
            assert abs(len(pairs) - share) < 30


def test_the_split_of_a_source_does_not_depend_on_other_pairs_or_their_order(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", numbered(300))
    write(tmp_path / "b.jsonl", numbered(200)[::-1])
    one, other = (build_pairs(spec_of(train=str(tmp_path / name)), tmp_path) for name in ("a.jsonl", "b.jsonl"))
    assert one.fingerprint != other.fingerprint
    for split in SPLITS:
        assert set(all_pairs(other)[split]) == set(all_pairs(one)[split]) & {Pair(*each) for each in numbered(200)}


@given(
    source=st.text(st.characters(exclude_categories=["Cs"])),
    space=st.text(st.sampled_from(" \t\n\u00a0"), min_size=1),
)
def test_case_white_space_and_unicode_forms_make_no_other_source(source: str, space: str) -> None:
    assert normalised(f"{space}{source}{space}") == normalised(source)
    assert normalised(normalised(source)) == normalised(source)
    assert normalised("Caf\u00e9  DE") == normalised("cafe\u0301 de")
    assert normalised(source + "x") != normalised(source)


def test_equal_sources_are_in_one_split_whatever_their_task(tmp_path: Path) -> None:
    sources = [f"{number}" for number in range(400)]
    plain = write(tmp_path / "plain.jsonl", [(f"Word {each}", each) for each in sources])
    loud = write(tmp_path / "loud.jsonl", [(f" WORD  {each}", each) for each in sources])
    made = build_pairs(spec_of(train=[f"{plain}#prefix=a: ", f"{loud}#prefix=b: "]), tmp_path)
    for split in SPLITS:
        one, other = ({pair.target for pair in read_pairs(made, split, task)} for task in (0, 1))
        assert one == other


def test_pairs_whose_reverse_is_held_out_are_counted_and_removed_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", [(f"Source {number}", f"Target {number}") for number in range(2000)])
    directions = [f"{path}#task=there", f"{path}#task=back&source=target&target=source"]

    def leaked(made: Pairs) -> list[int]:
        there, back = (
            {split: {frozenset(pair) for pair in pairs} for split, pairs in all_pairs(made, task).items()}
            for task in (0, 1)
        )
        return [len(one["train"] & (two["validation"] | two["test"])) for one, two in ((there, back), (back, there))]

    kept = build_pairs(spec_of(train=directions), tmp_path)
    assert leaked(kept) == [count_of(kept, "contaminated_pairs", task) for task in (0, 1)]
    assert min(leaked(kept)) > 50
    assert "or are held out of the task of the other direction" in caplog.text
    cleaned = build_pairs(spec_of(train=directions, remove="contaminated"), tmp_path)
    assert leaked(cleaned) == [0, 0]
    assert [count_of(cleaned, "removed_pairs", task) for task in (0, 1)] == leaked(kept)
    for split in ("validation", "test"):
        assert [list(read_pairs(made, split, 1)) for made in (kept, cleaned)] == [all_pairs(kept, 1)[split]] * 2


def test_files_of_a_split_are_taken_as_they_are_and_their_share_is_trained_on(tmp_path: Path) -> None:
    train, held_out = write(tmp_path / "a.jsonl", numbered(300)), write(tmp_path / "b.jsonl", numbered(50, 1000))
    found = all_pairs(build_pairs(spec_of(train=f"{train}#prefix=p ", validation=held_out), tmp_path))
    assert found["validation"] == [Pair(f"p {source}", target) for source, target in numbered(50, 1000)]
    by_hash = all_pairs(build_pairs(spec_of(train=f"{train}#prefix=p "), tmp_path))
    assert found["test"] == by_hash["test"] != []
    assert set(found["train"]) == {*by_hash["train"], *by_hash["validation"]}


def test_sources_that_are_also_in_held_out_files_are_counted_and_removed_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = write(tmp_path / "a.jsonl", numbered(300))
    test = write(tmp_path / "b.jsonl", [("SOURCE  7", "other"), ("source 9", "target 9"), ("new", "new")])
    kept = build_pairs(spec_of(train=train, test=test), tmp_path)
    assert count_of(kept, "contaminated_pairs", 0) == 2
    assert "task 'a': 2 pairs of pairs.train have a source that is also in" in caplog.text
    cleaned = build_pairs(spec_of(train=train, test=test, remove="contaminated"), tmp_path)
    assert (count_of(cleaned, "contaminated_pairs", 0), count_of(cleaned, "removed_pairs", 0)) == (0, 2)
    targets = {pair.target for split in ("train", "validation") for pair in read_pairs(cleaned, split, 0)}
    assert {target for _, target in numbered(300)} - targets == {"target 7", "target 9"}


def test_sources_to_validate_with_that_are_also_tested_are_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train, validation, test = (
        write(tmp_path / f"{name}.jsonl", pairs)
        for name, pairs in {
            "a": numbered(9),
            "b": numbered(20, 100),
            "c": [*numbered(5, 110), ("SOURCE 110", "")],
        }.items()
    )
    made = build_pairs(spec_of(train=train, validation=validation, test=test), tmp_path)
    assert "task 'a': 5 pairs of pairs.validation have a source that is also in pairs.test" in caplog.text
    assert made.counts["contaminated_pairs"] == 0


def test_what_may_be_wrong_with_pairs_is_counted_and_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    odd = [("", "x"), ("x", " \n"), ("do: it", "it"), *[("again", "and again <extra_id_0>")] * 3]
    a = write(tmp_path / "a.jsonl", [*numbered(200), *odd]) + "#prefix=do: "
    b = write(tmp_path / "b.jsonl", numbered(200))
    made = build_pairs(spec_of(train=[a, b]), tmp_path)
    assert "task 'a': 2 of 206 pairs have an empty source or target, and are skipped" in caplog.text
    assert "task 'a': 1 of 206 sources begin with the prefix 'do: ' in their files already" in caplog.text
    assert f"task 'a': 2 of {count_of(made, 'train_pairs', 0)} pairs to train on repeat an earlier one" in caplog.text
    assert "task 'a': 3 of 206 pairs have </s>, <pad>, <unk> or <extra_id_N> as plain text" in caplog.text
    assert "task 'b'" not in caplog.text
    caplog.clear()
    build_pairs(spec_of(train=[a.partition("#")[0], b]), tmp_path)
    assert "task 'a': 1 of the other tasks cannot be told apart from it" in caplog.text


def test_no_odd_character_is_overlooked_by_the_quick_look_for_all_of_them(tmp_path: Path) -> None:
    characters = [chr(number) for number in range(0x250) if chr(number) not in "\t\n\r"] + ["\ufffd", "<pad>"]
    made = build_pairs(
        spec_of(train=write(tmp_path / "a.jsonl", [(f"a{each}b", "c") for each in characters])), tmp_path
    )
    for name, oddity in ODDITIES.items():
        odd = [each for each in characters if oddity.pattern.search(f"a{each}b".encode())]
        assert count_of(made, name, 0) == len(odd) > 0


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ([], {}, "the files of task 'a' have no pairs. Name files with pairs in pairs.train"),
        ([("", "x"), ("x", "")], {}, "task 'a' has no pairs in the train split: of 2 pairs, 2 are empty"),
        ([("x", "y")] * 50, {}, "Add pairs, raise the share of validation (pairs.split), or name files in pairs.valid"),
        (numbered(9), {"test": [("source 1", " ")]}, "no pairs in the test split"),
        (
            [("x", "y")],
            {"validation": [("X", "z")], "remove": "contaminated"},
            "and 1 removed (pairs.remove). Name files with pairs in pairs.train",
        ),
    ],
)
def test_a_task_without_pairs_is_refused(
    tmp_path: Path, content: list[tuple[str, str]], settings: dict[str, Any], message: str
) -> None:
    given = {
        name: write(tmp_path / f"{name}.jsonl", value) if isinstance(value, list) else value
        for name, value in settings.items()
    }
    with pytest.raises(InputError) as refused:
        build_pairs(spec_of(train=write(tmp_path / "a.jsonl", content), **given), tmp_path)
    assert message in str(refused.value)


def test_a_file_in_two_splits_is_refused_but_two_tasks_may_read_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", numbered(300))
    (tmp_path / "link.jsonl").symlink_to(path)
    with pytest.raises(InputError, match=r"is in pairs.train .* and in pairs.test .* Name each file in one of them"):
        build_pairs(spec_of(train=path, test=str(tmp_path / "link.jsonl")), tmp_path)
    other = write(tmp_path / "b.jsonl", numbered(30))
    with pytest.raises(
        InputError, match=r"in pairs.validation .* and in pairs.test .* measured on what it was chosen by"
    ):
        build_pairs(spec_of(train=path, validation=other, test=f"{tmp_path}/./b.jsonl"), tmp_path)
    back = f"{path}#source=target&target=source&task=back&prefix=back: "
    made = build_pairs(spec_of(train=[f"{path}#prefix=forth: ", back]), tmp_path)
    assert next(read_pairs(made, "train", 1)).source.startswith("back: target ")


def test_pairs_are_reused_while_their_content_is_the_same_wherever_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "moved").mkdir()
    path = write(tmp_path / "a.jsonl", [*numbered(200), ("", "")])
    moved = write(tmp_path / "moved/a.jsonl", [*numbered(200), ("", "")])
    first, second = (build_pairs(spec_of(train=each), tmp_path / "root") for each in (path, moved))
    assert (first.reused, second.reused) == (False, True)
    assert caplog.text.count("are skipped") == 2, "what may be wrong is shown each time"
    write(Path(moved), numbered(201))
    changes = [{"train": moved}, {"split_seed": 1}, {"train": f"{path}#prefix=x"}, {"split": [900, 50, 50]}]
    changed = [build_pairs(spec_of(**({"train": path} | each)), tmp_path / "root") for each in changes]
    assert len({each.fingerprint for each in [first, *changed]}) == 5
    (first.path / "train-000.jsonl").write_bytes(b"")
    assert not build_pairs(spec_of(train=path), tmp_path / "root").reused


def test_a_file_that_is_changed_while_it_is_read_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", numbered(200))
    digests_of = stage.digests_of

    def then_changed(*arguments: Any) -> Any:
        found = digests_of(*arguments)
        write(tmp_path / "a.jsonl", numbered(200, 1))
        return found

    monkeypatch.setattr(stage, "digests_of", then_changed)
    with pytest.raises(InputError, match="was changed while it was read"):
        build_pairs(spec_of(train=path), tmp_path / "root")
    assert not list(tmp_path.glob("root/pairs/*/manifest.json"))


def test_files_without_the_columns_are_refused_before_anything_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write(tmp_path / "a.jsonl", numbered(200)), str(tmp_path / "b.csv")]
    (tmp_path / "b.csv").write_text("source,tgt\n")
    monkeypatch.setattr(stage, "digests_of", lambda *_: pytest.fail("hashed"))
    with pytest.raises(InputError, match=r"b.csv line 1, the header, has no column 'target'"):
        build_pairs(spec_of(train=paths), tmp_path / "root")


def test_progress_is_in_bytes_of_all_files(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", numbered(3000)) + f"#prefix={name}" for name in "ab"]
    reports = list[tuple[str, int, int | None]]()
    build_pairs(spec_of(train=paths), tmp_path, lambda *report: reports.append(report))
    done = [(done, total) for what, done, total in reports if what == "bytes of pairs read"]
    size = sum((tmp_path / f"{name}.jsonl").stat().st_size for name in "ab")
    assert done == sorted(done)
    assert done[-1] == (size, size)
    assert len(done) > 4


def test_digits_are_reversed_and_sorted_in_thousands_of_pairs_that_differ(tmp_path: Path) -> None:
    made = build_pairs(spec_of(train=["reverse_digits", "sort_digits"]), tmp_path)
    assert 19_500 < made.counts["train_pairs"] < 20_500
    assert made.counts["validation_pairs"] + made.counts["test_pairs"] > 900
    assert made.counts["duplicate_pairs"] == 0
    for task, prefix in enumerate(("reverse: ", "sort: ")):
        pairs = [pair for split in all_pairs(made, task).values() for pair in split]
        assert len(set(pairs)) == 10_500
        for source, target in pairs[::50]:
            digits = source.removeprefix(prefix).split()
            assert 3 <= len(digits) <= 8
            assert target.split() == (sorted(digits) if task else digits[::-1])
    copied = sum(pair.source.endswith(f": {pair.target}") for pair in read_pairs(made, "train", 1))
    assert copied < 0.04 * 10_500


def test_json_lines_in_a_json_file_and_files_of_a_folder_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(3):
        write(folder / f"{number}.jsonl", numbered(100, 100 * number))
    write(tmp_path / "a.json", numbered(300, 1000))
    made = build_pairs(spec_of(train=[f"{folder}#prefix=a ", f"{tmp_path}/a.json#prefix=b "]), tmp_path / "root")
    assert tasks_of(made) == [("folder", "a "), ("a", "b ")]
    assert [count_of(made, "read_pairs", task) for task in (0, 1)] == [300, 300]


def test_several_and_remote_json_files_are_read_as_other_files_are(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / f"{number}.json", numbered(100, 100 * number))
    remote = fsspec.filesystem("memory")
    remote.pipe("/of-pairs/a.json", (tmp_path / "0.json").read_bytes())
    train = [f"{tmp_path}/*.json#task=a", "memory://of-pairs/a.json#task=b"]
    for named in spec_of(train=train).tasks():
        assert require_pair_source("pairs.train", named, tmp_path)
    made = build_pairs(spec_of(train=train), tmp_path / "root")
    assert [count_of(made, "read_pairs", task) for task in (0, 1)] == [200, 100]


def test_errors_of_files_name_the_setting(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", numbered(100))
    (tmp_path / "c.yaml").touch()
    (tmp_path / "json").mkdir()
    write(tmp_path / "json/c.json", numbered(100))
    for settings, message in [
        ({"train": f"{tmp_path}/b.jsonl"}, "pairs.train '"),
        ({"train": f"{tmp_path}/a.jsonl", "test": f"{tmp_path}/*.tsv"}, "pairs.test '"),
        ({"train": f"{tmp_path}/*.yaml"}, "Set pairs.train to .jsonl, .tsv, .csv, .parquet files only"),
        ({"train": f"{tmp_path}/json"}, "To read .json files, name them, as in 'FOLDER/*.json'"),
    ]:
        with pytest.raises(InputError) as refused:
            build_pairs(spec_of(**settings), tmp_path)
        assert message in str(refused.value)


def test_a_killed_stage_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(train=write(tmp_path / "a.jsonl", numbered(200)))
    with monkeypatch.context() as patched:
        patched.setattr(stage, "digest_files", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build_pairs(spec, tmp_path)
    assert build_pairs(spec, tmp_path, silent).counts["read_pairs"] == 200


def test_a_warning_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    path = write(tmp_path / "a.jsonl", [*numbered(200), ("", "")])
    build_pairs(spec_of(train=path), tmp_path)
    assert [record.getMessage().count("\n") for record in caplog.records] == [0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": "a.jsonl#prefx=x"}, "but not 'prefx' (did you mean 'prefix'?)"),
        ({"train": "a.jsonl#prefix=a & b"}, "' b' is not KEY=VALUE. Write & inside of a value as %26"),
        ({"train": "a.jsonl#task=x&task=y"}, "give task once"),
        ({"train": "a.jsonl#source="}, "give source once, and a value of it"),
        ({"train": "a.jsonl#split=test"}, "split can be chosen of a dataset hf://OWNER/NAME only"),
        ({"train": "hf://someone/texts@v2"}, "write the revision as hf://someone/texts#revision=v2"),
        ({"train": ["a/x.jsonl", "b/x.csv"]}, "pairs.train names the task 'x' more than once"),
        ({"train": "a.jsonl#task=a/b"}, "pairs.train names the task 'a/b': it must be at most 64"),
        ({"train": ["a.csv", "b.csv"], "test": "c.csv"}, "pairs.test has no pairs of the task 'b'"),
        ({"train": "a.csv", "test": ["c.csv", "d.csv"]}, "but pairs.train has the tasks a: name one of them with"),
        ({"train": "a.csv#prefix=x", "test": "b.csv#prefix=y"}, "but the prefix of the task 'a' is 'x' in pairs.train"),
        ({"train": "https://u:p@x/a.csv"}, "pairs.train has a password"),
        ({"train": "hf://someone/texts@v2?token=x"}, "pairs.train has a password, a key or a query"),
        ({"train": "a.csv#prefix=10%de: "}, "'10%de: ' stands for bytes that are not UTF-8. Write % inside of a value"),
        ({"train": "a\udce9.csv"}, r"pairs.train names a\udce9.csv, which is not UTF-8: rename the file"),
        ({"train": "a.csv#target=source"}, "'source' is the column of both source and target"),
        ({"test": "a.csv"}, "pairs.test is set, but pairs.train is empty"),
        ({"train": "a.csv", "split": [900, 50, 40]}, "pairs.split is (900, 50, 40): it must be three numbers that sum"),
        ({"train": "a.csv", "remove": "contaminated"}, "leave it out"),
        ({"train": "a.csv", "mixing_limit": 5}, "pairs.mixing_limit is set, but there is one task"),
        (
            {"train": ["a.csv", "b.csv"], "mixing_weights": "1,2,3"},
            "pairs.mixing_weights has 3 numbers, but there are 2",
        ),
        (
            {"train": ["a.csv", "b.csv"], "mixing_weights": "1,2", "mixing_limit": 5},
            "pairs.mixing_weights is 1,2, but pairs.mixing_limit is 5",
        ),
    ],
)
def test_settings_that_name_no_pairs_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        spec_of(**settings)
    assert message in str(refused.value)


def test_what_follows_the_url_of_a_server_is_not_shown() -> None:
    with pytest.raises(SpecError) as refused:
        spec_of(train="https://x/a.csv#access_token=hidden")
    assert "names 'https://x/a.csv': after #, source" in str(refused.value)
    assert "hidden" not in str(refused.value)


@given(prefix=st.text(st.characters(exclude_categories=["Cs"])))
def test_a_percent_encoded_prefix_may_have_any_characters(prefix: str) -> None:
    encoded = "".join(f"%{byte:02x}" for byte in prefix.encode())
    (task,) = spec_of(train=f"a#1/x.jsonl#prefix={encoded}&task=t").tasks()
    assert (task.location, task.prefix, task.task) == ("a#1/x.jsonl", prefix, "t")


def test_held_out_files_have_the_columns_of_their_task() -> None:
    spec = spec_of(train=["a.csv#source=x&target=y", "b.csv"], test=["c.csv#task=b", "d.csv#task=a&target=z"])
    found = [(each.location, each.task, each.source, each.target) for each in spec.held_out("test")]
    assert found == [("d.csv", "a", "x", "z"), ("c.csv", "b", "source", "target")]
