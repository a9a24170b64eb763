"""A plain boto3 reader of an object store, independent of the project's own client."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError


class Reader:
    """What a program sees that knows the bucket's URL and the form of the manifest, and nothing of this project."""

    def __init__(self, bucket: str, environment: dict[str, str]) -> None:
        self.bucket = bucket
        self.client = boto3.session.Session().client(
            "s3",
            endpoint_url=environment["AWS_ENDPOINT_URL"],
            region_name=environment["AWS_DEFAULT_REGION"],
            aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        )

    def keys(self, destination: str) -> set[str]:
        """Names of the objects below a destination."""
        prefix = self._prefix(destination)
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return {entry["Key"].removeprefix(prefix) for page in pages for entry in page.get("Contents", [])}

    def uploads(self, destination: str) -> list[str]:
        """Names of the unfinished multipart uploads below a destination."""
        found = self.client.list_multipart_uploads(Bucket=self.bucket, Prefix=self._prefix(destination))
        return [entry["Key"] for entry in found.get("Uploads", [])]

    def content(self, destination: str, name: str) -> bytes:
        key = self._prefix(destination) + name
        return bytes(self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read())

    def put(self, destination: str, name: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=self._prefix(destination) + name, Body=content)

    def delete(self, destination: str, name: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=self._prefix(destination) + name)

    def require_all_or_nothing(self, destination: str) -> dict[str, Any] | None:
        """Return the manifest, if there is one, after comparing every object that it names."""
        try:
            manifest: dict[str, Any] = json.loads(self.content(destination, "manifest.json"))
        except self.client.exceptions.NoSuchKey:
            return None
        for name, digest in manifest["files"].items():
            content = self.content(destination, f"{manifest['folder']}/{name}")
            assert (len(content), hashlib.sha256(content).hexdigest()) == (digest["size"], digest["sha256"]), name
        return manifest

    def require_only(self, destination: str) -> dict[str, Any]:
        """Return the manifest, after checking that there is nothing but the publication."""
        manifest = self.require_all_or_nothing(destination)
        assert manifest is not None
        assert self.keys(destination) == {
            "manifest.json",
            *(f"{manifest['folder']}/{name}" for name in manifest["files"]),
        }
        assert not self.uploads(destination)
        return manifest

    def _prefix(self, destination: str) -> str:
        return destination.removeprefix(f"s3://{self.bucket}/") + "/"


def _is_outage(fault: BaseException) -> bool:
    """Whether the server failed or did not answer, as opposed to an answer that should not be."""
    if isinstance(fault, ClientError):
        return int(fault.response["ResponseMetadata"]["HTTPStatusCode"]) >= 500
    return isinstance(fault, BotoCoreError)


@contextmanager
def watched(reader: Reader, destination: str, *, may_fail: bool = False) -> Iterator[list[BaseException]]:
    """Read the destination fifty times a second, and collect what readers may never see.

    With ``may_fail``, the server may also refuse to answer for a while.
    """
    faults: list[BaseException] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            try:
                reader.require_all_or_nothing(destination)
            except BaseException as fault:  # reported by the test
                if not (may_fail and _is_outage(fault)):
                    faults.append(fault)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield faults
    finally:
        ended.set()
        watcher.join()
