"""What is said of a store that refuses or does not answer, before anything is trained."""

from collections.abc import Iterator
from typing import Any

import pytest

from t5train.errors import DigestMismatch, PublicationError, StoreError
from t5train.records.digests import FileDigest
from t5train.release.object_store import bucket
from t5train.release.object_store.bucket import BucketFolder, encoded
from t5train.release.object_store.stored_objects import read_back
from t5train.release.publication import check_destination
from tests.support import s3_answers
from tests.support.changed_answers import refusing, unconditional
from tests.support.object_server import ObjectServer
from tests.support.s3_reader import Reader

pytestmark = pytest.mark.slow

URL = "s3://models/t5"


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (301, "PermanentRedirect", r"the bucket is in another region .* Set AWS_REGION"),
        (400, "AuthorizationHeaderMalformed", r"the bucket is in another region .* Set AWS_REGION"),
        (403, "RequestTimeTooSkewed", r"this machine's clock differs too much .* Set the clock"),
        (
            403,
            "AccessDenied",
            r"access denied .* need s3:GetObject and s3:ListBucket there; to publish, also s3:PutObject",
        ),
        (403, "InvalidAccessKeyId", r"the server does not know this AWS_ACCESS_KEY_ID"),
        (400, "ExpiredToken", r"the credentials have expired"),
        (503, "SlowDown", r"the server is busy or failed, also after several tries .* Try again later"),
        (418, "IAmATeapot", r"the server answered IAmATeapot \(status 418\)"),
    ],
)
def test_an_error_of_the_server_is_explained_without_its_text(
    s3: Any, monkeypatch: pytest.MonkeyPatch, status: int, code: str, said: str
) -> None:
    monkeypatch.setattr(bucket, "_TRIES", 2)
    with s3_answers.answering(status, code, "the key AKIASECRET", {"x-amz-bucket-region": "eu-west-3"}) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(StoreError, match=rf"s3://models/t5 cannot be read: {said}") as caught:
            check_destination(URL)
    assert "AKIASECRET" not in str(caught.value)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        (
            "ENDPOINT_URL",
            "http://127.0.0.1:9",
            r"cannot be reached \(EndpointConnectionError at http://127.* Check AWS_E",
        ),
        ("ENDPOINT_URL", "127.0.0.1:{port}", "AWS_ENDPOINT_URL must begin with https:// or http://"),
        ("ENDPOINT_URL", "https://127.0.0.1:{port}", "If the server has none, begin AWS_ENDPOINT_URL with http://"),
        ("PROFILE", "nobody", "AWS_PROFILE names a profile that does not exist"),
    ],
)
def test_a_setting_that_leads_to_no_server_is_explained(
    s3: ObjectServer, monkeypatch: pytest.MonkeyPatch, setting: str, value: str, said: str
) -> None:
    monkeypatch.setattr(bucket, "_TRIES", 1)
    monkeypatch.setenv(f"AWS_{setting}", value.format(port=s3.port))
    with pytest.raises(StoreError, match=said):
        check_destination(URL)


def test_if_nothing_may_be_written_the_first_refusal_is_reported(
    destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, "put_object", "delete_object")
    with pytest.raises(StoreError, match="put_object: access denied"):
        check_destination(destination)


NO_BUCKET, NO_FOLDER = (
    r"names no bucket|a user or a key before its bucket",
    r"has a folder without a name|with a query, a fr",
)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        *(
            (f"s3://{rest}", NO_BUCKET)
            for rest in ("", "/t5", "AKIAKEY:secret@models/t5", "AKIAKEY:abc/secret@models/t5")
        ),
        *((f"{URL}{rest}", NO_FOLDER) for rest in ("?X-Amz-Signature=secret", "#secret", "/../b", "//b", "\nb")),
    ],
)
def test_a_url_with_a_key_or_without_a_clear_folder_is_refused_and_the_key_not_shown(
    s3: Any, url: str, problem: str
) -> None:
    with pytest.raises(PublicationError, match=problem) as caught:
        check_destination(url)
    assert "secret" not in str(caught.value).lower().replace("aws_secret_access_key", "")


@pytest.mark.parametrize("operation", ["put_object", "get_object", "delete_object", "list_multipart_uploads"])
def test_what_publishing_needs_is_tried_before_training_and_nothing_is_left(
    destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    call, refused = bucket.BucketFolder.call, []

    def denied(self: bucket.BucketFolder, sent: str, name: str | None = None, **arguments: Any) -> Any:
        if sent == operation and not (name or "").endswith("manifest.json"):
            refused.append(name)
            raise StoreError("access denied", code="AccessDenied")
        return call(self, sent, name, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(bucket.BucketFolder, "call", denied)
        with pytest.raises(StoreError, match="access denied"):
            check_destination(destination)
    assert len(refused) == 1
    assert bool(reader.keys(destination)) == (operation == "delete_object")


def test_a_server_that_ignores_conditions_is_named_before_training(
    destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check_destination(destination)
    assert not caplog.records
    unconditional(monkeypatch)
    check_destination(destination)
    assert f"ignores the condition that an object must not exist yet (If-None-Match), so {destination}" in caplog.text
    assert not reader.keys(destination)


@pytest.fixture
def damaging(monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketFolder]:
    with s3_answers.answering(200, "content", "", {"x-amz-checksum-crc64nvme": encoded(7)}) as endpoint:
        settings = {"ENDPOINT_URL": endpoint, "DEFAULT_REGION": "r", "ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s"}
        for name, value in settings.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield BucketFolder(URL)


def test_an_object_that_arrives_damaged_is_named_with_both_digests_and_a_small_one_with_its_checksum(
    damaging: BucketFolder,
) -> None:
    expected = FileDigest(size=5, sha256="5" * 64)
    said = (
        rf"^{URL}/config\.json has \d+ bytes and sha256 \w{{64}}, but 5 bytes and sha256 5{{64}} .*received other bytes"
    )
    with pytest.raises(DigestMismatch, match=said):
        read_back(damaging, "config.json", expected)
    with pytest.raises(DigestMismatch, match=rf"^{URL}/run\.json .*do not have the checksum that the server returned"):
        damaging.read("run.json")
