"""How does this process become part of a Ray cluster: one of its own, or one that others started?

A Ray of our own is for this process alone. It listens on the loopback interface only, and refuses every client
without the token that it is given at its start; the token is in the environment of its processes, and in no file.

Ray puts the working directory of a driver on the import path of its workers. A conversion may well be started in a
checkpoint's folder, whose ``numpy.py`` is not to run: see ``job_config``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.job_config import JobConfig

from paddle_reshard.pipeline.core.errors import ClusterError, UsageError

CONNECT_SECONDS = 10.0
_AT_HOME = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
"""Ray's variable by which a node calls itself 127.0.0.1, as it does by default where firewalls would ask; every
process of such a node listens there and nowhere else. ``ray.init`` takes no other way to that address."""
_TOKEN_LOG = logging.getLogger("ray._private.authentication.authentication_token_setup")


@contextlib.contextmanager
def joined_ray(address: str | None, cpus: int | None = None) -> Iterator[None]:
    """Be part of a Ray cluster. One that others started is only left afterwards.

    Parameters
    ----------
    address
        ``host:port``, or ``auto`` for the cluster on this machine. ``None``: a Ray of our own that ends with the
        block. A process that has joined Ray already stays where it is.
    cpus
        How many CPUs our own has; by default, those of the machine.

    Raises
    ------
    UsageError, ClusterError
        If there is no such cluster, or it does not take us.
    """
    if ray.is_initialized():
        yield
    elif address is None:
        with _of_our_own(cpus):
            yield
    else:
        with _of_others(address):
            yield


def job_config() -> JobConfig:
    """A job whose workers do not search the driver's working directory for modules.

    Ray leaves it out for jobs of Ray's client servers, which have a working directory of their own; so it does for
    a job that was submitted with one.
    """
    return JobConfig(_client_job=True)


@contextlib.contextmanager
def _of_others(address: str) -> Iterator[None]:
    try:
        _check_answers(address)
        _TOKEN_LOG.addFilter(_is_news)
        with _sigterm_kept():
            ray.init(address, log_to_driver=False, logging_level=logging.WARNING, job_config=job_config())
    except (OSError, ValueError, RuntimeError) as error:
        kind = UsageError if isinstance(error, ValueError) else ClusterError
        raise kind(f"cannot join Ray at {address!r}: {one_line(error)}{_token_hint()}") from error
    finally:
        _TOKEN_LOG.removeFilter(_is_news)
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _of_our_own(cpus: int | None) -> Iterator[None]:
    with _for_this_process_alone():
        try:
            with _sigterm_kept():
                ray.init(
                    "local",
                    num_cpus=cpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                    job_config=job_config(),
                )
        except (OSError, ValueError, RuntimeError) as error:
            raise ClusterError(f"cannot start Ray on this machine: {one_line(error)}") from error
        try:
            _check_is_private()
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Ray has SIGTERM end its driver with status 15; how a process ends is for the program to say."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _for_this_process_alone() -> Iterator[None]:
    """Have a Ray that starts meanwhile listen on 127.0.0.1 only, to those who know its token."""
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_K8S_TOKEN_AUTH": "0",
        _AT_HOME: "0",
    }
    before = {name: os.environ.get(name) for name in variables}
    reaches_out = ray_constants.ENABLE_RAY_CLUSTER
    os.environ.update(variables)
    ray_constants.ENABLE_RAY_CLUSTER = False
    _read_authentication_again()
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = reaches_out
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        _read_authentication_again()


def _read_authentication_again() -> None:
    """Ray reads mode and token once; what a process joins next may have others."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _check_is_private() -> None:
    """Refuse a Ray that other machines could reach, however its version reads its settings."""
    if not _is_private():
        raise ClusterError(
            f"Ray {ray.__version__} listens at {_gcs_address()}, where other machines may reach it, and not on "
            "127.0.0.1 only; start a cluster yourself and name it, --cluster ray:HOST:PORT, or use another version"
        )


def _is_private() -> bool:
    return ipaddress.ip_address(_gcs_address().rpartition(":")[0].strip("[]")).is_loopback


def _gcs_address() -> str:
    return ray.get_runtime_context().gcs_address


def lost_node() -> str | None:
    """The part of Ray that is lost, if it will never answer again.

    That is so where the node that this process belongs to is dead. A Ray of our own has lost its head with it; the
    head of others' may come back, and Ray waits for it.
    """
    if _is_private():
        try:
            _check_answers(_gcs_address())
        except OSError as error:
            return f"its head at {_gcs_address()}: {one_line(error)}"
    here = ray.get_runtime_context().get_node_id()
    every: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    for node in every:
        if node["NodeID"] == here and not node["Alive"]:
            reason = one_line(node.get("DeathReasonMessage") or "its raylet does not answer")
            return f"node {node['NodeManagerAddress']}: {reason}"
    return None


def _is_news(record: logging.LogRecord) -> bool:
    """A Ray that is protected as it should be is nothing to warn of."""
    return "Token authentication is enabled" not in record.getMessage()


def _token_hint() -> str:
    """Ray does not say that a cluster was silent because it wants a token."""
    return "" if "RAY_AUTH_MODE" in os.environ else "; if it wants a token, set RAY_AUTH_MODE=token"


def _check_answers(address: str) -> None:
    """See that somebody listens at ``host:port``; Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()


def one_line(message: object) -> str:
    """A message in one line, for a sentence."""
    return " ".join(str(message).split())[:500]
