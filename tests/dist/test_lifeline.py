"""Over the lifeline every process learns that another one has ended, and why."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from farspan.dist.lifeline import Hub, Line

COUNT = 3
SECONDS = 20.0


class Heard:
    """What one process is told."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._any = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self._any.set()

    def reason(self) -> str:
        assert self._any.wait(SECONDS)
        (reason,) = self.reasons
        return reason


class Processes:
    """Process 0 to 2 in threads of this one."""

    def __init__(self) -> None:
        self.heard = [Heard() for _ in range(COUNT)]
        self.hub = Hub(COUNT, self.heard[0])
        self.lines = [
            Line(index, COUNT, ("127.0.0.1", self.hub.port), self.heard[index])
            for index in range(1, COUNT)
        ]


def cut(connection: socket.socket) -> None:
    """What the system does with the connection of a process that was killed."""
    connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def processes() -> Iterator[Processes]:
    joined = Processes()
    yield joined
    joined.hub.done()
    for line in joined.lines:
        line.done()


def test_the_end_of_one_is_told_to_all_others(processes: Processes) -> None:
    cut(processes.lines[0]._socket)
    assert processes.heard[0].reason() == "process 1 of 3 is gone"
    assert processes.heard[2].reason() == "process 1 of 3 is gone"


def test_why_one_failed_is_told_in_one_line_and_only_the_first_reason_counts(
    processes: Processes,
) -> None:
    processes.lines[1].stop("process 2 of 3 failed: ValueError: bad\n  data")
    for heard in processes.heard:
        assert heard.reason() == "process 2 of 3 failed: ValueError: bad data"
    processes.hub.stop("process 0 of 3 failed: it, too")
    cut(processes.lines[0]._socket)
    cut(processes.lines[1]._socket)
    processes.hub.wait_until_alone(SECONDS)
    assert [len(heard.reasons) for heard in processes.heard] == [1, 1, 1]


def test_an_orderly_end_tells_nobody_to_stop(processes: Processes) -> None:
    processes.hub.done()
    for line in processes.lines:
        line.done()
    processes.hub.wait_until_alone(SECONDS)
    assert not any(heard.reasons for heard in processes.heard)


def test_the_end_of_process_0_is_noticed_by_the_others() -> None:
    heard = Heard()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def welcome_and_die() -> None:
            connection, _ = server.accept()
            connection.recv(16)
            connection.sendall(b"welcome\n")
            connection.close()

        hub = threading.Thread(target=welcome_and_die)
        hub.start()
        line = Line(1, COUNT, server.getsockname(), heard)
        hub.join()
        assert heard.reason() == "process 0 of 3 is gone"
        line.done()
        assert line.broken


def test_strangers_are_sent_away(processes: Processes) -> None:
    for hello in (b"GET / HTTP/1.1\r\n\r\n", b"7\n"):
        with socket.create_connection(("127.0.0.1", processes.hub.port)) as stranger:
            stranger.settimeout(SECONDS)
            stranger.sendall(hello)
            assert _is_closed(stranger)
    assert not any(heard.reasons for heard in processes.heard)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # what it sent was not all read
        return True
