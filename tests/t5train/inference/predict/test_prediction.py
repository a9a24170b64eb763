"""Predicting files gives what the rows one by one give, whoever predicts which part, and after any interruption."""

import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from t5train.data.worker_processes import Advance, Json
from t5train.errors import DigestMismatch, InputError, SpecError, StorageError
from t5train.inference.model_folder import ModelFolder
from t5train.inference.predict import devices, prediction_worker
from t5train.inference.predict.devices import OtherMachines, device_bytes
from t5train.inference.predict.prediction import PredictJob, predict
from t5train.inference.predict.prediction_worker import predict_parts
from t5train.inference.predict.predictions import PREDICTION, PREDICTIONS, read_predictions
from t5train.inference.text.decoding import Decoder, GenerationSpec
from t5train.records.witness import LONGEST_TRAIN_TARGET
from tests.support.changed_weights import change_weights

SOURCES = [" ".join(text.split()[: 1 + number % 9]) for number, text in enumerate(list(topics.values())[:40])]
SHORT = GenerationSpec(max_new_tokens=6)
Run = Callable[..., Any]


@pytest.fixture
def file(tmp_path: Path) -> str:
    """40 rows with references of the task sort_digits."""
    rows = [{"source": source, "target": f"{number} {source[:5]}"} for number, source in enumerate(SOURCES)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return f"{tmp_path}/rows.jsonl#task=sort_digits"


class Here:
    """Predicts in this process, with as many jobs as there would be processes."""

    def __init__(self, most_rows: float = float("inf")) -> None:
        self.parts = 0
        self._left = most_rows

    def __call__(self, function: str, jobs: Sequence[Json], advance: Advance) -> Iterator[Json]:
        assert function == "t5train.inference.predict.prediction_worker:predict_parts"
        for job in random.Random(1).sample(jobs, len(jobs)):
            yield predict_parts(job, lambda rows: self._count(rows, advance))
            self.parts += len(job["parts"])

    def _count(self, rows: int, advance: Advance) -> None:
        self._left -= rows
        if self._left < 0:
            raise KeyboardInterrupt
        advance(rows)


@pytest.fixture
def run(model: Path, file: str, tmp_path: Path) -> Run:
    """``run(out, workers, **changes)`` predicts the file in small batches."""

    def run(out: str = "out", workers: Here | None = None, **changes: Any) -> Any:
        job = PredictJob(model, [file], tmp_path / out, SHORT, batch_tokens=400, device="cpu", processes=1)
        return predict(job._replace(**changes), workers=workers or (None if "machines" in changes else Here()))

    return run


def test_predictions_are_those_of_the_rows_one_by_one_in_their_order(run: Run, model: Path, tmp_path: Path) -> None:
    run()
    found, decoder = list(read_predictions(tmp_path / "out")), Decoder(ModelFolder.open(model), "cpu")
    assert [each.source for each in found] == [f"order: {source}" for source in SOURCES]
    assert [each.reference for each in found] == [f"{number} {source[:5]}" for number, source in enumerate(SOURCES)]
    assert {each.task for each in found} == {"sort_digits"}
    assert [each.id for each in found] == [str(number + 1) for number in range(len(SOURCES))]
    alone = [decoder.decode([each.source], SHORT)[0] for each in found]
    assert [(each.hypothesis, each.tokens, each.ended) for each in found] == alone
    assert len({each.hypothesis for each in found}) > len(SOURCES) / 2


@pytest.mark.parametrize("decoding", [SHORT, SHORT._replace(sample=True, temperature=2.0, seed=5)])
def test_another_number_of_processes_gives_the_same_file(run: Run, tmp_path: Path, decoding: GenerationSpec) -> None:
    one, three = run("one", decoding=decoding), run("three", decoding=decoding, processes=3)
    assert one == three
    assert (tmp_path / "one" / PREDICTIONS).read_bytes() == (tmp_path / "three" / PREDICTIONS).read_bytes()


def test_other_machines_get_each_part_as_a_job_and_give_the_same_file(run: Run, tmp_path: Path) -> None:
    given = list[Json]()

    def there(function: str, jobs: Sequence[Json], advance: Advance) -> Iterator[Json]:
        given.extend(jobs)
        return Here()(function, jobs, advance)

    machines = partial(nullcontext, OtherMachines("cpu", device_bytes("cpu"), there))
    assert run("there", machines=machines, device="not of this machine", processes=None) == run("one")
    assert [job["parts"] for job in given] == [[part] for part in range(len(given))]
    assert len(given) > 1
    assert (tmp_path / "one" / PREDICTIONS).read_bytes() == (tmp_path / "there" / PREDICTIONS).read_bytes()


def test_an_interrupted_job_predicts_only_the_other_parts_and_the_same_file(run: Run, tmp_path: Path) -> None:
    whole = run("whole", all_parts := Here())
    with pytest.raises(KeyboardInterrupt):
        run(workers=Here(most_rows=25))
    assert not (tmp_path / "out" / PREDICTIONS).exists()
    assert run(workers=(rest := Here())) == whole
    assert 0 < rest.parts < all_parts.parts
    assert run(workers=(none := Here())) == whole
    assert none.parts == 0
    assert (tmp_path / "out" / PREDICTIONS).read_bytes() == (tmp_path / "whole" / PREDICTIONS).read_bytes()
    assert {each.name for each in (tmp_path / "out").iterdir()} == {".claim", PREDICTIONS, PREDICTION}


def test_a_job_that_is_continued_with_other_memory_keeps_its_batches(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_CPU_BYTES", 1 << 16)
    whole = run("whole", all_parts := Here(), batch_tokens=None)
    with pytest.raises(KeyboardInterrupt):
        run(workers=Here(most_rows=25), batch_tokens=None)
    monkeypatch.setattr(devices, "_CPU_BYTES", 1 << 30)
    assert run(workers=(rest := Here()), batch_tokens=None) == whole
    assert 0 < rest.parts < all_parts.parts
    assert (tmp_path / "out" / PREDICTIONS).read_bytes() == (tmp_path / "whole" / PREDICTIONS).read_bytes()
    assert run("larger", batch_tokens=None).batch_tokens > whole.batch_tokens


def test_half_precision_is_computed_and_recorded_and_refused_where_it_is_slow(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, load = list[torch.dtype](), ModelFolder.load
    monkeypatch.setattr(
        ModelFolder, "load", lambda *given: [found := load(*given), loaded.append(found.lm_head.weight.dtype)][0]
    )
    assert run(dtype="bfloat16").dtype == "bfloat16"
    assert loaded == [torch.bfloat16]
    with pytest.raises(StorageError, match="holds a result of other inputs or settings"):
        run()
    with pytest.raises(SpecError, match=r"--dtype is float16, but a CPU .* must be float32 or bfloat16"):
        run("none", dtype="float16")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("damaged", [b"", b"[0,", b"[0]\n", b"\0" * 9, b'"a"\n'])
def test_a_damaged_part_is_named_and_predicted_again_once_removed(run: Run, tmp_path: Path, damaged: bytes) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(workers=Here(most_rows=25))
    part = next((tmp_path / "out").glob("part-*.jsonl"))
    part.write_bytes(damaged)
    with pytest.raises(StorageError, match=f"{part.name} is damaged. Remove it, and run the same command again"):
        run()
    part.unlink()
    assert run(workers=(again := Here())) == run("whole")
    assert again.parts == 1


def test_another_result_and_a_changed_one_are_not_overwritten(run: Run, tmp_path: Path) -> None:
    run()
    before, rows_before = (tmp_path / "out" / PREDICTIONS).read_bytes(), (tmp_path / "rows.jsonl").read_bytes()
    for changed in ({"decoding": SHORT._replace(num_beams=2)}, {"batch_tokens": 500}):
        with pytest.raises(StorageError, match="holds a result of other inputs or settings"):
            run(**changed)
    with open(tmp_path / "rows.jsonl", "a", encoding="utf-8") as rows:
        rows.write('{"source": "one more", "target": ""}\n')
    with pytest.raises(StorageError, match="holds a result of other inputs or settings"):
        run()
    (tmp_path / "rows.jsonl").write_bytes(rows_before)
    assert (tmp_path / "out" / PREDICTIONS).read_bytes() == before
    (tmp_path / "out" / PREDICTIONS).write_bytes(before + b"\n")
    with pytest.raises(StorageError, match="was changed since"):
        run()


def test_the_most_tokens_are_set_or_from_references_or_from_training(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = ModelFolder.open(model).vocabulary().encode
    longest = max(len(ids) for ids in encode([f"{number} {source[:5]}" for number, source in enumerate(SOURCES)]))
    (tmp_path / "rows.txt").write_text("a source")
    unlimited, lines = GenerationSpec(), [f"{tmp_path}/rows.txt#prefix="]
    monkeypatch.setattr(ModelFolder, "target_tokens", 9)
    for out, changes, expected in (
        ("set", {}, (6, "setting")),
        ("references", {"decoding": unlimited}, (longest + max(8, longest // 4), "references")),
        ("training", {"decoding": unlimited, "files": lines}, (9, "training")),
        ("recorded", {"decoding": unlimited, "files": lines}, (50, "training")),
    ):
        if out == "recorded":  # by this version, but not by earlier ones
            monkeypatch.setattr(
                ModelFolder, "run", ModelFolder.open(model).run._replace(data={LONGEST_TRAIN_TARGET: 40})
            )
        found = run(out, **changes)
        assert (found.max_new_tokens, found.max_new_tokens_from) == expected
    monkeypatch.setattr(ModelFolder, "target_tokens", 0)
    with pytest.raises(SpecError, match=r"nothing says how long hypotheses may be.*Set --max-new-tokens"):
        run("none", decoding=unlimited, files=lines)


def test_what_may_make_predictions_poor_is_counted_and_warned_of(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ModelFolder, "trained_tokens", 12)
    (tmp_path / "rows.txt").write_text(f"order: a\n{'long ' * 20}\n")
    with caplog.at_level(logging.WARNING):
        found = run(files=[f"{tmp_path}/rows.txt#task=sort_digits"], decoding=GenerationSpec(max_new_tokens=1))
    ended = sum(each.ended for each in read_predictions(tmp_path / "out"))
    assert (found.rows, found.long_sources, found.doubled_prefixes, found.not_ended) == (2, 1, 1, 2 - ended)
    said = caplog.text
    assert "of 2 hypotheses, 2 were cut at 1 tokens (--max-new-tokens)" in said
    assert "1 of 2 sources have more than the 12 tokens" in said
    assert "1 of 2 sources begin with the prefix of their task in their files already" in said


def test_memory_that_is_too_small_names_the_setting(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Decoder, "decode", decode)
    with pytest.raises(InputError, match=r"cpu has too little memory for \d+ sources at once. Set a lower --batch-tok"):
        run()
    with pytest.raises(InputError, match=r"too little memory for row \d+ alone, whose source has \d+ characters"):
        run("alone", batch_tokens=1)


def test_a_model_that_was_changed_after_its_digests_were_taken_is_not_used(
    run: Run, model: Path, tmp_path: Path
) -> None:
    changing = shutil.copytree(model, tmp_path / "changing")

    def later(function: str, jobs: Sequence[Json], advance: Advance) -> Iterator[Json]:
        change_weights(changing)
        prediction_worker._decoder.cache_clear()  # another process would have loaded nothing before
        return Here()(function, jobs, advance)

    with pytest.raises(DigestMismatch, match=r"model\.safetensors has sha256 of pieces \w{64}, but .* was recorded"):
        run(model=changing, workers=later)
    assert not list((tmp_path / "out").glob("part-*"))


def test_files_without_rows_are_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match=r"empty\.txt has no rows"):
        run(files=[f"{tmp_path}/empty.txt#prefix="])


def test_devices_that_are_not_there_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="device is 'cuda'"):
        run(device="cuda")
    monkeypatch.setattr(devices, "chosen_device", lambda _: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(SpecError, match="--processes is 3, but cuda is 2 devices: it must be at most 2"):
        run(processes=3)
