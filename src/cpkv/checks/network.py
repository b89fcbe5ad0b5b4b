"""Sockets and ports."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Mapping

from cpkv.checks.result import CheckResult

LOOPBACK = "127.0.0.1"
ENGINE_PORTS = "ports of mooncake"
# Two for each engine: eight prefill ranks and a decode worker.
NEEDED_PORTS = 18
_TIMEOUT_S = 2.0
_ANYWHERE = "0.0.0.0"


def reach_name(host: str) -> str:
    """Name of the check that connects to `host`."""
    return f"reach {host}"


def port_name(host: str, port: int) -> str:
    """Name of the check of one port."""
    return f"port {host}:{port}"


def check_reach(host: str) -> CheckResult:
    """Listen on a free port of `host`, connect to it, and pass a byte each way."""
    name = reach_name(host)
    try:
        listener = _listener(host, 0)
    except OSError as error:
        return CheckResult(name, "failed", f"cannot listen: {error}", "give an address of this machine (`ip address`)")
    with listener:
        listener.settimeout(_TIMEOUT_S)
        begun = time.perf_counter()
        try:
            with socket.create_connection(listener.getsockname()[:2], _TIMEOUT_S) as client:
                server, _ = listener.accept()
                with server:
                    server.settimeout(_TIMEOUT_S)
                    _pass_byte(client, server)
                    _pass_byte(server, client)
        except OSError as error:
            return CheckResult(
                name, "failed", f"listens, but cannot be reached: {error}", "see to firewall and routes of this address"
            )
        return CheckResult(name, "ok", f"a byte each way in {1e3 * (time.perf_counter() - begun):.1f} ms")


def check_port(host: str, port: int) -> CheckResult:
    """Whether a server can listen on `port` of `host`."""
    name = port_name(host, port)
    try:
        _listener(host, port).close()
    except OverflowError:
        return CheckResult(name, "failed", "no port number", "give one from 1 to 65535")
    except OSError as error:
        remedies = {
            errno.EADDRINUSE: f"end who listens there (`ss -ltnp 'sport = :{port}'`), or take another port",
            errno.EACCES: "take a port from 1024 on, or run with CAP_NET_BIND_SERVICE",
        }
        remedy = remedies.get(error.errno or 0, "give an address of this machine (`ip address`)")
        return CheckResult(name, "failed", f"cannot listen: {error}", remedy)
    return CheckResult(name, "ok", "free")


def check_engine_ports(environ: Mapping[str, str] = os.environ) -> CheckResult:
    """Mooncake takes two ports of this range for each engine, at random, on every interface."""
    limits = [environ.get("MC_MIN_RPC_PORT", "15000"), environ.get("MC_MAX_RPC_PORT", "17000")]
    if not all(limit.isdecimal() for limit in limits) or not 0 < int(limits[0]) <= int(limits[1]) < 1 << 16:
        figure = f"MC_MIN_RPC_PORT and MC_MAX_RPC_PORT are {' and '.join(map(repr, limits))}"
        return CheckResult(ENGINE_PORTS, "failed", figure, "set two ports, the lower first, or unset both")
    first, last = map(int, limits)
    free = sum(_is_free(port) for port in range(first, last + 1))
    figure = f"{free:,} of {last - first + 1:,} free from {first} to {last}"
    if free >= NEEDED_PORTS:
        return CheckResult(ENGINE_PORTS, "ok", figure)
    remedy = f"set MC_MIN_RPC_PORT and MC_MAX_RPC_PORT to a range with {NEEDED_PORTS} free ports, for 9 engines"
    return CheckResult(ENGINE_PORTS, "failed" if free < 2 else "warning", figure, remedy)


def _is_free(port: int) -> bool:
    try:
        _listener(_ANYWHERE, port).close()
    except OSError:
        return False
    return True


def _listener(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # What a server of ours sets too: ports that only wait out their last connection are free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address[0], port, *address[2:]))
        listener.listen(1)
    except (OSError, OverflowError):
        listener.close()
        raise
    return listener


def _pass_byte(sender: socket.socket, receiver: socket.socket) -> None:
    sender.sendall(b"x")
    if receiver.recv(1) != b"x":
        raise OSError("the connection was closed by something in between")
