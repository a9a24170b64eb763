"""docs/reference/settings.md describes every setting, and is what the descriptions of the settings make."""

import re
from pathlib import Path

from t5train.spec import setting_names
from t5train.spec.recipes import RECIPES
from tests.support.settings_page import settings_page

PAGE = Path(__file__).parents[3] / "docs/reference/settings.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == settings_page(), "write it again: make settings-page"


def test_the_page_has_one_line_for_each_setting_and_each_recipe() -> None:
    lines = re.findall(r"^- `([a-z0-9_.]+)[=`]", PAGE.read_text("utf-8"), re.MULTILINE)
    assert lines[: -len(RECIPES)] != []
    assert sorted(lines) == sorted([*setting_names(), *RECIPES])
