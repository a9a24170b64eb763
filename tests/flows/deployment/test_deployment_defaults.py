"""What deployments train on, and what `up` and `deploy` say about it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flows.cli.operate import server_commands
from flows.deployment import deploy, deployment_defaults
from flows.deployment.definitions import Definitions
from flows.deployment.deploy import Deployed, other_texts
from flows.deployment.deployment_defaults import DeploymentDefaults, changed
from t5train.errors import SpecError
from t5train.spec.data_spec import HubText

ROOT = {"root": "/data/t5"}


def test_the_deployments_that_do_not_use_the_given_text_are_known() -> None:
    definitions = Definitions.load()
    defaults = DeploymentDefaults(root=Path("/data/t5"), corpus="/data/text")
    assert other_texts(definitions, defaults) == {"t5-pretrain/smoke": "pydocs", "t5-regression/nightly": None}
    assert other_texts(definitions, defaults.model_copy(update={"corpus": None})) == {}


def test_deploy_says_which_deployments_do_not_use_the_given_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    defaults = DeploymentDefaults(root=Path("/data/t5"), corpus="/data/text")
    others = {"t5-pretrain/smoke": "pydocs", "t5-regression/nightly": None}
    done = Deployed(["t5-pretrain/smoke", "t5-pretrain/base"], defaults, {}, others)
    monkeypatch.setattr(deploy, "deploy", lambda *_: done)
    server_commands._deploy({})
    said = capsys.readouterr().err
    assert "t5-pretrain/smoke does not train on /data/text: it uses pydocs\n" in said
    assert "t5-regression/nightly does not train on /data/text: it uses data of its own\n" in said
    assert "base" not in said


def test_a_text_given_as_a_setting_becomes_the_parameter_that_a_runs_page_shows() -> None:
    settings = {"corpus.source": "/data/text", "cluster.hostfile": "/data/hosts", "optimizer.seed": 7}
    made = DeploymentDefaults.of(changed(ROOT, {"deployed_settings": settings}))
    assert (made.corpus, made.hostfile) == ("/data/text", Path("/data/hosts"))
    assert made.deployed_settings == {"optimizer.seed": 7}
    of_earlier = ROOT | {"corpus": "/data/text", "deployed_settings": {"corpus.source": "/ignored until now"}}
    later = changed(ROOT | {"corpus": "/data/old"}, {"deployed_settings": settings})
    assert DeploymentDefaults.of(later).corpus == "/data/text"
    later = changed(of_earlier, {"corpus": "/data/new"})
    assert DeploymentDefaults.of(later).parameters() == ROOT | {"corpus": "/data/new"}


@pytest.mark.parametrize(
    ("then", "corpus"),
    [
        ({}, "/data/text"),
        ({"deployed_settings": {"optimizer.seed": 7}}, None),
        ({"deployed_settings": {}}, None),
        ({"deployed_settings": {"corpus.source": "/data/next"}}, "/data/next"),
        ({"corpus": "/data/next"}, "/data/next"),
    ],
)
def test_settings_replace_all_earlier_ones_also_those_that_are_shown_as_parameters(
    then: dict[str, Any], corpus: str | None
) -> None:
    kept: dict[str, Any] = ROOT
    for given in ({"deployed_settings": {"corpus.source": "/data/text"}}, {"scratch": "/scratch"}, then):
        kept = changed(kept, given)
    assert DeploymentDefaults.of(kept).corpus == corpus


@pytest.mark.parametrize("of_option", [{"corpus": "/data/mine"}, {"hostfile": "/data/hosts"}])
def test_what_an_option_gave_stays_when_settings_are_replaced(of_option: dict[str, str]) -> None:
    earlier, settings = ROOT | of_option, {"deployed_settings": {"optimizer.seed": 7}}
    assert DeploymentDefaults.of(changed(earlier, settings)).parameters() == earlier | settings


def test_two_texts_for_all_deployments_are_refused() -> None:
    with pytest.raises(SpecError, match=r"--corpus is /a, but --set corpus\.source is /b: give only one"):
        changed(ROOT, {"corpus": "/a", "deployed_settings": {"corpus.source": "/b"}})


def test_paths_in_the_settings_of_deployments_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["model.start_from=model", "tokenizer.path=spiece.model", "cluster.known_hosts=known"]
    settings += ['corpus.mixed_with=["more.txt", "pydocs", "s3://bucket/text"]', "corpus.source=text.txt"]
    given: dict[str, Any] = server_commands.DeployedOptions(changes=settings).parameters()
    assert given["deployed_settings"] == {
        "model.start_from": f"{tmp_path}/model",
        "tokenizer.path": f"{tmp_path}/spiece.model",
        "cluster.known_hosts": f"{tmp_path}/known",
        "corpus.mixed_with": [f"{tmp_path}/more.txt", "pydocs", "s3://bucket/text"],
        "corpus.source": f"{tmp_path}/text.txt",
    }


def test_the_text_is_checked_with_the_deployed_settings_that_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(deployment_defaults, "require_source", lambda *arguments: asked.append(arguments))
    settings = {"corpus.config": "en", "corpus.revision": "v2", "optimizer.num_steps": 7}
    defaults = DeploymentDefaults(root=Path("root"), corpus="hf://allenai/c4", deployed_settings=settings)
    defaults.refused(cast(Definitions, SimpleNamespace(deployments=[])))
    assert asked == [("hf://allenai/c4", "v2", None, HubText("en"))]
