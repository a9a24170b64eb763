"""``serve``: a model behind HTTP, with a page to try it."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.interruption import interrupt_on_stop
from flows.cli.models.model_commands import DeviceOption, ModelArgument
from flows.cli.stage_commands import require_finished
from flows.cli.terminal import complain, say
from flows.server import prefect_server
from flows.server.team_server import Address
from t5train.errors import InputError
from t5train.inference.serve.limits import Limits

_PACKAGES = ("fastapi", "uvicorn", "h11")
_USUAL = Limits(input_tokens=0)


def serve(  # noqa: PLR0913, PLR0917 - one for each option
    path: ModelArgument,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; one that others can reach needs a key")
    ] = prefect_server.HOST,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on")] = 8080,
    key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Private file with the key that clients must send",
            show_default="that in T5_PRETRAIN_SERVE_KEY, if any",
            readable=False,
        ),
    ] = None,
    max_input_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a text, with its prefix", show_default="as trained")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens that a request may ask for")
    ] = _USUAL.new_tokens,
    batch_sequences: Annotated[
        int, typer.Option(min=1, help="Most sequences to decode at once; a text has as many as beams")
    ] = _USUAL.batch_sequences,
    max_waiting: Annotated[int, typer.Option(min=1, help="Most texts that may wait")] = _USUAL.waiting_texts,
    timeout: Annotated[
        float, typer.Option(min=1, max=86400, metavar="SECONDS", help="Longest time until a request is answered")
    ] = _USUAL.answer_seconds,
    device: DeviceOption = None,
) -> None:
    """Serve a model: POST /generate, GET /health, and a page to try it, until Ctrl-C.

    $ t5-pretrain serve work/published/mine
    $ t5-pretrain serve MODEL --host 0.0.0.0 --key-file serve.key
    """
    interrupt_on_stop()
    require_finished(os.fspath(path.absolute()))
    _require_packages()
    from t5train.inference.model_folder import ModelFolder, chosen_device
    from t5train.inference.serve import http_server
    from t5train.inference.serve.access import Access
    from t5train.inference.serve.application import application
    from t5train.inference.serve.served_model import ServedModel
    from t5train.inference.serve.text_queue import TextQueue

    address = Address.of(host, port)
    access = Access.of(key_file, address.is_loopback)
    if not address.is_loopback:
        complain(
            f"warning: {address.ip} is not a loopback address, and texts and the key pass the network unencrypted: let "
            "the server listen on 127.0.0.1, behind a reverse proxy with TLS or an ssh tunnel"
        )
    folder, chosen = ModelFolder.open(path), chosen_device(device)
    limits = _USUAL._replace(
        input_tokens=max_input_tokens or folder.trained_tokens,
        new_tokens=max_new_tokens,
        batch_sequences=batch_sequences,
        waiting_texts=max_waiting,
        answer_seconds=timeout,
    )
    with prefect_server.listening(address.port, address.ip) as bound:
        say(f"loading {path}")
        model = ServedModel(folder, chosen, limits)
        with TextQueue(model.decode, limits.batch_sequences, limits.waiting_texts) as queue:
            say(f"{path} is served at {address.url}. Ctrl-C ends it")
            http_server.serve(
                application(model, queue, access, limits), bound, limits.read_seconds, limits.answer_seconds
            )


def _require_packages() -> None:
    if missing := [package for package in _PACKAGES if find_spec(package) is None]:
        raise InputError(
            f"this command needs {', '.join(missing)}, not installed here: pip install 't5-pretrain[serve]', or "
            "'fastapi>=0.139,<0.151' 'uvicorn>=0.34,<1'"
        )
