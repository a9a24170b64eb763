"""The pages of a team's server."""

from typing import Any

import pytest

from tests.support.team_servers import Team

pytestmark = [pytest.mark.slow, pytest.mark.ui]


def test_its_pages_work_under_another_name(team: Team, page: Any) -> None:
    server = f"http://localhost:{team.port}"  # as through a tunnel or a proxy
    page.log_in(server, (team.home / "api-key").read_text().strip())
    page.open(f"{server}/deployments")
    page.text("t5_11b_one_gpu")
