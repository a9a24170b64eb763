"""How tasks use a run's metrics and failures: retries, the last step, and the choice of hosts."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
from prefect.states import Failed

from infra.head.host_selection import training_hosts
from infra.head.hosts.hostfile import Host, Hosts
from t5train.errors import LaunchError, NonFiniteLoss, SpecError
from t5train.records.metrics import last_metrics
from t5train.spec.recipes import recipe
from tasks.stage_tasks import is_transient


@pytest.mark.parametrize(
    ("error", "again"),
    [(LaunchError("killed"), True), (SpecError("wrong"), False), (NonFiniteLoss("nan"), False), (OSError(), False)],
)
def test_only_transient_failures_are_retried(error: Exception, again: bool) -> None:
    assert is_transient(cast(Any, None), cast(Any, None), Failed(data=error)) is again


def test_the_last_complete_line_with_a_loss_is_found_at_the_end_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_metrics(path) is None
    lines = [json.dumps({"step": step, "loss": 1.0, "filling": "x" * 100}) for step in range(2000)]
    path.write_text("\n".join(lines) + '\n{"step": 2000, "validation_loss": 1.0}\n{"step": 2001, "loss": 1')
    found = last_metrics(path)
    assert found is not None
    assert found["step"] == 1999


def test_a_spare_in_use_is_kept_when_the_head_restarts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\nc slots=1\n", "utf-8")
    settings = {"cluster.hostfile": json.dumps(str(tmp_path / "hosts")), "cluster.ranks": 2, "cluster.spares": 1}
    spec = recipe("smoke").with_settings(settings)
    a, b, c, other = (Hosts((Host(first, (0,)), Host(second, (0,)))) for first, second in ("ab", "ba", "ac", "ax"))
    for in_use, expected in ((None, a), (b, b), (c, c), (other, a), (Hosts((Host("a", (0,)),)), a)):
        assert training_hosts(spec, in_use) == expected
    assert training_hosts(spec, b, silent=["b"]) == c
