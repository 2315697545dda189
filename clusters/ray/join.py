"""Join an existing Ray cluster, or start a private one.

A private Ray serves this process only. It listens on the loopback interface only and rejects clients without its token
(:mod:`paddle_reshard.clusters.private_ray`).

Ray puts the working directory of a driver on the import path of its workers. A conversion may be started in a
checkpoint's folder, whose ``numpy.py`` must not run: see ``job_config``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import AuthenticationError, RayError
from ray.job_config import JobConfig

from paddle_reshard.clusters import private_ray
from paddle_reshard.clusters.container import memory_limit
from paddle_reshard.clusters.ray.head import (
    CONNECT_SECONDS,
    TOKEN_HINT,
    Head,
    check_answers,
    patience_seconds,
)
from paddle_reshard.pipeline.core.errors import ClusterError, UsageError
from paddle_reshard.pipeline.core.shown import one_line

SMALLEST_STORE_BYTES = 75 << 20
"""The smallest object store that Ray starts with."""
_ASKS = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""What Ray itself asks a head first."""
_REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED")
"""Of gRPC's status codes."""
_TIMED_OUT = "timed out during startup"
"""What Ray says of a node whose raylet it has started and not heard of again."""


@contextlib.contextmanager
def joined_ray(address: str | None, cpus: int | None = None) -> Iterator[bool]:
    """Be part of a Ray cluster during the block. Yields whether nodes may join it: none joins a private Ray.

    Parameters
    ----------
    address
        ``host:port``, or ``auto`` for the cluster on this machine. ``None``: a private Ray that ends with the block. A
        process that has already joined a cluster stays in it.
    cpus
        Number of CPUs of a private Ray. Default: those of the machine.

    Raises
    ------
    UsageError, ClusterError
        If there is no such cluster, or it rejects this process.
    """
    if ray.is_initialized():
        yield True
    elif address is None:
        with _private_ray(cpus):
            yield False
    else:
        with _existing_ray(address):
            yield True


def job_config() -> JobConfig:
    """A job whose workers do not search the driver's working directory for modules.

    Ray omits it for jobs of Ray's client servers, and for submitted jobs that have a working directory of their own.
    """
    return JobConfig(_client_job=True)


@contextlib.contextmanager
def _existing_ray(address: str) -> Iterator[None]:
    if private_ray.is_prepared():
        raise UsageError(
            f"Ray at {address!r}: this process has the token of a private Ray; join a cluster in another process"
        )
    try:
        check_answers(address)
        _check_admits(address)
        with _sigterm_kept():
            ray.init(address, log_to_driver=False, logging_level=logging.WARNING, job_config=job_config())
    except (OSError, ValueError, RuntimeError, RayError) as error:
        kind = UsageError if isinstance(error, ValueError) else ClusterError
        refused = isinstance(error, PermissionError | AuthenticationError)
        hint = TOKEN_HINT if refused or "RAY_AUTH_MODE" not in os.environ else ""
        raise kind(f"cannot join Ray at {address!r}: {one_line(error)}{hint}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_admits(address: str) -> None:
    """Ask a head at ``host:port`` with the token of this process, if it has one.

    Ray asks on and on if its token is refused, and then says that the head cannot be reached.

    Raises
    ------
    PermissionError
        If the head wants another token, or any.
    """
    if not address.rpartition(":")[2].isdigit() or importlib.util.find_spec("grpc") is None:
        return  # Ray alone, without its extra `default`, does not bring gRPC
    import grpc
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    token = AuthenticationTokenLoader.instance().get_token_for_http_header()
    metadata = [(name.lower(), value) for name, value in token.items()]
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_ASKS)(b"", metadata=metadata, timeout=CONNECT_SECONDS)
        except grpc.RpcError as error:  # whatever else it is, such as TLS, Ray knows better
            if error.code().name in _REFUSALS:
                raise PermissionError(error.details()) from None


@contextlib.contextmanager
def _private_ray(cpus: int | None) -> Iterator[None]:
    if not private_ray.is_prepared():
        raise UsageError(
            "this program has imported Ray before, which may then listen beyond this machine; call ray.init() or join "
            "a cluster with it, or let this conversion be the first to import Ray"
        )
    try:
        with _sigterm_kept():
            ray.init(
                "local",
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
                job_config=job_config(),
                **memory_settings(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
            )
    except Exception as error:  # Ray raises bare ones
        raise ClusterError(f"cannot start Ray on this machine: {_in_words(error)}") from error
    try:
        _check_is_private()
        yield
    finally:
        ray.shutdown()


def _in_words(error: Exception) -> str:
    """Why Ray did not start. Of a raylet that ended before it had registered Ray says that the node timed out."""
    if _TIMED_OUT not in str(error):
        return one_line(error)
    return (
        "its raylet, the process that starts workers, was lost (killed, or without memory) before it had registered, "
        "or this machine is too busy; Ray's reasons are in /tmp/ray/session_latest/logs/raylet.err"
    )


def memory_settings(system_bytes: int) -> dict[str, Any]:
    """Settings for memory that keep a Ray within a limit of this process that Ray itself does not see.

    Ray reads only the limit of a container that is the root of its control groups, not those of groups below it, such
    as a slice of systemd. ``system_bytes`` is what the machine has. Objects get 30 % of what is left, as usual, and
    workers the rest.
    """
    limit = memory_limit()
    if limit is None or limit.limit_bytes >= system_bytes:
        return {}
    objects = max(SMALLEST_STORE_BYTES, limit.left_bytes * 3 // 10)
    return {"object_store_memory": objects, "_memory": max(1, limit.left_bytes - objects)}


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keep the program's handler of SIGTERM, which Ray would replace by one that exits with status 15."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _check_is_private() -> None:
    """Refuse a Ray that other machines could reach, whatever its version makes of the settings."""
    if not _is_private():
        raise ClusterError(
            f"Ray {ray.__version__} listens at {_gcs_address()} instead of 127.0.0.1, so other machines may reach it; "
            "start a cluster yourself and use --cluster ray:HOST:PORT, or install a different version of Ray"
        )


def _is_private() -> bool:
    return ipaddress.ip_address(_gcs_address().rpartition(":")[0].strip("[]")).is_loopback


def _gcs_address() -> str:
    return ray.get_runtime_context().gcs_address


def head_of_cluster() -> Head:
    """The head of the cluster that this process has joined. That of a private Ray never comes back."""
    return Head(_gcs_address(), 0.0 if _is_private() else patience_seconds())


def lost_cluster(head: Head, idle: bool) -> str | None:
    """Why this process has lost its cluster; ``None`` if it has not.

    ``idle``: whether there was no answer from it for long. Then the head is asked at once, and this node too.
    """
    if (reason := head.lost(at_once=idle)) or not (idle and head.answers):
        return reason
    here = ray.get_runtime_context().get_node_id()
    every: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    for node in every:
        if node["NodeID"] == here and not node["Alive"]:
            reason = one_line(node.get("DeathReasonMessage") or "its raylet does not answer")
            return f"node {node['NodeManagerAddress']}: {reason}"
    return None
