"""The parameters of a run: what the server refuses when a run is created, and the spec that they become."""

from pathlib import Path
from typing import Any

import pytest
from prefect.utilities.schema_tools.validation import ValidationError, validate

from flows.deployment.deploy import parameter_schema
from flows.finetune import finetune
from flows.pretrain import pretrain
from flows.run_parameters import RunParameters
from t5train.errors import SpecError
from t5train.spec.recipes import RECIPES

ROOT = Path("/data/t5")


def create(**parameters: Any) -> None:
    """Validate parameters as the server does when a run is created."""
    validate({"recipe": "moe", "root": str(ROOT)} | parameters, parameter_schema(pretrain), raise_on_error=True)


def parameters(recipe: str = "base", **more: Any) -> RunParameters:
    return RunParameters(recipe=recipe, root=ROOT, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"recipe": "mo"}, "'mo' is not one of"),
        ({"steps": 0}, "less than the minimum of 1"),
        ({"stepz": 5}, "'stepz'"),
        ({"root": "work"}, "'work' does not match"),
        ({"settings": {"optimizer.num_step": 5}}, "'optimizer.num_step' was unexpected"),
        ({"settings": {"optimizer.num_steps": -5}}, "-5 is less than the minimum of 1"),
        ({"settings": {"optimizer.precision": "fp8"}}, "'fp8' is not one of"),
        ({"deployed_settings": {"cluster.port": 22}}, "'cluster.port' was unexpected"),
        ({"corpus": "https://user:secret@host/text.txt"}, "does not match"),
        ({"corpus": "https://host/text.txt?key=secret"}, "does not match"),
        ({"corpus": "filecache::https://user:secret@host/text.txt"}, "does not match"),
        ({"publish_under": "s3://key@bucket/t5"}, "does not match"),
        ({"settings": {"corpus.source": "https://user:secret@host/text.txt"}}, "does not match"),
        ({"settings": {"model.start_from": "s3://key:secret@bucket/t5"}}, "does not match"),
        ({"settings": {"tokenizer.path": "https://host/spiece.model?key=secret"}}, "does not match"),
        ({"settings": {"corpus.mixed_with": ["more.txt", "https://user:secret@host/text.txt"]}}, "does not match"),
        ({"settings": {"corpus.test_sets": ["s3://key:secret@bucket/squad.jsonl"]}}, "does not match"),
        ({"corpus": "text.txt"}, "'text.txt' does not match"),
        ({"publish_under": "published"}, "'published' does not match"),
        ({"settings": {"corpus.source": "./text.txt"}}, "'./text.txt' does not match"),
        ({"settings": {"corpus.mixed_with": ["/data/text.txt", "more.txt"]}}, "'more.txt' does not match"),
        ({"settings": {"corpus.test_sets": ["squad.jsonl"]}}, "'squad.jsonl' does not match"),
        ({"settings": {"corpus.remove_listed": "pairs.jsonl"}}, "'pairs.jsonl' does not match"),
        ({"settings": {"tokenizer.path": "spiece.model"}}, "'spiece.model' does not match"),
        ({"settings": {"model.start_from": "runs/old/export"}}, "'runs/old/export' does not match"),
        ({"settings": {"storage.publish_to": "pydocs2"}}, "'pydocs2' does not match"),
        ({"settings": {"cluster.hostfile": "hosts"}}, "'hosts' does not match"),
        ({"settings": {"cluster.known_hosts": "../known_hosts"}}, "'../known_hosts' does not match"),
        ({"deployed_settings": {"storage.root": "work"}}, "'work' does not match"),
    ],
)
def test_the_server_refuses_a_wrong_parameter_when_a_run_is_created(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        create(**wrong)


def test_the_server_accepts_every_kind_of_parameter() -> None:
    settings = {"optimizer.num_steps": 5, "cluster.hostfile": None, "corpus.split": [900, 50, 50], "name": "n"}
    create(settings=settings, corpus="/data/part-??.txt", publish_under="s3://bucket/t5", hostfile="/etc/hosts")
    create(corpus="psgs_w100", settings={"corpus.mixed_with": ["pydocs", "hf://owner/name", "~/text"]})
    create(settings={"tokenizer.path": "~/spiece.model", "model.start_from": "file:///data/t5", "storage.root": "~/t5"})
    for start in ("hf://owner/t5@refs/pr/1", "s3://bucket/published/t5"):
        create(settings={"model.start_from": start})
    create(corpus=None, steps=None, run_name=None, settings=None, publish_under=None, hostfile=None, scratch=None)
    create(run_name="mine", steps=10, trial=True, scratch="/local", adopt=False, corpus="filecache::s3://bucket/a.gz")


def test_settings_of_a_run_take_precedence_over_those_of_the_deployment() -> None:
    spec = parameters(
        corpus="/data/of deployment.txt",
        steps=10,
        deployed_settings={"optimizer.seed": 1},
        settings={"optimizer.seed": 2, "optimizer.warmup_steps": 5},
    ).spec()
    assert (spec.corpus.source, spec.optimizer.num_steps) == ("/data/of deployment.txt", 10)
    assert (spec.optimizer.seed, spec.optimizer.warmup_steps) == (2, 5)


def test_every_run_is_published_in_a_folder_of_its_own_where_its_own_parameter_says() -> None:
    spec = parameters(publish_under="s3://bucket/t5/", corpus="/data/text").spec()
    assert spec.storage.publish_to == f"s3://bucket/t5/{spec.run_name}"
    of_deployment = {"storage.publish_to": "s3://bucket/all"}
    run = parameters(corpus="/data/text", run_name="mine", publish_under="/mine", deployed_settings=of_deployment)
    assert run.spec().storage.publish_to == "/mine/mine"


def test_a_recipe_for_gpus_needs_a_text_and_the_smoke_recipe_does_not() -> None:
    with pytest.raises(SpecError, match=r"with --corpus or in corpus\.source .* t5-pretrain run base --trial"):
        parameters().possible_spec()
    assert parameters(corpus="/data/text").possible_spec().corpus.source == "/data/text"
    assert parameters("smoke").possible_spec().corpus.source == "pydocs"


OF_DEPLOYMENT: dict[str, Any] = {
    "corpus": "/data/text",
    "hostfile": ROOT / "hosts",
    "scratch": Path("/local"),
    "publish_under": "s3://bucket/t5",
    "deployed_settings": {"optimizer.seed": 7, "corpus.mixed_with": ["/data/more"]},
}


@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if not recipe().is_fine_tuning])
def test_a_trial_uses_the_recipes_layout_and_the_deployments_text_and_nothing_else_of_it(recipe: str) -> None:
    trial = parameters(recipe, trial=True, steps=20, **OF_DEPLOYMENT)
    spec, full = trial.possible_spec(), RECIPES[recipe]()
    assert (spec.corpus.source, spec.corpus.mixed_with) == ("/data/text", ("/data/more",))
    assert (spec.cluster.hostfile, spec.storage.scratch, spec.storage.publish_to) == (None, None, None)
    assert (spec.cluster.accelerator, spec.optimizer.num_steps, spec.optimizer.seed) == ("cpu", 20, full.optimizer.seed)
    kept = {"micro_batch_sequences", "pin_memory"}
    assert spec.layout.model_dump(exclude=kept) == full.layout.model_dump(exclude=kept)
    assert (spec.model.moe, spec.optimizer.precision) == (full.model.moe, full.optimizer.precision)


def test_a_trial_without_a_text_uses_pythons_documentation_and_says_so() -> None:
    trial = parameters(trial=True)
    assert trial.possible_spec().corpus.source == "pydocs"
    assert trial.used().corpus == "pydocs"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (
            OF_DEPLOYMENT | {"trial": True},
            {"trial": True, "corpus": "/data/text", "deployed_settings": {"corpus.mixed_with": ["/data/more"]}},
        ),
        ({"recipe": "smoke"}, {"corpus": "pydocs"}),
        (
            {"corpus": "/data/text", "steps": 9, "settings": {"corpus.source": "/mine", "optimizer.num_steps": 20_000}},
            {"settings": {"corpus.source": "/mine", "optimizer.num_steps": 20_000}},
        ),
        (
            {"corpus": "/data/text", "hostfile": ROOT / "hosts", "settings": {"cluster.hostfile": None}},
            {"corpus": "/data/text", "settings": {"cluster.hostfile": None}},
        ),
        (
            {
                "corpus": "/data/text",
                "publish_under": "/mine",
                "deployed_settings": {"storage.publish_to": "s3://bucket/t5", "corpus.source": "/other"},
            },
            {"corpus": "/data/text", "publish_under": "/mine"},
        ),
        (
            {"deployed_settings": {"corpus.source": "/of deployment"}},
            {"deployed_settings": {"corpus.source": "/of deployment"}},
        ),
    ],
)
def test_the_page_of_a_run_shows_only_parameters_that_the_run_uses(
    given: dict[str, Any], shown: dict[str, Any]
) -> None:
    run = parameters(**given)
    fixed = {"recipe": run.recipe, "root": str(ROOT), "trial": False}
    assert run.used().model_dump(mode="json", exclude_none=True) == fixed | shown
    assert run.used().spec() == run.spec()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"settings": {"storage.root": "/other"}}, "storage.root is '/other' in the settings, but the parameter root"),
        ({"deployed_settings": {"storage.root": "/other"}}, "the parameter root is '/data/t5': leave the setting out"),
        ({"settings": {"name": "a"}, "run_name": "b"}, "name is 'a' in the settings, but the parameter run_name is"),
    ],
)
def test_two_different_folders_for_a_run_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parameters("smoke", **given).spec()
    same = {"settings": {"storage.root": str(ROOT), "name": "a"}, "run_name": "a"}
    assert parameters("smoke", **same).spec().run_folder == ROOT / "runs" / "a"


@pytest.mark.parametrize("relative", [{"root": "work"}, {"corpus": "text.txt"}, {"publish_under": "published"}])
def test_a_relative_path_is_refused_because_a_worker_has_another_current_folder(relative: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="give an absolute path"):
        RunParameters(**{"recipe": "smoke", "root": ROOT} | relative).spec()


def test_the_server_accepts_pairs_of_the_flow_that_trains_on_them_and_refuses_secrets_and_relative_paths() -> None:
    schema, fixed = parameter_schema(finetune), {"recipe": "finetune_base", "root": str(ROOT)}
    for train in (
        ["/data/wmt.jsonl#source=en&target=de", "sort_digits#task=sort"],
        ["hf://owner/name", "s3://b/a.tsv"],
    ):
        validate(fixed | {"train": train}, schema, raise_on_error=True)
    wrong: list[dict[str, Any]] = [
        {"train": ["/data/a.jsonl", "wmt.jsonl"]},
        {"train": ["https://user:secret@host/a.jsonl"]},
        {"settings": {"pairs.test": ["https://host/a.jsonl?key=secret"]}},
        {"corpus": "/data/text"},
        {"recipe": "base"},
    ]
    for each in wrong:
        with pytest.raises(ValidationError):
            validate(fixed | each, schema, raise_on_error=True)


def test_a_recipe_on_pairs_for_gpus_needs_pairs_and_starts_with_the_vocabulary_of_its_model(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"needs pairs to train on: name a file with --train .* finetune_base --trial"):
        parameters("finetune_base").possible_spec()
    start = {"model.start_from": str(tmp_path)}
    spec = parameters("finetune_base", train=["/data/a.jsonl"], settings=start).spec()
    assert (spec.pairs.train, spec.tokenizer.path) == (("/data/a.jsonl",), str(tmp_path))
    given = parameters("finetune_base", settings=start | {"tokenizer.path": "/data/spiece.model"}).spec()
    assert given.tokenizer.path == "/data/spiece.model"


def test_a_run_on_pairs_ignores_what_its_deployment_says_of_texts_and_refuses_to_be_told_itself() -> None:
    of_deployment = {"corpus.source": "/data/text", "objective.input_tokens": 256, "optimizer.seed": 7}
    run = parameters("reverse_and_sort", corpus="/data/text", deployed_settings=of_deployment)
    assert run.possible_spec().optimizer.seed == 7
    assert run.used().corpus is None
    assert run.used().deployed_settings == {"optimizer.seed": 7}
    assert run.used().train == ["reverse_digits", "sort_digits"]
    for recipe, setting, said in (
        ("reverse_and_sort", "objective.input_tokens", r"trains on pairs, .*: set pairs\.input_tokens"),
        ("reverse_and_sort", "corpus.mixed_with", r"trains on pairs, .*: leave corpus\.mixed_with out"),
        ("smoke", "pairs.train", r"trains on text, .*: leave pairs\.train out"),
    ):
        with pytest.raises(SpecError, match=said):
            parameters(recipe, settings={setting: 64}).spec()


def test_a_run_on_pairs_states_their_licence_and_languages_and_not_those_of_its_deployments_text() -> None:
    stated = {"corpus.license": "mit", "corpus.languages": ["en"]}
    corpus = parameters("reverse_and_sort", settings=stated).spec().corpus
    assert (corpus.license, corpus.languages) == ("mit", ("en",))
    assert parameters("reverse_and_sort", deployed_settings=stated).spec().corpus.license is None


def test_a_trial_on_pairs_keeps_the_recipes_dropout_and_the_given_pairs() -> None:
    trial = parameters("finetune_base", trial=True)
    spec = trial.possible_spec()
    assert (spec.pairs.train, spec.model.dropout_rate) == (("reverse_digits", "sort_digits"), 0.1)
    assert (spec.cluster.accelerator, spec.model.start_from, spec.model.compile) == ("cpu", None, False)
    deployed = {"pairs.train": ["/data/a.jsonl"], "optimizer.seed": 7}
    spec = parameters("finetune_base", trial=True, deployed_settings=deployed).possible_spec()
    assert (spec.pairs.train, spec.optimizer.seed) == (("/data/a.jsonl",), 0)
    assert (trial.spec().tokenizer.vocab_size, spec.tokenizer.vocab_size) == (31, 2000)  # digits, or any text


def test_a_trial_of_adapters_starts_from_the_model_of_another_trial() -> None:
    lora = {"finetune.lora.rank": "4", "optimizer.kind": "adamw"}
    with pytest.raises(
        SpecError, match=r"lora\.rank is 4, but a trial draws .* Run the trial without finetune\.lora first"
    ):
        parameters("finetune_base", trial=True, settings=lora).spec()
    spec = parameters("finetune_base", trial=True, settings=lora | {"model.start_from": "/published/start"}).spec()
    assert (spec.model.start_from, spec.model.preset) == ("/published/start", "smoke")
