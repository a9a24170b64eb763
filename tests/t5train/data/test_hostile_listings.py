"""The listing of a source cannot choose where its files are written on this machine."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from t5train.data.corpus import build_corpus
from t5train.data.download.source_listing import skipped_line
from t5train.data.sources import local_files, require_source
from t5train.errors import InputError
from t5train.progress import silent
from t5train.spec import CorpusSpec


class Handler(BaseHTTPRequestHandler):
    """Serves an index of links at /texts/, and some text at every link."""

    links: list[str]

    def do_HEAD(self) -> None:
        is_index = self.path.rstrip("/") == "/texts"
        content = "".join(f'<a href="{link}">x</a>' for link in self.links) if is_index else "text\n"
        self.send_response(404 if "*" in unquote(self.path) else 200)
        self.send_header("Content-Type", "text/html" if is_index else "text/plain")
        self.send_header("Content-Length", str(len(content.encode())))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content.encode())

    def do_GET(self) -> None:
        self.do_HEAD()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def index() -> Iterator[str]:
    Handler.links = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/texts"
        server.shutdown()


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_files_of_an_index_are_stored_in_the_cache(index: str, tmp_path: Path) -> None:
    Handler.links = ["one.txt", "two.txt"]
    found = local_files(f"{index}/*.txt", "", tmp_path, silent)
    assert [file.name for file in found] == ["one.txt", "two.txt"]
    assert all(file.path.is_relative_to(tmp_path / "cache") for file in found)


@pytest.mark.parametrize(
    "link", ["../../../../escaped.txt", "{index}/../../../../escaped.txt", "a\\..\\..\\escaped.txt"]
)
@pytest.mark.parametrize("pattern", ["/**", "/**/*.txt"])
def test_an_index_cannot_name_files_outside_the_cache(index: str, tmp_path: Path, link: str, pattern: str) -> None:
    Handler.links = ["good.txt", link.format(index=index)]
    with pytest.raises(InputError, match=r"corpus\.source 'http://.*' names '.*escaped\.txt'"):
        local_files(index + pattern, "", tmp_path / "deep", silent)
    assert not files_in(tmp_path)


@pytest.mark.parametrize(
    "keys",
    [
        ["a.txt", "../../escaped.txt"],
        ["a.txt", "b\0.txt"],
        ["a.txt", "b\n.txt"],
        ["a.txt", "A.txt"],
        ["caf\u00e9.txt", "cafe\u0301.txt"],
        ["a.txt", "x" * 300 + ".txt"],
    ],
)
def test_keys_of_a_store_cannot_name_files_outside_the_cache(tmp_path: Path, keys: list[str]) -> None:
    store = fsspec.filesystem("memory")
    store.store.clear()
    for key in keys:
        store.store[f"/bucket/{key}"] = MemoryFile(store, f"/bucket/{key}", b"text\n")
    with pytest.raises(InputError, match=r"corpus\.source 'memory://bucket/?' names"):
        local_files("memory://bucket", "", tmp_path / "deep", silent)
    assert not files_in(tmp_path)


def test_a_link_in_the_cache_does_not_lead_a_download_elsewhere(index: str, tmp_path: Path) -> None:
    Handler.links = ["one.txt", "two.txt"]
    (first, _) = local_files(f"{index}/*.txt", "", tmp_path, silent)
    elsewhere = tmp_path / "elsewhere"
    first.path.parent.rename(elsewhere)
    first.path.parent.symlink_to(elsewhere)
    (elsewhere / "one.txt").unlink()
    with pytest.raises(InputError, match="is a symbolic link"):
        local_files(f"{index}/*.txt", "", tmp_path, silent)
    assert not (elsewhere / "one.txt").exists()


@pytest.mark.parametrize("pattern", ["", "/*", "/caf?/*.txt"])
def test_a_file_whose_name_is_not_utf_8_is_named_with_its_bytes_escaped(tmp_path: Path, pattern: str) -> None:
    folder = tmp_path / ("caf\udce9" if pattern.count("*.") else ".")
    folder.mkdir(exist_ok=True)
    (folder / "a\udcff.txt").write_text("text\n")
    for act in (require_source, lambda source: build_corpus(CorpusSpec(source=source), tmp_path / "root")):
        with pytest.raises(
            InputError, match=r"includes /.*/a\\xff\.txt, whose name is not UTF-8.* Rename it"
        ) as caught:
            act(f"{tmp_path}{pattern}")
        assert str(caught.value).isprintable()


def test_names_of_files_cannot_break_the_lines_of_a_message(tmp_path: Path) -> None:
    (tmp_path / "a\n\x1b[31m.txt").write_bytes(b"\xff")
    (tmp_path / "b\udce9\n.pdf").touch()
    with pytest.raises(InputError, match=r"/a\\n\\x1b\[31m\.txt line 1 is not UTF-8") as caught:
        build_corpus(CorpusSpec(source=str(tmp_path), workers=1), tmp_path / "root")
    assert str(caught.value).isprintable()
    assert skipped_line(require_source(str(tmp_path)).skipped).endswith(r": b\xe9\n.pdf")
