"""What is said of a store that refuses or does not answer, before anything is trained."""

from collections.abc import Iterator
from typing import Any

import pytest

from infra.node.ports import free_port
from t5train.errors import DigestMismatch, PublicationError, StoreError
from t5train.records.digests import FileDigest
from t5train.release.object_store import bucket
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.object_store.checksums import encoded
from t5train.release.object_store.stored_objects import read_back
from t5train.release.publication import check_destination
from tests.support import s3_answers
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


def test_a_server_that_cannot_be_reached_is_explained(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "_TRIES", 1)
    endpoint = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(
        StoreError,
        match=rf"the server cannot be reached \(EndpointConnectionError at {endpoint}\)\. Check AWS_ENDPOINT",
    ):
        check_destination(URL)


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ("", "AWS_ENDPOINT_URL must begin with https:// or http://"),
        ("https://", "If the server has none, begin AWS_ENDPOINT_URL with http://"),
    ],
)
def test_an_endpoint_without_the_scheme_of_its_server_is_explained(
    s3: ObjectServer, monkeypatch: pytest.MonkeyPatch, scheme: str, said: str
) -> None:
    monkeypatch.setattr(bucket, "_TRIES", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"{scheme}127.0.0.1:{s3.port}")
    with pytest.raises(StoreError, match=said):
        check_destination(URL)


def test_if_nothing_may_be_written_the_first_refusal_is_reported(
    destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = BucketFolder.call

    def read_only(self: BucketFolder, sent: str, name: str | None = None, **arguments: Any) -> Any:
        if sent in {"put_object", "delete_object"}:
            raise StoreError(f"{sent} was denied", code="AccessDenied")
        return call(self, sent, name, **arguments)

    monkeypatch.setattr(BucketFolder, "call", read_only)
    with pytest.raises(StoreError, match="put_object was denied"):
        check_destination(destination)


def test_an_unknown_profile_is_explained(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StoreError, match="AWS_PROFILE names a profile that does not exist"):
        check_destination(URL)


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///t5", "s3://AKIAKEY:secret@models/t5", "s3://AKIAKEY:abc/secret@models/t5"]
)
def test_a_url_without_a_bucket_or_with_a_key_is_refused_and_the_key_not_shown(s3: Any, url: str) -> None:
    with pytest.raises(PublicationError, match=r"names no bucket|a user or a key before its bucket") as caught:
        check_destination(url)
    assert "secret" not in str(caught.value).lower().replace("aws_secret_access_key", "")


@pytest.mark.parametrize("rest", ["t5?X-Amz-Signature=secret", "t5#secret", "a/../b", "/t5", "a//b", "a\nb"])
def test_a_url_whose_folder_is_unclear_is_refused(s3: Any, rest: str) -> None:
    with pytest.raises(
        PublicationError, match=r"has a folder without a name|with a query, a fragment or a key"
    ) as caught:
        check_destination(f"s3://models/{rest}")
    assert "secret" not in str(caught.value)


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
    call = bucket.BucketFolder.call

    def unconditional(self: bucket.BucketFolder, sent: str, name: str | None = None, **arguments: Any) -> Any:
        return call(self, sent, name, **{key: value for key, value in arguments.items() if key != "IfNoneMatch"})

    monkeypatch.setattr(bucket.BucketFolder, "call", unconditional)
    check_destination(destination)
    assert f"ignores the condition that an object must not exist yet (If-None-Match), so {destination}" in caplog.text
    assert not reader.keys(destination)


@pytest.fixture
def damaging(monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketFolder]:
    """A folder whose objects all arrive with other bytes than the server's checksum is of."""
    with s3_answers.answering(200, "content", "", {"x-amz-checksum-crc64nvme": encoded(7)}) as endpoint:
        settings = {"ENDPOINT_URL": endpoint, "DEFAULT_REGION": "r", "ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s"}
        for name, value in settings.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield BucketFolder(URL)


def test_an_object_that_arrives_damaged_is_named_with_both_digests(damaging: BucketFolder) -> None:
    expected = FileDigest(size=5, sha256="5" * 64)
    meaning = "so the server received other bytes than were sent, or the object was changed or damaged since: restore"
    with pytest.raises(
        DigestMismatch,
        match=rf"^{URL}/config\.json has \d+ bytes and sha256 \w{{64}}, but 5 bytes and sha256 5{{64}} .*{meaning}",
    ):
        read_back(damaging, "config.json", expected)


def test_a_small_object_that_arrives_damaged_is_not_blamed_on_what_was_sent(damaging: BucketFolder) -> None:
    with pytest.raises(DigestMismatch, match=rf"^{URL}/run\.json .*do not have the checksum that the server returned"):
        damaging.read("run.json")
