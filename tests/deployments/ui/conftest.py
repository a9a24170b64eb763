"""Pictures of what the browser shows."""

import base64
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def screenshot(page: Any) -> Callable[[str], None]:
    """Saves what the browser shows as a picture for the documentation, if the variable SCREENSHOTS names a folder."""

    def screenshot(name: str) -> None:
        if folder := os.environ.get("SCREENSHOTS"):
            time.sleep(5)  # animations
            top = {"x": 0, "y": 0, "width": 1400, "height": 620, "scale": 1}
            picture = page.send("Page.captureScreenshot", format="png", clip=top)["data"]
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{name}.png").write_bytes(base64.b64decode(picture))

    return screenshot
