"""Which parts of a URL may be stored and shown."""

import pytest

from t5train.locations import redacted, without_secret

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


@pytest.mark.parametrize("url", KEPT_AND_SHOWN_WHOLE)
def test_a_wildcard_is_not_a_query_in_a_scheme_without_queries(url: str) -> None:
    assert without_secret("corpus.source", url) == url
    assert redacted(url) == url


@pytest.mark.parametrize(
    ("url", "shown"),
    [("sftp://reader@host/text.txt", "sftp://host/text.txt"), ("abfs://box@account/a.txt", "abfs://account/a.txt")],
)
def test_a_user_or_container_name_before_the_at_sign_is_kept_but_not_shown(url: str, shown: str) -> None:
    assert without_secret("corpus.source", url) == url
    assert redacted(url) == shown
