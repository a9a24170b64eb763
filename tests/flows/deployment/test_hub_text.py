"""The text of all deployments, if it is a dataset of the Hugging Face Hub."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flows.deployment import deployment_defaults
from flows.deployment.definitions import Definitions
from flows.deployment.deployment_defaults import DeploymentDefaults
from t5train.spec.data_spec import HubText


def test_the_text_is_checked_with_the_deployed_settings_that_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(deployment_defaults, "require_source", lambda *arguments: asked.append(arguments))
    settings = {"corpus.config": "en", "corpus.revision": "v2", "optimizer.num_steps": 7}
    defaults = DeploymentDefaults(root=Path("root"), corpus="hf://allenai/c4", deployed_settings=settings)
    defaults.refused(cast(Definitions, SimpleNamespace(deployments=[])))
    assert asked == [("hf://allenai/c4", "v2", None, HubText("en"))]
