"""docs/reference/settings.md: every setting and every recipe. ``python -m tests.support.settings_page`` prints it."""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from t5train.spec import RunSpec
from t5train.spec.recipes import RECIPES, recipe
from t5train.spec.settings import Part, Setting, parts_of

_OPENING = """\
# Settings

For everyone who changes what a run does: every setting, its values and its default. [Recipes and
settings](../how-to/recipes.md) shows how to change them. `make settings-page` writes this page from
[t5train/spec](../../t5train/spec).

**Identity** settings determine the result, and make up the run's fingerprint: another value makes another run.
**Execution** settings determine only where and how the work is done, so they can change whenever a run continues.
Each setting is shown with its default; `null` means that it has no value.
"""


def settings_page() -> str:
    """Return the page as Markdown."""
    whole = parts_of(RunSpec)
    defaults = RunSpec(recipe="smoke").model_dump(mode="json")
    lines = [_OPENING, "## The run", "", *_settings(whole, defaults)]
    for part in _parts(whole):
        lines += [
            f"## {part.name}",
            "",
            f"{part.description}{_kind(part)}",
            "",
            *_settings(part, _within(defaults, part)),
        ]
    return "\n".join([*lines, *_recipes()])


def _parts(part: Part) -> Iterator[Part]:
    for member in part.members:
        if isinstance(member, Part):
            yield member
            yield from _parts(member)


def _kind(part: Part) -> str:
    return "" if part.is_identity else " These are execution settings."


def _settings(part: Part, defaults: dict[str, Any]) -> list[str]:
    settings = [member for member in part.members if isinstance(member, Setting)]
    mixed = len({setting.is_identity for setting in settings}) > 1
    return [*(_line(setting, defaults[setting.key], mixed) for setting in settings), ""]


def _line(setting: Setting, default: Any, mixed: bool) -> str:
    shown = "" if setting.name == "recipe" else f"={_shown(default)}"
    kind = " *Execution.*" if mixed and not setting.is_identity else ""
    values = f" ({values})" if (values := _values(setting.allowed)) else ""
    return f"- `{setting.name}{shown}`{values}: {setting.description.replace('<', '&lt;')}.{kind}"


def _values(allowed: str) -> str:
    """Return the allowed values in a few words. Which characters a text may have is left to the error."""
    without_null = re.sub(r",? or null$", "", allowed).removeprefix("a ").removeprefix("one of ")
    if without_null in {"text", "path", "true or false"}:
        return ""
    short = re.sub(r"text of (.*) of the characters .*", r"\1 characters", without_null)
    return re.sub(r"^(whole )?number (from |of )?", "", short).replace("at least ", "≥")


def _recipes() -> Iterator[str]:
    yield from ("## Recipes", "", "What each recipe changes of the defaults above.", "")
    for name in RECIPES:
        spec = recipe(name)
        default = RunSpec(recipe=name)
        changed = ", ".join(_changed(parts_of(RunSpec), spec.model_dump(mode="json"), default.model_dump(mode="json")))
        yield f"- `{name}`: {changed}"
    yield ""


def _changed(part: Part, values: dict[str, Any], defaults: dict[str, Any]) -> Iterator[str]:
    for member in part.members:
        value, default = values[member.key], defaults[member.key]
        if isinstance(member, Part):
            yield from _changed(member, value, default)
        elif value != default:
            yield f"`{member.name}={_shown(value)}`"


def _within(values: dict[str, Any], part: Part) -> dict[str, Any]:
    for key in part.name.split("."):
        values = values[key]
    return values


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


if __name__ == "__main__":
    sys.stdout.write(settings_page())
