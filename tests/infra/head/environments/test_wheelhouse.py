"""The list of a wheelhouse names only plain wheels, and every change of a wheel is noticed."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.head.environments.wheelhouse import MANIFEST, faulty, is_platform, is_wheel_name, read_wheelhouse
from t5train.errors import InputError, RecordError
from tests.support.tiny_wheels import wheelhouse_of, write_wheel

WHEEL = "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
SPECIAL = st.text(st.sampled_from("/\\.-_+!\0\n ~$;'\"`aé"), max_size=8)


def test_only_names_of_wheels_and_platforms_are_accepted() -> None:
    others = ["", "x.whl", f"../{WHEEL}", f"/{WHEEL}", f"{WHEEL}\n", f"-{WHEEL}", f"a/{WHEEL}", f"{'a' * 200}{WHEEL}"]
    assert all(map(is_wheel_name, [WHEEL, "six-1.17.0-py2.py3-none-any.whl", "a_b-1!2-1-py3-none-any.whl"]))
    assert not any(map(is_wheel_name, others))
    assert is_platform("manylinux_2_28_x86_64")
    assert not any(map(is_platform, ["", "--index-url=x", "linux x", "Linux", "a\n"]))


@given(SPECIAL, st.integers(0, len(WHEEL)))
def test_a_name_that_is_accepted_cannot_leave_a_folder_or_reach_a_shell(inserted: str, at: int) -> None:
    name = WHEEL[:at] + inserted + WHEEL[at:]
    if is_wheel_name(name):
        assert Path("/folder", name).resolve().parent == Path("/folder")
        assert not set(name) & set("/\\\0\n ~$;'\"`é")
        assert not name.startswith((".", "-"))


def test_a_list_is_read_as_it_was_written_and_a_folder_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Make one with `t5-pretrain wheelhouse"):
        read_wheelhouse(tmp_path)
    made = wheelhouse_of(tmp_path, [write_wheel(tmp_path, "first"), write_wheel(tmp_path, "second")])
    assert read_wheelhouse(tmp_path) == made
    assert read_wheelhouse(tmp_path).digest == made.digest
    assert faulty(tmp_path, made.wheels) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda listed: listed["wheels"][0].update(name="../first-1.0-py3-none-any.whl"), "not the plain name"),
        (lambda listed: listed["wheels"][0].update(sha256="0"), "wheels.0.sha256"),
        (lambda listed: listed["wheels"].append(listed["wheels"][0]), "listed twice"),
        (lambda listed: listed.update(python="3.11; rm"), "python"),
        (lambda listed: listed.update(platforms=["a b"]), "not the name of a platform"),
        (lambda listed: listed.update(unknown=1), "unknown"),
    ],
)
def test_a_list_with_a_field_that_is_not_valid_is_refused(tmp_path: Path, change: Any, said: str) -> None:
    wheelhouse_of(tmp_path, [write_wheel(tmp_path, "first")])
    listed = json.loads((tmp_path / MANIFEST).read_text())
    change(listed)
    (tmp_path / MANIFEST).write_text(json.dumps(listed))
    with pytest.raises(RecordError, match=f"{said}.*Make it again with `t5-pretrain wheelhouse"):
        read_wheelhouse(tmp_path)


def test_every_changed_byte_of_a_wheel_changes_its_digest(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "first")
    made = wheelhouse_of(tmp_path, [wheel])
    content = wheel.read_bytes()
    for at in range(0, len(content), 97):
        wheel.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert faulty(tmp_path, made.wheels) == [wheel.name]
    wheel.unlink()
    assert faulty(tmp_path, made.wheels) == [wheel.name]
