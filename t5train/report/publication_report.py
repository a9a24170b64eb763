"""The report on a publication: where it is, and the commands that verify, fetch and load it."""

import shlex

from t5train.locations import local_folder
from t5train.records.stage_records import Publication
from t5train.release.markdown import code, code_block, escaped, page, table
from t5train.release.object_store.bucket import is_in_s3

_LOADS = """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model = AutoModelForSeq2SeqLM.from_pretrained({folder!r})
tokenizer = AutoTokenizer.from_pretrained({folder!r})
"""
_FETCHES = """\
import fsspec

filesystem, path = fsspec.url_to_fs({url!r})
filesystem.get(path + "/", {folder!r} + "/", recursive=True)
"""


def _fetching(url: str, folder: str) -> str:
    if is_in_s3(url):
        return code_block(f"t5-pretrain fetch {shlex.quote(url)} {shlex.quote(folder)}", "sh")
    return code_block(_FETCHES.format(url=url, folder=folder), "python")


def publication_report(publication: Publication, run_name: str) -> str:
    """Return the report as Markdown. ``run_name`` names the folder into which a remote publication is fetched.

    It has no link: web pages cannot open folders (``file://``), and browsers do not know ``s3://`` and the like.
    """
    local = local_folder(publication.url)
    folder = str(local) if local else run_name
    return page(
        "# Published model",
        f"published: {escaped(publication.url)}",
        code_block(str(local or publication.url)),
        "Verify every byte of it:",
        code_block(f"t5-pretrain verify {shlex.quote(publication.url)}", "sh"),
        "" if local else "Fetch it, with credentials where the store's own client reads them:",
        "" if local else _fetching(publication.url, folder),
        "Load it:",
        code_block(_LOADS.format(folder=folder), "python"),
        table(
            ("", ""),
            [
                ("fingerprint", code(publication.fingerprint)),
                ("manifest", code(publication.seal)),
                ("files", f"{len(publication.files):,}"),
                ("bytes", f"{sum(digest.size for digest in publication.files.values()):,}"),
            ],
        ),
    )
