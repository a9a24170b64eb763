"""The page of a run in Prefect: its title, and artifacts that are updated in place, without disturbing the run.

The title is the run's name, and behind it what the run is doing or why it failed. It is the name of the flow run, which
is the only text on the first screen of the page, and of lists of runs, that can change while a run is running. Changing
it changes one column of one row. It is not a change of state, so it can neither conflict with a cancellation nor undo
one, and the server keeps no history of it.
"""

import base64
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import (
    create_image_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
)
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.sorting import ArtifactSort
from prefect.context import FlowRunContext
from prefect.runtime import flow_run

from t5train.files.os_errors import in_one_line
from t5train.release.markdown import escaped

_MOST_CHARACTERS = 400
_SEPARATOR = ": "
"""No name of a run contains it."""

_Rows = Sequence[Mapping[str, Any]]
_log = logging.getLogger(__name__)


@contextmanager
def not_disturbing(what: str) -> Iterator[None]:
    """Turn any error in the block into a warning: if the server does not respond, the run continues."""
    try:
        yield
    except Exception as error:  # Prefect's client raises errors of many types if the server is gone
        _log.warning("could not show %s: %s", what, in_one_line(error))


def show_in_title(text: str | None) -> None:
    """Show the text behind the name of the current flow run; None shows the name alone.

    Does nothing outside of a flow run. If the server does not respond, a warning is logged.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    own = name_in(context.flow_run.name)  # which has a title behind it if an earlier attempt failed or was killed
    with not_disturbing("the title of the run's page"), get_client(sync_client=True) as client:
        client.set_flow_run_name(context.flow_run.id, own if text is None else titled(own, text))


def titled(name: str, text: str) -> str:
    """Return the title with this text behind a run's name."""
    return f"{name}{_SEPARATOR}{text}"[:_MOST_CHARACTERS]


def name_in(title: str) -> str:
    """Return the run's name in a title."""
    return title.partition(_SEPARATOR)[0]


class Shown:
    """An artifact of the current task or flow run. The first call of ``show`` creates it, later ones replace its data.

    Its description is a text: what Markdown would change in it, as the UI shows it as Markdown, is escaped.

    Prefect's own update functions also emit an event with all data, which the server keeps for a week. An artifact that
    is updated every second would fill its database, so this class changes only the artifact's row.
    """

    def __init__(self, create: Callable[[Any, str, str], UUID], encode: Callable[[Any], Any], key: str) -> None:
        """``create`` gets data, key and description, and ``encode`` makes of data what the server stores."""
        self._create, self._encode, self._key = create, encode, key
        self._id: UUID | None = None

    def show(self, data: Any, description: str) -> None:
        """Create or update the artifact. If that fails, a warning is logged."""
        shown = escaped(description)
        with not_disturbing(f"the artifact {self._key}"):
            if self._id is None:
                self._id = self._create(data, self._key, shown)
                return
            change = {"data": self._encode(data), "description": shown}
            with get_client(sync_client=True) as client:
                client.request("PATCH", "/artifacts/{id}", json=change, path_params={"id": self._id})


def shown_progress(key: str) -> Shown:
    """Return an artifact whose data are a percentage."""
    return Shown(lambda data, key, text: cast(UUID, create_progress_artifact(data, key, text)), float, key)


def shown_table(key: str) -> Shown:
    """Return an artifact whose data are the rows of a table. Its cells are texts and numbers, not Markdown."""

    def create(rows: _Rows, key: str, description: str) -> UUID:
        return cast(UUID, create_table_artifact(_escaped_cells(rows), key, description))

    return Shown(create, lambda rows: json.dumps(_escaped_cells(rows)), key)


def _escaped_cells(rows: _Rows) -> list[dict[str, Any]]:
    """Return rows of which the UI, which shows texts as Markdown, shows exactly the texts."""
    return [{name: escaped(cell) if isinstance(cell, str) else cell for name, cell in row.items()} for row in rows]


def shown_markdown(key: str) -> Shown:
    """Return an artifact whose data are Markdown."""
    return Shown(lambda data, key, text: cast(UUID, create_markdown_artifact(data, key, text)), str, key)


def shown_png(key: str) -> Shown:
    """Return an artifact whose data are a PNG. It is stored as a data URL, as an artifact has no attached files."""
    return Shown(lambda data, key, text: cast(UUID, create_image_artifact(data_url(data), key, text)), data_url, key)


def data_url(png: bytes) -> str:
    """Return a picture as a data URL."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def artifact_pages() -> dict[str, str]:
    """Return the paths of the pages of this flow run's artifacts in Prefect's UI, by key; the newest of each key.

    Without a host name, these links also work through a tunnel.
    """
    with get_client(sync_client=True) as client:
        of_run = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(flow_run.id)]))
        found = client.read_artifacts(flow_run_filter=of_run, sort=ArtifactSort.CREATED_DESC)
    return {each.key: f"/artifacts/artifact/{each.id}" for each in reversed(found) if each.key is not None}
