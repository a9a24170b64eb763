"""Which parts of a URL may be stored and shown."""

import pytest

from t5train.errors import InputError
from t5train.records.locations import hub_model, redacted, require_location, without_secret

KEPT_AND_SHOWN_WHOLE = [
    "/data/part-?.txt",
    "//data/part-?.txt",
    "file:///data/part-?.txt",
    "s3://bucket/part-?.jsonl",
    "gs://bucket/date=2026-0?-01/lang=en/*.txt",
    "simplecache::s3://bucket/part-?.jsonl.gz",
    "https://host/text.jsonl.gz",
    "s3://bucket/models/t5",
]


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAEXAMPLE@bucket/text/*.txt",
        "https://ghp_example@host/text.txt",
        "https://:secret@host/text.txt",
        "sftp://reader:secret@host/text.txt",
        "https://host/text.txt?X-Amz-Signature=secret",
        "https://host/part-?.txt",
        "s3://bucket/text.txt?token=secret",
        "s3://bucket?secret",
        "simplecache::https://ghp_example@host/text.txt",
    ],
)
def test_a_url_with_a_password_key_or_query_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ValueError, match=r"corpus\.source has a password, a key or a query in its URL") as caught:
        without_secret("corpus.source", url)
    assert not any(word in str(caught.value) for word in ("AKIA", "ghp_", "secret"))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        *((url, url) for url in KEPT_AND_SHOWN_WHOLE),
        ("sftp://reader@host/text.txt", "sftp://host/text.txt"),
        ("abfs://box@account/a.txt", "abfs://account/a.txt"),
    ],
)
def test_wildcards_are_no_queries_and_a_name_before_the_at_sign_is_kept_but_not_shown(url: str, shown: str) -> None:
    assert without_secret("corpus.source", url) == url
    assert redacted(url) == shown


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("s3:/bucket/t5", r"does not begin with 's3:/': write s3://"),
        ("s3:bucket/t5", r"does not begin with 's3:': write s3://"),
        ("S3://bucket/t5", r"does not begin with 'S3://': write s3://"),
        ("https:/host/t5", r"does not begin with 'https:/': write https://"),
        ("", "the path or URL is empty: name a folder"),
    ],
)
def test_what_only_looks_like_a_url_is_refused_and_taken_for_no_folder(location: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        require_location(location)
    if location:
        with pytest.raises(ValueError, match=said):
            without_secret("storage.publish_to", location)


@pytest.mark.parametrize("location", ["s3://b/t5", "./s3:/t5", "runs/a:b", "/data", "memory://t5", "file:///t5", "C:x"])
def test_urls_and_paths_are_locations(location: str) -> None:
    require_location(location)


@pytest.mark.parametrize(
    ("name", "revision"),
    [
        ("google/t5-v1_1-base", ""),
        ("a/b.c-d", "refs/pr/3"),
        ("a/b", "0" * 40),
        (f"{'a' * 94}/b", "v1--2"),
        ("_a/b_", "v"),
    ],
)
def test_a_model_of_the_hub_may_have_a_revision(name: str, revision: str) -> None:
    assert hub_model(f"hf://{name}{'@' * bool(revision)}{revision}") == (name, revision)


@pytest.mark.parametrize(
    "name",
    [
        "../..",
        "a/..",
        "./b",
        "-a/b",
        "a/.b",
        "a--b/c",
        "a/b..c",
        "a/b.git",
        "a/b.git@v1",
        f"{'a' * 95}/b",
        "a/b/c",
        "a/b@",
    ]
    + [f"a/b@{revision}" for revision in ("..", ".", "refs/../x", "refs/./x", "v1/", "/v1", "v" * 200)],
)
def test_a_name_that_the_hub_or_git_refuses_is_no_model(name: str) -> None:
    assert hub_model(f"hf://{name}") is None
