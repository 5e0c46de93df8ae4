"""Connections of the endpoint's clients. No client can hold one by sending half a request.

A connection ends if a request's line and headers have not come within HEAD_SECONDS, or are larger than MOST_HEAD_BYTES;
also if the rest of a request is missing HEAD_SECONDS after its response.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 30.0
MOST_HEAD_BYTES = 1 << 16
_TOO_LARGE = f"The line and the headers of a request must have at most {MOST_HEAD_BYTES} bytes."


class HttpConnection(HttpToolsProtocol):
    """A connection of a client."""

    _end: asyncio.TimerHandle | None = None
    """Ends the connection, unless what must come does before."""
    _head_bytes = 0
    """Bytes so far of a head that has not ended; 0 between two heads."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._must_come()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_come()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        had_begun = self._head_bytes > 0
        super().data_received(data)
        if had_begun and self._head_bytes:  # the parser tells nothing of a header that has not ended
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self.send_400_response(_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 1
        self._must_come()

    def on_headers_complete(self) -> None:
        self._has_come()
        self._head_bytes = 0
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MOST_HEAD_BYTES:
            self.send_400_response(_TOO_LARGE)
            raise ValueError(_TOO_LARGE)  # so that the parser stops
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._has_come()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body:
            self._must_come()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def _must_come(self) -> None:
        self._has_come()
        self._end = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _has_come(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None
