"""An HTTP server that cuts slow clients and, on SIGTERM, answers what it has taken before it ends.

uvicorn is imported when a server starts.
"""

import json
import logging
import socket
import struct
from asyncio import TimerHandle, Transport
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI
    from uvicorn.protocols.http.h11_impl import H11Protocol

_HEADERS = [("X-Content-Type-Options", "nosniff"), ("Cache-Control", "no-store")]


def serve(app: "FastAPI", listening: socket.socket, read_seconds: float, answer_seconds: float) -> None:
    """Serve on a bound socket until SIGTERM or Ctrl-C, which are raised again after the last answer.

    A request, with its headers and its body, must be there within ``read_seconds``. Requests that were read are
    answered, as the application does within ``answer_seconds``. A client must take its answer in as much time again.
    """
    import uvicorn

    config = uvicorn.Config(
        app,
        http=_protocol(read_seconds, answer_seconds),
        ws="none",
        lifespan="off",
        log_level=logging.ERROR,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        headers=_HEADERS,
        timeout_graceful_shutdown=round(read_seconds + answer_seconds) + 1,
    )
    uvicorn.Server(config).run(sockets=[listening])


# C901 adds up the methods of the class, which stands in the function so that only servers import uvicorn.
def _protocol(read_seconds: float, take_seconds: float) -> "type[H11Protocol]":  # noqa: C901
    """Return uvicorn's protocol with limits to the time in which a request is read, and its answer is taken.

    uvicorn limits only idle time after an answer.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Timed(H11Protocol):
        """A connection, whose timer runs while a request is awaited or incomplete."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._timer: TimerHandle | None = None
            self._take_timer: TimerHandle | None = None

        def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # uvicorn narrows it, too
            super().connection_made(transport)
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            state, (next_request, _) = self.conn.their_state, self.conn.trailing_data
            if state not in {h11.IDLE, h11.SEND_BODY}:
                self._stop_timer()
            elif self._timer is None or (state is h11.IDLE and not next_request):
                self._start_timer()

        def on_response_complete(self) -> None:
            """Give the client time to take the answer, and time the next request if a part of it is there already."""
            self._stop_take_timer()
            self._take_timer = self.loop.call_later(take_seconds, self._cut_if_not_taken)
            super().on_response_complete()
            state, (next_request, _) = self.conn.their_state, self.conn.trailing_data
            if self._timer is None and (state is h11.SEND_BODY or (state is h11.IDLE and next_request)):
                self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            self._stop_take_timer()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            self._refuse("400 Bad Request", msg)

        def _start_timer(self) -> None:
            self._stop_timer()
            self._timer = self.loop.call_later(read_seconds, self._cut)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _stop_take_timer(self) -> None:
            if self._take_timer is not None:
                self._take_timer.cancel()

        def _cut_if_not_taken(self) -> None:
            if self.transport.get_write_buffer_size():
                # Otherwise, the kernel would go on offering the rest of the answer.
                at_once = struct.pack("ii", 1, 0)
                self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
                self.transport.abort()

        def _cut(self) -> None:
            self._refuse("408 Request Timeout", f"the request was not complete within {read_seconds:g} seconds")

        def _refuse(self, status: str, reason: str) -> None:
            if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:  # no answer has begun
                body = json.dumps({"error": reason})
                head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
                self.transport.write(f"HTTP/1.1 {status}\r\n{head}\r\n\r\n{body}".encode())
            self.transport.close()

    return Timed
