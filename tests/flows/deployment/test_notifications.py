"""The webhook's URL is a secret: it comes from the environment, and no error shows it."""

import pytest

from flows.deployment.notifications import WEBHOOK_VARIABLE, webhook_url
from t5train.errors import InputError


def test_a_webhook_is_a_url_of_http_or_https(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WEBHOOK_VARIABLE, raising=False)
    assert webhook_url() is None
    for url in ("https://hooks.example/services/T0/B0/secret", "http://127.0.0.1:1/"):
        monkeypatch.setenv(WEBHOOK_VARIABLE, url)
        assert webhook_url() == url


@pytest.mark.parametrize("url", ["hooks.example/secret", "ftp://hooks.example/secret", "https:///secret", "https://["])
def test_another_value_is_refused_without_showing_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WEBHOOK_VARIABLE, url)
    with pytest.raises(InputError) as refused:
        webhook_url()
    assert WEBHOOK_VARIABLE in str(refused.value)
    assert "secret" not in str(refused.value)
