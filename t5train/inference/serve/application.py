"""The HTTP interface: POST /generate, GET /health, and a page. Every error is one line of JSON.

FastAPI is imported when a server starts.
"""

import asyncio
import re
from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import Future
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Protocol

from t5train.errors import InputError, T5TrainError
from t5train.inference.serve.access import Access
from t5train.inference.serve.limits import Limits
from t5train.inference.serve.question import Question
from t5train.inference.serve.text_queue import Asked, QueueFull, TextQueue
from t5train.inference.text.generation import Generated

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

_RETRY = {"Retry-After": "1"}


class Model(Protocol):
    """What reads questions."""

    tasks: Sequence[str]
    """The names of the tasks that it was fine-tuned with."""

    def asked(self, question: Question) -> Sequence[Asked]:
        """Return the texts that the model reads. Raises InputError if it does not read them."""


def application(model: Model, queue: TextQueue, access: Access, limits: Limits) -> "FastAPI":
    """Return the application. ``queue`` must be at work while it serves."""
    from fastapi import Depends, FastAPI, HTTPException, Request
    from fastapi.concurrency import run_in_threadpool
    from fastapi.responses import HTMLResponse, JSONResponse

    def own_host(request: Request) -> None:
        host = request.headers.get("host", "")
        if not access.allows_host(host):
            raise HTTPException(421, f"the request is for host {host!r}, but this server is localhost: ask that")

    def key(request: Request) -> None:
        if not access.allows_key(request.headers.get("authorization", "")):
            reason = "the key is missing or wrong: send it in the header 'Authorization: Bearer KEY'"
            raise HTTPException(401, reason, {"WWW-Authenticate": "Bearer"})

    handlers: dict[Any, Any] = {404: _refused, 405: _refused, HTTPException: _refused}
    handlers |= {T5TrainError: _failed, Exception: _failed}
    # A redirection to a path without a slash at its end would lead to whatever host the client names.
    app = FastAPI(
        openapi_url=None, redirect_slashes=False, exception_handlers=handlers, dependencies=[Depends(own_host)]
    )
    html = _page(model.tasks)

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(html, headers={"Content-Security-Policy": _policy(html)})

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok", "waiting_texts": queue.waiting()})

    @app.post("/generate", dependencies=[Depends(key)])
    async def generate(request: Request) -> JSONResponse:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "the Content-Type must be application/json")
        question = Question.of(await _body(request, limits.body_bytes), limits)
        answers = queue.add(await run_in_threadpool(model.asked, question))
        return JSONResponse({"answers": [each._asdict() for each in await _first(request, answers, limits)]})

    return app


def _refused(_: "Request", error: Any) -> "JSONResponse":
    from fastapi.responses import JSONResponse

    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


def _failed(_: "Request", error: Exception) -> "JSONResponse":
    from fastapi.responses import JSONResponse

    status = 422 if isinstance(error, InputError) else 503 if isinstance(error, T5TrainError) else 500
    reason = "an error of the server: its log has more" if status == 500 else str(error)
    return JSONResponse({"error": reason}, status, _RETRY if isinstance(error, QueueFull) else None)


def _page(tasks: Sequence[str]) -> str:
    """Return the page, on which one of the tasks is chosen if there are any."""
    options = "".join(f"<option>{escape(each)}" for each in tasks)
    choice = f'<label>Task <select name="task">{options}</select></label>' if tasks else ""
    return (files(__package__) / "page.html").read_text("utf-8").replace("<!-- task -->", choice)


def _policy(html: str) -> str:
    """Return a policy that allows only the style and the script inside a page, and requests to this server."""
    allowed = {
        tag: b64encode(sha256(content.encode()).digest()).decode()
        for tag, content in re.findall("<(style|script)>(.*?)</", html, re.DOTALL)
    }
    return (
        f"default-src 'none'; style-src 'sha256-{allowed['style']}'; script-src 'sha256-{allowed['script']}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


async def _body(request: "Request", most: int) -> bytes:
    from fastapi import HTTPException

    body, is_more = bytearray(), True
    while is_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise HTTPException(400, "the client has gone")
        body += message.get("body", b"")
        is_more = message.get("more_body", False)
        if len(body) > most:
            raise HTTPException(413, f"the body has more than {most} bytes: send fewer or shorter texts at a time")
    return bytes(body)


async def _first(request: "Request", answers: "Sequence[Future[Generated]]", limits: Limits) -> list[Generated]:
    """Wait for the answers. If the client goes or the time is up, those that still wait are dropped."""
    from fastapi import HTTPException

    gathered = asyncio.gather(*map(asyncio.wrap_future, answers))
    gathered.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio logs that nobody did
    gone: asyncio.Future[Any] = asyncio.ensure_future(request.receive())
    seconds = limits.answer_seconds
    try:
        either: list[asyncio.Future[Any]] = [gathered, gone]
        await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if gathered.done():
            return gathered.result()
        if gone.done():
            raise HTTPException(400, "the client has gone")
        raise HTTPException(503, f"no answer within {seconds:g} seconds: send fewer or shorter texts", _RETRY)
    except asyncio.CancelledError:  # a second Ctrl-C: uvicorn would log a traceback
        raise HTTPException(503, "the server was ended", _RETRY) from None
    finally:
        gone.cancel()
        gathered.cancel()
        for each in answers:
            each.cancel()
