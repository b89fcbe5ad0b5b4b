"""Reach of an address and free ports, on loopback."""

from __future__ import annotations

import socket

import pytest

from cpkv.checks.network import check_engine_ports, check_port, check_reach
from cpkv.testing.ports import closed_port, taken_port
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit")


def test_loopback_can_be_reached_and_a_foreign_address_cannot_be_listened_on() -> None:
    assert check_reach("127.0.0.1").state == "ok" and check_reach("localhost").state == "ok"
    for host in ("192.0.2.1", "no.such.host.invalid"):
        found = check_reach(host)
        assert found.state == "failed" and found.name == f"reach {host}"
        assert "cannot listen" in found.figure and "an address of this machine" in found.remedy


def test_an_address_that_swallows_connections_fails_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", refuse)
    found = check_reach("127.0.0.1")
    assert found.state == "failed" and "cannot be reached: timed out" in found.figure and "firewall" in found.remedy


def test_ports() -> None:
    free = closed_port()
    assert check_port("127.0.0.1", free).state == "ok"
    with taken_port() as taken:
        found = check_port("127.0.0.1", taken)
        assert found.state == "failed" and found.name == f"port 127.0.0.1:{taken}"
        assert f"sport = :{taken}" in found.remedy and "in use" in found.figure
    assert check_port("127.0.0.1", taken).state == "ok", "it was free again"
    assert check_port("127.0.0.1", 70_000).figure == "no port number"
    assert "address of this machine" in check_port("192.0.2.1", free).remedy


def test_the_range_of_the_engine_is_counted() -> None:
    with taken_port("0.0.0.0") as taken:
        alone = check_engine_ports({"MC_MIN_RPC_PORT": str(taken), "MC_MAX_RPC_PORT": str(taken)})
    assert (alone.state, alone.figure) == ("failed", f"0 of 1 free from {taken} to {taken}")
    few = check_engine_ports({"MC_MIN_RPC_PORT": "20000", "MC_MAX_RPC_PORT": "20009"})
    assert few.state == "warning" and "of 10 free from 20000 to 20009" in few.figure and "18 free ports" in few.remedy
    assert "of 2,001 free from 15000 to 17000" in check_engine_ports({}).figure
    for first, last in (("17000", "15000"), ("x", "17000"), ("0", "9"), ("15000", "70000")):
        wrong = check_engine_ports({"MC_MIN_RPC_PORT": first, "MC_MAX_RPC_PORT": last})
        assert wrong.state == "failed" and repr(first) in wrong.figure and "unset both" in wrong.remedy
