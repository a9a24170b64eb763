"""Changes what a real S3 server answers, one operation at a time."""

from collections.abc import Callable
from typing import Any

import pytest

from t5train.errors import StoreError
from t5train.records.stage_records import Export
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.publication import publish


def answering(monkeypatch: pytest.MonkeyPatch, operation: str, change: Callable[..., Any]) -> None:
    """Have ``change`` send the requests of one operation: it gets a function that does, and may change the answer."""
    call = BucketFolder.call

    def changed(self: BucketFolder, sent: str, name: str | None = None, **arguments: Any) -> Any:
        if sent != operation:
            return call(self, sent, name, **arguments)
        return change(lambda: call(self, sent, name, **arguments), name)

    monkeypatch.setattr(BucketFolder, "call", changed)


def refusing(monkeypatch: pytest.MonkeyPatch, *operations: str) -> None:
    """Have the server deny these operations."""

    def refused(self: BucketFolder, sent: str, name: str | None = None, **arguments: Any) -> Any:
        if sent in operations:
            raise StoreError(f"{sent}: access denied", code="AccessDenied")
        return call(self, sent, name, **arguments)

    call = BucketFolder.call
    monkeypatch.setattr(BucketFolder, "call", refused)


def noted_requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Return a list that gets the operation and the name of every request that is sent from now on."""

    def noted(self: BucketFolder, sent: str, name: str | None = None, **arguments: Any) -> Any:
        requests.append((sent, name))
        return call(self, sent, name, **arguments)

    requests, call = list[tuple[str, str | None]](), BucketFolder.call
    monkeypatch.setattr(BucketFolder, "call", noted)
    return requests


def unconditional(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the server ignore the condition that an object must not exist yet."""

    def ignoring(self: BucketFolder, sent: str, name: str | None = None, **arguments: Any) -> Any:
        arguments.pop("IfNoneMatch", None)
        return call(self, sent, name, **arguments)

    call = BucketFolder.call
    monkeypatch.setattr(BucketFolder, "call", ignoring)


def killed_before_the_manifest(export: Export, destination: str) -> None:
    """Upload an export, and end like a killed process right before its manifest is written."""

    def killed(send: Callable[[], Any], name: str | None) -> Any:
        if name == "manifest.json":
            raise KeyboardInterrupt
        return send()

    with pytest.MonkeyPatch.context() as patch:
        answering(patch, "put_object", killed)
        with pytest.raises(KeyboardInterrupt):
            publish(export, destination)
