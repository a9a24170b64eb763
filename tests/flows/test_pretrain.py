"""A flow that is ended by SIGTERM records whether somebody cancelled it, and says how to continue."""

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import TerminationSignal

from flows import pretrain
from infra.head.launch.held_run import hold_run
from infra.head.launch.start_record import Ending, note_cancelled, read_start
from t5train import recipe


@pytest.mark.parametrize(
    ("answer", "how"),
    [
        (State(type=StateType.CANCELLING), Ending.CANCELLED),
        (State(type=StateType.CANCELLED), Ending.CANCELLED),
        (State(type=StateType.RUNNING), Ending.INTERRUPTED),
        (None, Ending.INTERRUPTED),
        (ConnectionError("the server is down"), Ending.INTERRUPTED),
    ],
)
def test_a_cancelled_run_is_told_apart_from_one_whose_worker_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: State | Exception | None, how: Ending
) -> None:
    def read_flow_run(_: str) -> SimpleNamespace:
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(state=answer)

    @contextmanager
    def get_client(**_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(read_flow_run=read_flow_run)

    monkeypatch.setattr(pretrain, "get_client", get_client)
    context = SimpleNamespace(get=lambda: SimpleNamespace(flow_run=SimpleNamespace(id="of the run")))
    monkeypatch.setattr(pretrain, "FlowRunContext", context)
    monkeypatch.setattr("infra.head.stop_signal.signal.raise_signal", lambda _number: None)
    with pytest.raises(TerminationSignal), hold_run(tmp_path), pretrain._noting_cancellation():
        raise TerminationSignal(15)
    assert getattr(read_start(tmp_path), "how", None) == how


def test_a_server_that_does_not_answer_is_asked_once_whether_the_run_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = SimpleNamespace(get=lambda: SimpleNamespace(flow_run=SimpleNamespace(id=uuid4())))
    monkeypatch.setattr(pretrain, "FlowRunContext", context)
    monkeypatch.setattr(pretrain, "_ANSWER_SECONDS", 0.05)
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/api")
        assert not pretrain._is_cancelled()
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


@pytest.mark.parametrize(("is_cancelled", "what"), [(True, "cancelled in Prefect"), (False, "stopped (SIGTERM)")])
def test_the_log_of_a_stopped_run_names_what_was_saved_and_how_to_continue(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    record_only_rank: Callable[..., None],
    is_cancelled: bool,
    what: str,
) -> None:
    spec = recipe("smoke", {"storage.root": str(tmp_path), "name": "mine"})
    tag = spec.run_folder / "checkpoints/step-00000003"
    tag.mkdir(parents=True)
    record_only_rank(tag, [], [])
    monkeypatch.setattr(pretrain, "get_run_logger", lambda: logging.getLogger("run"))
    signal = TerminationSignal(15)
    if is_cancelled:
        note_cancelled(signal)
    with pytest.raises(TerminationSignal), pretrain._explaining_stop(spec):
        raise signal
    assert caplog.messages == [
        f"The run was {what}; training resumes after step 3, from {tag}. To continue, retry it, or start a run with "
        "the same name and settings"
    ]
