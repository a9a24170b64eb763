"""The title of a run's page in Prefect: the run's name, and behind it what the run is doing or why it failed.

The title is the name of the flow run, which is the only text on the first screen of the page, and of lists of runs,
that can change while a run is running. Changing it changes one column of one row. It is not a change of state, so it
can neither conflict with a cancellation nor undo one, and the server keeps no history of it.
"""

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext

from tasks.artifacts import not_disturbing

_MOST_CHARACTERS = 400
_SEPARATOR = ": "
"""No name of a run contains it."""


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
