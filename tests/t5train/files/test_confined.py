"""A name from outside cannot lead out of the folder that it is meant for."""

from pathlib import Path

import pytest

from t5train.errors import InputError, StorageError
from t5train.files.confined import child, confined, require_distinct

BAD = {
    "../x": "leads out",
    "a/../../x": "leads out",
    "..": "leads out",
    ".": "the folder itself",
    "a/./b": "the folder itself",
    "/etc/passwd": "not a relative path",
    "//x": "not a relative path",
    "C:x": "not a relative path",
    "": "empty part",
    "a//b": "empty part",
    "a/": "empty part",
    "a\\..\\b": "backslash",
    "a\0b": "control character",
    "a\nb": "control character",
    "a\x9bb": "control character",
    "\ud800": "not valid Unicode",
    "x" * 201: "too long",
    "é" * 101: "too long",
    "a/" * 1100 + "b": "too long",
}


@pytest.mark.parametrize("name", BAD)
def test_an_unsafe_name_is_refused_with_its_source(name: str) -> None:
    with pytest.raises(InputError, match=BAD[name]) as caught:
        confined(Path("/cache"), name, "the index", InputError)
    assert str(caught.value).startswith(f"the index names {ascii(name)[:120]}")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["a.txt", "a/b/c.txt", "...", ".hidden", "ünïcode/日本.txt", "with space", "x" * 200])
def test_a_name_within_the_folder_is_joined_to_it(name: str) -> None:
    assert confined(Path("/cache"), name, "the index") == Path("/cache") / name


def test_a_plain_name_must_not_contain_a_folder() -> None:
    assert child(Path("/tag"), "a.pt", "the sidecar") == Path("/tag/a.pt")
    with pytest.raises(StorageError, match=r"the sidecar names 'a/b\.pt', which is not the plain name"):
        child(Path("/tag"), "a/b.pt", "the sidecar")


@pytest.mark.parametrize(
    "names", [["A.txt", "a.txt"], ["caf\u00e9", "cafe\u0301"], ["stra\u00dfe", "STRASSE"], ["same", "same"]]
)
def test_names_that_some_file_systems_treat_as_equal_are_refused(names: list[str]) -> None:
    with pytest.raises(StorageError, match="the bucket names both"):
        require_distinct(names, "the bucket")
    require_distinct(["a.txt", "b.txt"], "the bucket")
