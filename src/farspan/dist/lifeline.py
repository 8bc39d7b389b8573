"""One connection of every process to process 0, over which they learn that one has ended.

The system closes the connections of a process that dies, however it dies, so nothing has to be
polled; the connections of a host that vanishes break when its system no longer answers. What ends
the job is told to all in one line: `stop REASON`. An orderly end is told by `done`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable

OnStop = Callable[[str], None]
_SILENCE_SECONDS = 5, 5, 4  # first probe of a silent host, between probes, probes: 25 s in all
_HELLO_SECONDS = 10
_WELCOME = "welcome"


class Hub:
    """Process 0's end."""

    def __init__(self, count: int, on_stop: OnStop) -> None:
        """Listens at a free port.

        Args:
          count: Processes in all.
          on_stop: Called at most once, from any thread, with the reason why all must stop; it
            returns soon.
        """
        self._count, self._on_stop = count, on_stop
        ipv6 = socket.has_dualstack_ipv6()
        self._server = socket.create_server(
            ("", 0),
            family=socket.AF_INET6 if ipv6 else socket.AF_INET,
            dualstack_ipv6=ipv6,
            backlog=count,
        )
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._peers: dict[socket.socket, int] = {}
        self._lock = threading.Lock()
        self._last_word = ""
        self._empty = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="farspan-lifeline", daemon=True)
        self._thread.start()

    def stop(self, reason: str) -> None:
        """Tells every process why it must stop; only the first reason counts."""
        if self._tell(f"stop {_one_line(reason)}\n"):
            self._on_stop(_one_line(reason))

    def done(self) -> None:
        """Tells every process that the end is orderly."""
        self._tell("done\n")

    def wait_until_alone(self, seconds: float) -> None:
        """Waits until every other process has closed its connection, or the time is over."""
        with self._lock:
            if not self._peers:
                return
        self._empty.wait(seconds)

    def _tell(self, word: str) -> bool:
        """Tells the last word, unless there was one before."""
        with self._lock:
            if self._last_word:
                return False
            self._last_word = word
            for peer in self._peers:
                with contextlib.suppress(OSError):
                    peer.sendall(word.encode())
            return True

    def _listen(self) -> None:
        while True:
            for key, _ in self._selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._server:
                    self._welcome()
                else:
                    self._hear(connection)

    def _welcome(self) -> None:
        connection, _ = self._server.accept()
        connection.settimeout(_HELLO_SECONDS)
        hello = _read_line(connection)
        if not hello.isdigit() or not 0 < int(hello) < self._count:
            connection.close()  # of somebody else
            return
        _keep_alive(connection)
        with self._lock, contextlib.suppress(OSError):
            self._peers[connection] = int(hello)
            connection.sendall(f"{_WELCOME}\n{self._last_word}".encode())
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> None:
        index = self._peers[connection]
        line = _read_line(connection)
        if line.startswith("stop "):
            self.stop(line.removeprefix("stop "))
            return
        self._selector.unregister(connection)
        with self._lock:
            del self._peers[connection]
            if not self._peers:
                self._empty.set()
        connection.close()
        self.stop(f"process {index} of {self._count} is gone")


class Line:
    """The end of every other process.

    Attributes:
      broken: Whether process 0 is gone.
    """

    def __init__(self, index: int, count: int, address: tuple[str, int], on_stop: OnStop) -> None:
        """Connects to process 0.

        Args:
          index: This process.
          count: Processes in all.
          address: Host and port of the hub.
          on_stop: As for `Hub`.

        Raises:
          OSError: Process 0 cannot be reached there.
        """
        self._count, self._on_stop = count, on_stop
        self.broken = False
        self._socket = socket.create_connection(address, timeout=_HELLO_SECONDS)
        self._socket.sendall(f"{index}\n".encode())
        if _read_line(self._socket) != _WELCOME:
            raise ConnectionError(f"process 0 does not answer at {address}")
        self._socket.settimeout(None)
        _keep_alive(self._socket)
        self._thread = threading.Thread(target=self._listen, name="farspan-lifeline", daemon=True)
        self._thread.start()

    def stop(self, reason: str) -> None:
        """Asks process 0 to tell every process why it must stop."""
        with contextlib.suppress(OSError):
            self._socket.sendall(f"stop {_one_line(reason)}\n".encode())

    def done(self) -> None:
        """Waits for process 0 to say that the end is orderly, and closes the connection."""
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        line = _read_line(self._socket)
        self.broken = not line
        if line != "done":
            gone = f"process 0 of {self._count} is gone"
            self._on_stop(line.removeprefix("stop ") if line.startswith("stop ") else gone)


def _read_line(connection: socket.socket) -> str:
    """The next line without its end; nothing when the connection is closed or broken."""
    line = bytearray()
    try:
        while byte := connection.recv(1):
            if byte == b"\n":
                return line.decode(errors="replace")
            line += byte
    except OSError:
        pass
    return ""


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in zip(
        ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), _SILENCE_SECONDS, strict=True
    ):
        if hasattr(socket, name):  # macOS names the first one differently
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _one_line(text: str) -> str:
    return " ".join(text.split())
