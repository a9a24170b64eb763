"""Which files of a folder, pattern or store are text: hidden ones and further names of one file are left out."""

import logging
import os
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import fsspec
import pytest

from t5train.data import sources
from t5train.data.corpus import build_corpus
from t5train.data.download.source_listing import LeftOut, _is_named, list_files
from t5train.data.sources import local_files, require_source
from t5train.errors import InputError
from t5train.progress import silent
from t5train.records.stage_records import Corpus
from t5train.spec import CorpusSpec

HIDDEN = [
    ".Trash-0/files/a.txt",
    "._a.txt",
    ".a.txt.swp.txt",
    ".git/a.txt",
    ".ipynb_checkpoints/a-checkpoint.txt",
    "__MACOSX/._a.txt",
    "_temporary/0/part-0.txt",
    "deep/.ipynb_checkpoints/b-checkpoint.txt",
    "deep/_b.txt",
]
SHOWN = ["a.txt", "deep/b.txt", "deep/c_d.e.txt"]
OTHER = ["_SUCCESS", ".DS_Store", ".part-0.txt.crc", ".nfs000123"]


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.rm("/", recursive=True)


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name.replace('.ipynb_checkpoints/', '')}\n")


def names_of(source: object, root: Path) -> list[str]:
    return [file.name for file in local_files(str(source), "", root / "root", silent)]


def paths_of(source: object, below: Path) -> list[str]:
    return [str(Path(each).relative_to(below)) for each in list_files(str(source)).files]


def build(source: object, root: Path) -> Corpus:
    return build_corpus(CorpusSpec(source=str(source), workers=1), root / "root")


def test_hidden_files_below_a_folder_are_no_text_and_the_log_names_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = tmp_path / "text"
    make(text, *HIDDEN, *SHOWN, *OTHER)
    with caplog.at_level(logging.INFO):
        assert build(text, tmp_path).counts["passages"] == len(SHOWN)
    names = ".Trash-0/files/a.txt, ._a.txt, .a.txt.swp.txt, .git/a.txt, .ipynb_checkpoints/a-checkpoint.txt and 4 more"
    assert f"leaving out 9 hidden files (. or _ begins a name): {names}" in caplog.messages
    assert require_source(str(text)).left_out.hidden == HIDDEN
    assert [*require_source(str(text)).sizes] == SHOWN


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**/*.txt", SHOWN),
        ("**", SHOWN),
        ("*", ["a.txt"]),
        ("*.txt", ["a.txt"]),
        ("??a.txt", None),
        ("*/*.txt", ["deep/b.txt", "deep/c_d.e.txt"]),
        ("deep/**", ["deep/b.txt", "deep/c_d.e.txt"]),
        (".*/*.txt", [".git/a.txt", ".ipynb_checkpoints/a-checkpoint.txt"]),
        (".[!.]*", ["._a.txt", ".a.txt.swp.txt"]),
        ("[._]*/*.txt", [".git/a.txt", ".ipynb_checkpoints/a-checkpoint.txt"]),
        ("[!a]*.txt", None),
        ("[^a]*.txt", ["a.txt"]),
        ("_temporary/*/*.txt", ["_temporary/0/part-0.txt"]),
        ("_temporary/**/*.txt", ["_temporary/0/part-0.txt"]),
        (".Trash-0/**", [".Trash-0/files/a.txt"]),
        ("__MACOSX/*.txt", None),
        ("__MACOSX/._*.txt", ["__MACOSX/._a.txt"]),
        (
            "**/.ipynb_checkpoints/*.txt",
            [".ipynb_checkpoints/a-checkpoint.txt", "deep/.ipynb_checkpoints/b-checkpoint.txt"],
        ),
        ("**/_*.txt", ["deep/_b.txt"]),
    ],
)
@pytest.mark.parametrize("store", ["local", "memory"])
def test_a_pattern_matches_hidden_files_only_if_it_names_them(
    tmp_path: Path, memory: fsspec.AbstractFileSystem, store: str, pattern: str, expected: list[str] | None
) -> None:
    files = [*HIDDEN, *SHOWN]
    if store == "local":
        make(tmp_path / "_text", *files)
        source, top = f"{tmp_path}/_text/{pattern}", f"{tmp_path}/_text/"
    else:
        memory.pipe({f"/_text/{name}": b"one\n" for name in files})
        source, top = f"memory://_text/{pattern}", "/_text/"
    if expected is None:
        with pytest.raises(InputError, match=r"matches only hidden files: .* name what begins with \. or _"):
            list_files(source)
    else:
        assert [each.removeprefix(top) for each in list_files(source).files] == expected


def test_hidden_files_of_stores_and_archives_are_no_text(tmp_path: Path, memory: fsspec.AbstractFileSystem) -> None:
    memory.pipe({f"/bucket/{name}": name.encode() for name in (*HIDDEN, *SHOWN, *OTHER)})
    assert names_of("memory://bucket", tmp_path) == SHOWN
    assert len(list((tmp_path / "root").rglob("*.txt"))) == len(SHOWN), "the others are not downloaded"
    with zipfile.ZipFile(tmp_path / "text.zip", "w") as archive:
        for name in (*HIDDEN, *SHOWN):
            archive.writestr(name, "one\n")
    assert names_of(f"zip://::{tmp_path}/text.zip", tmp_path / "of zip") == SHOWN


@pytest.mark.parametrize("named", ["_text", ".cache/text", "_text/_a.txt", ".cache/*/*.txt"])
def test_what_is_named_is_read_though_it_is_hidden(tmp_path: Path, named: str) -> None:
    make(tmp_path, "_text/_a.txt", "_text/b.txt", ".cache/text/b.txt", ".cache/_text/a.txt")
    expected = {"_text": ["_text/b.txt"], "_text/_a.txt": ["_text/_a.txt"]}.get(named, [".cache/text/b.txt"])
    assert paths_of(tmp_path / named, tmp_path) == expected


@pytest.mark.parametrize("store", ["local", "memory"])
def test_a_percent_sign_in_a_name_stands_for_itself(
    tmp_path: Path, memory: fsspec.AbstractFileSystem, store: str
) -> None:
    names = ["%2Ehid.txt", "%5Fc.txt", "a%2F_b/c.txt", "https%3A%2F%2Fx.org%2F_a.txt"]
    make(tmp_path / "text", *names, "_x%2Fy.txt")
    memory.pipe({f"/text/{name}": b"one\n" for name in (*names, "_x%2Fy.txt")})
    source = {"local": f"{tmp_path}/text", "memory": "memory://text"}[store]
    found = require_source(source)
    assert [*found.sizes] == names
    assert found.left_out.hidden == ["_x%2Fy.txt"]
    assert [*require_source(f"{source}/**/*.txt").sizes] == names


def test_a_store_may_write_the_named_folder_in_another_way() -> None:
    found = "datasets/a/b@refs%2Fconvert%2Fparquet/_x/train/0.parquet"
    assert _is_named(found, "datasets/a/b@refs/convert/parquet/_x/*/*.parquet")
    assert _is_named("datasets/a/b/x/0.parquet", "datasets/a/b@~parquet/x/*.parquet")
    assert not _is_named("datasets/a/b/x/_0.parquet", "datasets/a/b@~parquet/x/*.parquet")


def test_a_folder_with_nothing_but_hidden_files_is_refused_with_their_names(tmp_path: Path) -> None:
    make(tmp_path, "_part/a.txt", "notes.md")
    with pytest.raises(
        InputError, match=r"notes\.md\. Leaving out 1 hidden file \(\. or _ begins a name\): _part/a\.txt\. Set"
    ):
        require_source(str(tmp_path))


@pytest.mark.parametrize("source", ["", "**/*.txt"])
def test_a_file_is_read_once_whatever_links_there_are_to_it(tmp_path: Path, source: str) -> None:
    text, other = tmp_path / "text", tmp_path / "other"
    make(text, "b.txt", "deep/f.txt", ".hidden/h.txt")
    make(other, "outside.txt")
    (text / "a.txt").symlink_to("b.txt")
    (text / "chain.txt").symlink_to("a.txt")
    (text / "deep/hard.txt").hardlink_to(text / "b.txt")
    (text / "deep/to_hard.txt").symlink_to("hard.txt")
    (text / "in.txt").symlink_to(other / "outside.txt")
    (text / "in_again.txt").symlink_to(other / "outside.txt")
    (text / "of_hidden.txt").symlink_to(".hidden/h.txt")
    (text / "parent").symlink_to("..")
    (text / "deep/top.txt").symlink_to(text)
    assert paths_of(text / source, text) == ["b.txt", "deep/f.txt", "in.txt", "of_hidden.txt"]
    left_out = require_source(str(text / source)).left_out
    assert left_out.copies == ["a.txt", "chain.txt", "deep/hard.txt", "deep/to_hard.txt", "in_again.txt"]
    assert left_out.folders == ["deep/top.txt", "parent"]
    assert left_out.lines()[-1] == (
        "leaving out 2 links to folders, which are read only if they are named: deep/top.txt, parent"
    )


@pytest.mark.parametrize("named", ["a.txt::b.txt", "c::d", "c::d/*.txt"])
def test_a_path_with_two_colons_does_not_stand_for_what_is_before_them(tmp_path: Path, named: str) -> None:
    make(tmp_path, "text/a.txt", "text/a.txt::b.txt", "text/c/e.txt", "text/c::d/e.txt")
    with pytest.raises(InputError, match=r"has ::, which separates .* or name the folder that it is in"):
        require_source(str(tmp_path / "text" / named))
    assert len(require_source(str(tmp_path / "text")).sizes) == 4


def test_links_to_folders_that_a_pattern_may_match_are_named(tmp_path: Path) -> None:
    make(tmp_path, "text/one/a.txt", "other/b.txt", "text/.claim")
    make(tmp_path / "text/run", ".claim", "a.txt")
    for link in ("text/two", "text/one/deep", "text/_hidden", "text/run/three"):
        (tmp_path / link).symlink_to(tmp_path / "other")
    found = require_source(str(tmp_path / "text/*/*.txt"))
    assert ([*found.sizes], found.left_out.folders) == (["a.txt"], ["two"])
    with pytest.raises(
        InputError, match=r"matches no file \(links to folders .* only if they are named: .*/text/two\)"
    ):
        require_source(str(tmp_path / "text/t*/*.txt"))


@pytest.mark.parametrize("source", ["", "*.txt"])
def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path: Path, source: str) -> None:
    """That of its download record would be too long."""
    name = "x" * 251 + ".txt"
    make(tmp_path / "text", name)
    corpus = build_corpus(CorpusSpec(source=str(tmp_path / "text" / source), workers=1), tmp_path / "root")
    assert [Path(path).name for path in corpus.files if Path(path).is_absolute()] == [name]


def test_a_folder_that_is_named_by_a_link_is_read_and_names_that_differ_in_case_are_two_files(tmp_path: Path) -> None:
    make(tmp_path, "text/a.txt", "text/A.txt")
    (tmp_path / "link").symlink_to("text")
    assert names_of(tmp_path / "link", tmp_path) == sorted({each.name for each in (tmp_path / "text").iterdir()})


@pytest.mark.parametrize("source", ["", "*.txt"])
@pytest.mark.parametrize("target", ["absent.txt", "link.txt"])
def test_a_link_to_nothing_or_to_itself_is_refused_with_its_name(tmp_path: Path, source: str, target: str) -> None:
    make(tmp_path, "a.txt")
    (tmp_path / "link.txt").symlink_to(target)
    with pytest.raises(InputError, match=rf"link\.txt is a link to {target}, which cannot be opened\. Restore"):
        require_source(str(tmp_path / source))
    (tmp_path / "link.txt").rename(tmp_path / "_link.txt")
    assert names_of(tmp_path / source, tmp_path) == ["a.txt"]


def test_file_systems_that_give_all_files_one_inode_lose_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "a.txt", "b.txt")
    (tmp_path / "c.txt").symlink_to("b.txt")
    stat = Path.stat

    def without_inodes(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        found = list(stat(path, follow_symlinks=follow_symlinks))
        return os.stat_result([found[0], 0, *found[2:]])

    monkeypatch.setattr(Path, "stat", without_inodes)
    assert list_files(str(tmp_path)).left_out == LeftOut([], ["c.txt"], [])


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_file_and_a_link_to_it_cannot_be_two_texts_of_a_mixture(
    tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    make(tmp_path, "one/a.txt", "two/b.txt")
    link(tmp_path / "one/a.txt", tmp_path / "two/c.txt")
    spec = CorpusSpec(source=str(tmp_path / "one"), mixed_with=(str(tmp_path / "two"),), workers=1)
    with pytest.raises(InputError, match="belongs to two texts of the mixture"):
        build_corpus(spec, tmp_path / "root")


@pytest.mark.parametrize("store", ["local", "memory"])
def test_a_finished_corpus_with_hidden_files_and_links_stays_valid(
    tmp_path: Path,
    memory: fsspec.AbstractFileSystem,
    store: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make(tmp_path, "text/deep/a.txt", "text/_part/b.txt", "test/a.txt", "test/_b.txt")
    source = str(tmp_path / "text")
    if store == "local":
        (tmp_path / "text/c.txt").symlink_to("deep/a.txt")
    else:
        memory.put(source, "/text", recursive=True)
        source = "memory://text"
    spec = CorpusSpec(source=source, workers=1)
    compared = spec.model_copy(update={"test_sets": (f"{tmp_path}/test",), "remove": ("contaminated",)})
    with monkeypatch.context() as earlier:
        earlier.setattr(sources, "list_files", partial(list_files, with_left_out=True))
        before, before_compared = (build_corpus(each, tmp_path / "root") for each in (spec, compared))
    again = build(source, tmp_path)
    assert again.reused
    assert again.fingerprint == before.fingerprint
    assert f"{before.path} was made by an earlier version, which also read hidden files or links" in caplog.text
    assert build_corpus(compared, tmp_path / "root").path == before_compared.path
    # text that has changed since is read by the new rule
    make(tmp_path / "text", "deep/d.txt")
    memory.put(str(tmp_path / "text/deep/d.txt"), "/text/deep/d.txt")
    assert [each for each in build(source, tmp_path).files if "_part" in each or "c.txt" in each] == []
