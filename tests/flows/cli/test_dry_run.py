"""Hosts on the command line determine the ranks, and a dry run shows what would start where."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli import run_command
from flows.run_parameters import RunParameters
from flows.spec_from_recipe import resolve
from infra.head.storage.continued_run import StoredRun
from t5train.checkpoint.resume import open_run
from t5train.records.stage_records import PairShards
from t5train.release.checkpoint_store.ledger import FoundLedger, Ledger, StoredTag
from t5train.release.object_store.bucket import BucketFolder
from t5train.spec.recipes import recipe

Printed = Callable[..., str]
SMALLER = ("--set", "layout.micro_batch_sequences=8")


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2 slots=4\nnode3 slots=2\n")
    return tmp_path / "hosts"


def test_a_dry_run_shows_the_hosts_and_the_command_that_starts_their_ranks(
    printed: Printed, golden: Callable[[str, str], None], hostfile: Path
) -> None:
    options = ("--hostfile", str(hostfile), "--include", "node1@node2:1,3", "--root", str(hostfile.parent / "root"))
    output = printed("run", "smoke", "--dry-run", *options, *SMALLER)
    of_hosts = output[output.index("# hosts") : output.index("# run folder")]
    for here, anywhere in ((sys.executable, "{python}"), (f"t5-pretrain-{os.getuid()}", "t5-pretrain-{uid}")):
        of_hosts = of_hosts.replace(here, anywhere)
    golden("hosts.dry-run", of_hosts)
    assert [path.name for path in hostfile.parent.iterdir()] == ["hosts"]


def test_the_hosts_determine_the_number_of_ranks_and_paths_are_made_absolute(
    hostfile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostfile.parent)
    of_hosts = {"cluster.hostfile": "hosts", "cluster.num_nodes": "1", "cluster.known_hosts": "known"}
    spec = resolve("smoke", of_hosts)
    assert spec.cluster.ranks == 2
    assert spec.cluster.hostfile == hostfile
    assert spec.cluster.known_hosts == hostfile.parent / "known"
    assert resolve("smoke", of_hosts | {"cluster.ranks": "2"}) == spec
    # The hosts have 8 ranks for the 8 stages; the recipe itself has only 2.
    staged = resolve("smoke", {"cluster.hostfile": "hosts", "layout.pipeline_stages": 8})
    assert (staged.cluster.ranks, staged.data_parallel_size) == (8, 1)


def test_a_dry_run_shows_that_it_continues_a_run_and_where_the_longer_one_is_published(
    printed: Printed, tmp_path: Path
) -> None:
    command = ("finetune", "reverse_and_sort", "--name", "digits", "--root", str(tmp_path), "--dry-run")
    command += ("--set", "optimizer.schedule=constant", "--set", "optimizer.num_steps=")
    spec = recipe("reverse_and_sort", {"optimizer.schedule": "constant", "name": "digits"})
    spec = spec.with_settings({"storage.root": json.dumps(str(tmp_path))})
    open_run(spec, PairShards(path=tmp_path / "shards", fingerprint="6" * 64, files={}))
    assert "continues" not in printed(*command[:-1], f"{command[-1]}1000")
    rows = dict(
        line.split("  ", 1) for line in printed(*command[:-1], f"{command[-1]}2000").splitlines() if "  " in line
    )
    assert rows["continues"].strip() == "run digits beyond the end that it was begun with"
    assert rows["publish to"].strip() == str(tmp_path / "published/digits-2000-steps")
    of_deployment = RunParameters(
        recipe="reverse_and_sort",
        root=tmp_path,
        run_name="digits",
        steps=2000,
        settings={"optimizer.schedule": "constant"},
        publish_under="s3://bucket/t5",
    )
    assert of_deployment.spec().storage.publish_to == "s3://bucket/t5/digits-2000-steps"


@pytest.mark.parametrize(
    ("weights", "said"), [((), "about 75.0% {one}, about 25.0% {two}"), (("1,4",), "20.0% {one}, 80.0% {two}")]
)
def test_a_dry_run_shows_the_shares_of_a_mixture(
    t5_pretrain: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    weights: tuple[str, ...],
    said: str,
) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("".join(f"The first text, line {number}.\n" for number in range(100_000, 190_000)))
    two.write_text("".join(f"The other text, line {number}.\n" for number in range(100_000, 130_000)))
    texts = [
        f"corpus.source={one}",
        f"corpus.mixed_with={two}",
        *(f"objective.mixing_weights={each}" for each in weights),
    ]
    t5_pretrain(
        "run", "smoke", "--dry-run", "--root", str(tmp_path), *(part for text in texts for part in ("--set", text))
    )
    output = capsys.readouterr().out
    assert f"shares   {said.format(one=one, two=two)}\n" in output, output


def test_a_dry_run_shows_where_checkpoints_and_model_go(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    stored = ("--set", "storage.publish_checkpoints_under=s3://runs/t5/", "--name", "wiki")
    command = ("run", "smoke", "--dry-run", "--publish-to", "sftp://me@host/models/wiki", *stored)
    t5_pretrain(*command)
    output = capsys.readouterr().out
    assert "\ncheckpoints  copied to s3://runs/t5/wiki while training\n" in output, output
    assert "\npublish to   sftp://host/models/wiki\n" in output, "without the user's name, which can be a key elsewhere"
    t5_pretrain(*command, "--json")
    values = json.loads(capsys.readouterr().out)
    shown = [values[name] for name in ("publish_to", "checkpoints_url", "continues_from")]
    assert shown == ["sftp://host/models/wiki", "s3://runs/t5/wiki", None]


@pytest.mark.parametrize("tag", [None, "step-00000100"])
def test_a_dry_run_of_a_stored_run_shows_what_it_continues_from_and_refuses_other_settings(
    printed: Printed,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tag: str | None,
) -> None:
    url = "s3://runs/t5/wiki"
    spec = resolve("smoke", {"corpus.source": "pydocs"}, run_name="wiki")
    checkpoints = () if tag is None else (StoredTag(tag=tag, folder=f"{tag}-0123456789ab", size=1),)
    ledger = Ledger(
        run={"unique_id": "1" * 32, "spec": spec.model_dump(mode="json")},
        config="recipe: smoke\ncorpus:\n  source: pydocs\n",
        holder=None,
        checkpoints=checkpoints,
    )
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    stored = StoredRun(BucketFolder(url), FoundLedger(ledger, "", 0.0))
    monkeypatch.setattr(run_command, "stored_run", lambda _: stored)
    command = ("run", "--from", url, "--root", str(tmp_path / "root"))
    where = "which has no checkpoint yet" if tag is None else f"whose newest checkpoint is {tag}"
    assert f"\ncontinues    from {url}, {where}\n" in printed(*command, "--dry-run")
    assert json.loads(printed(*command, "--dry-run", "--json"))["continues_from"] == url
    changed = ("--set", "optimizer.num_steps=100")
    assert refused(2, *command, *changed) == (
        f"error: the run in {url} was begun with other settings (optimizer.num_steps: 400 -> 100), and "
        "--from continues it only with its own: set these back\n"
    )
    assert "# would be refused\nthe run in " in printed(*command, "--dry-run", *changed, code=2)
    assert not (tmp_path / "root").exists()
