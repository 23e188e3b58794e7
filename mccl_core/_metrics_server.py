"""Serves the metrics over HTTP, for Prometheus."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

log = logging.getLogger("mccl")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PORTS_TRIED = 64


class MetricsServer:
    """Serves the text at http://ADDRESS:PORT/metrics, from a thread of its own."""

    def __init__(self, address: str, port: int, text: Callable[[], str]) -> None:
        """Listens on the first free port from `port` on: other jobs of the machine may have some.

        Raises:
            OSError: the address is not this machine's, or no port is free; the text says what to do.
        """
        handler = type("Handler", (_Handler,), {"text": staticmethod(text)})
        self._server = _bind(address, port, handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="mccl-metrics", daemon=True)
        self._thread.start()
        log.info("mccl: metrics are at http://%s:%d/metrics", address, self.port)

    def stop(self) -> None:
        """Closes the port and ends the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def close_descriptors_in_child(self) -> None:
        """In a forked child, where the thread does not exist."""
        self._server.socket.close()


class _Handler(BaseHTTPRequestHandler):
    text: Callable[[], str]
    timeout = 5.0  # s; for a client that says nothing

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "the metrics are at /metrics")
            return
        body = self.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        log.debug(f"mccl: metrics: {format}", *args)


class _Server(ThreadingHTTPServer):
    allow_reuse_address = False  # else two ranks could share a port
    daemon_threads = True


def _bind(address: str, port_base: int, handler: type[_Handler]) -> ThreadingHTTPServer:
    last = min(port_base + PORTS_TRIED, 65536)
    for port in range(port_base, last):
        try:
            return _Server((address, port), handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise OSError(
                error.errno, f"metrics_port (MCCL_METRICS_PORT): cannot listen on {address}:{port}: {error.strerror}"
            ) from error
    raise OSError(
        errno.EADDRINUSE,
        f"metrics_port (MCCL_METRICS_PORT): no port from {port_base} to {last - 1} is free on {address}; "
        "set another, or none",
    )
