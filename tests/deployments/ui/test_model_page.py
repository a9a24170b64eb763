"""The page of a served model."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.stub_server import stub_server

pytestmark = [pytest.mark.slow, pytest.mark.ui]
KEY = "0123456789abcdef"
ADD_SCRIPT = """
(() => {
    const script = document.createElement("script")
    script.textContent = "window.added = true"
    document.body.append(script)
    return Boolean(window.added)
})()
"""


def fill(page: Any, field: str, text: str) -> None:
    page.value(f"document.querySelector('[name={field}]').value = {json.dumps(text)}")


def test_a_text_is_answered_on_the_page_and_what_is_wrong_is_said(page: Any, tmp_path: Path) -> None:
    with stub_server(tmp_path, key=KEY) as server:
        page.open(server.url)
        page.text("Try the model", "Generate")
        fill(page, "text", "a <b>bold</b> text")
        page.click("Generate")
        assert "the key is missing or wrong" in page.text("the key is missing")
        fill(page, "key", KEY)
        page.click("Generate")
        page.text("A <B>BOLD</B> TEXT")
        assert page.value(ADD_SCRIPT) is False
        server.process.kill()
        server.process.wait()
        page.click("Generate")
        page.text("The server did not answer")
