"""The head of a Ray cluster that stops answering: a real listener, and a clock that is set by hand."""

from __future__ import annotations

import importlib
import socket

import pytest

from paddle_reshard.clusters import ray as clusters_ray
from paddle_reshard.clusters.ray.head import CHECK_SECONDS, RECONNECT_VARIABLE, Head, patience_seconds
from paddle_reshard.pipeline.core.errors import UsageError


class Clock:
    """Seconds, as set."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def listening(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def test_a_head_that_does_not_come_back_is_given_up(clock: Clock) -> None:
    with listening() as server:
        port = server.getsockname()[1]
        head = Head(f"127.0.0.1:{port}", 35.0, clock)
        assert head.lost(at_once=True) is None
    clock.seconds = CHECK_SECONDS - 1
    assert (head.lost(), head.answers) == (None, True), "it is asked every few seconds only"
    clock.seconds = 100
    assert (head.lost(), head.answers) == (None, False)
    clock.seconds = 134
    assert head.lost() is None
    clock.seconds = 135
    reason = head.lost()
    assert reason is not None
    assert reason.startswith(f"its head at 127.0.0.1:{port}: ")
    assert "refused" in reason


def test_a_head_that_comes_back_is_waited_for(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with listening() as server:
        port = server.getsockname()[1]
        head = Head(f"127.0.0.1:{port}", 35.0, clock)
    assert head.lost(at_once=True) is None
    assert "waiting 35 s for it" in caplog.text
    clock.seconds = 20
    with listening(port):
        assert (head.lost(), head.answers) == (None, True)
    assert "answers again" in caplog.text
    clock.seconds = 40
    assert head.lost() is None, "its patience begins anew"


def test_a_private_head_is_given_up_at_once(clock: Clock) -> None:
    with listening() as server:
        head = Head(f"127.0.0.1:{server.getsockname()[1]}", 0.0, clock)
    assert head.lost(at_once=True) is not None


@pytest.mark.parametrize(("value", "seconds"), [(None, 35.0), ("600", 575.0), ("10", 0.0)])
def test_it_gives_up_before_ray_ends_the_process(
    value: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RECONNECT_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(RECONNECT_VARIABLE, value)
    assert patience_seconds() == seconds


@pytest.mark.parametrize("value", ["60s", "60.5", "60 ", "", "-1"])
def test_what_ray_cannot_read_is_refused_before_ray_is_imported(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RECONNECT_VARIABLE, value)
    with pytest.raises(UsageError, match=f"^{RECONNECT_VARIABLE}={value!r}: give a whole number of seconds"):
        importlib.reload(clusters_ray)
