"""What definitions may say, and which settings of its process a deployed run may choose."""

import pytest
from prefect.utilities.templating import apply_values
from prefect.workers.process import ProcessJobConfiguration

from flows.deployment.definitions import Definitions
from flows.deployment.deploy import job_template
from t5train.errors import InputError


def test_a_run_cannot_choose_the_command_environment_or_folder_of_its_process() -> None:
    template = job_template()
    chosen = {"command": "touch pwned", "env": {"LD_PRELOAD": "pwned.so"}, "working_dir": "/", "stream_output": False}
    job = ProcessJobConfiguration(**apply_values(template["job_configuration"], chosen))
    assert job.command is None
    assert job.env == {}
    assert job.working_dir is None
    assert job.stream_output is False


FILE_START = "flows: {f: 'a:b'}\nqueues: [{name: q, description: d, runs_at_a_time: 1}]\n"


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("deployments: [{flow: g, name: x, queue: q, description: d}]", "g/x is of the flow 'g', but flows has only f"),
        (
            "deployments: [{flow: f, name: x, queue: r, description: d}]",
            "f/x is in the queue 'r', but queues has only q",
        ),
        ("deployments: []\nqueus: 3", "queus is 3: unknown setting"),
        ("deployments: [", "is not YAML"),
        (
            "deployments: [{flow: f, name: x, queue: q, description: d}, {flow: f, name: x, queue: q, description: d}]",
            "more than one definition is called: deployment f/x",
        ),
    ],
)
def test_wrong_definitions_are_refused_with_a_reason(rest: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        Definitions.parse(FILE_START + rest, "definitions.yaml")
    assert str(refused.value).startswith("definitions.yaml")
    assert str(refused.value).endswith("Correct the file")
