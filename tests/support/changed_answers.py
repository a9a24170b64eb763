"""Changes what a real S3 server answers, one operation at a time."""

from collections.abc import Callable
from typing import Any

import pytest

from t5train.release.object_store.bucket import BucketFolder


def answering(monkeypatch: pytest.MonkeyPatch, operation: str, change: Callable[..., Any]) -> None:
    """Have ``change`` send the requests of one operation: it gets a function that does, and may change the answer."""
    call = BucketFolder.call

    def changed(self: BucketFolder, sent: str, name: str | None = None, **arguments: Any) -> Any:
        if sent != operation:
            return call(self, sent, name, **arguments)
        return change(lambda: call(self, sent, name, **arguments), name)

    monkeypatch.setattr(BucketFolder, "call", changed)
