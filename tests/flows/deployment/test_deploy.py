"""Which settings of its process a deployed run may choose."""

from prefect.utilities.templating import apply_values
from prefect.workers.process import ProcessJobConfiguration

from flows.deployment.deploy import job_template


def test_a_run_cannot_choose_the_command_environment_or_folder_of_its_process() -> None:
    template = job_template()
    chosen = {"command": "touch pwned", "env": {"LD_PRELOAD": "pwned.so"}, "working_dir": "/", "stream_output": False}
    job = ProcessJobConfiguration(**apply_values(template["job_configuration"], chosen))
    assert job.command is None
    assert job.env == {}
    assert job.working_dir is None
    assert job.stream_output is False
