"""``init``: writes a configuration file to start from."""

from flows.cli.options import RecipeArgument, SetOption, settings
from flows.cli.terminal import say
from flows.spec_from_recipe import has_own_text
from t5train.spec.config_file import recipe_text
from t5train.spec.recipes import recipe as recipe_spec


def init(recipe: RecipeArgument, changes: SetOption = None) -> None:
    """Print a configuration file for `run --config` with every setting of a recipe, its value and a comment."""
    changed = settings(changes)
    spec = recipe_spec(recipe, changed)
    say(recipe_text(spec, needs_source=not has_own_text(recipe, changed)).removesuffix("\n"))
