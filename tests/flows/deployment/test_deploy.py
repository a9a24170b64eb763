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


DEPLOYMENT = "name: x, entrypoint: 'flows.pretrain:pretrain', description: d, enforce_parameter_schema: true"
IN_A_QUEUE = f"{DEPLOYMENT}, work_pool: {{name: t5-pretrain, work_queue_name: q}}"
SCHEDULE = "{slug: s, cron: '0 3 * * 0', timezone: UTC}"
AUTOMATION = "{name: a, trigger: {type: event, posture: Reactive, threshold: 1, within: 0}, actions: []}"


@pytest.mark.parametrize(
    ("deployments", "message"),
    [
        (f"deployments: [{{{DEPLOYMENT}}}]", "work_pool"),
        (f"deployments: [{{{DEPLOYMENT}, work_pool: {{name: mine, work_queue_name: q}}}}]", "name is 'mine'"),
        ("deployments: []\ndeploymens: 3", "deploymens is 3: unknown setting"),
        ("deployments: [", "is not YAML"),
        (
            f"deployments: [{{{IN_A_QUEUE}}}, {{{IN_A_QUEUE}}}]",
            "more than one definition is called: deployment x of flows.pretrain:pretrain",
        ),
        (
            f"deployments: [{{{IN_A_QUEUE}, schedules: [{SCHEDULE}, {SCHEDULE}]}}]",
            "more than one definition is called: schedule s of deployment x",
        ),
        (
            f"deployments: []\nautomations: [{AUTOMATION}, {AUTOMATION}]",
            "more than one definition is called: automation a",
        ),
    ],
)
def test_wrong_definitions_are_refused_with_a_reason(deployments: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        Definitions.parse(f"pull: []\n{deployments}", "prefect.yaml")
    assert str(refused.value).startswith("prefect.yaml")
