"""Metrics over HTTP for Prometheus, read from the worker when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cpkv.config.metric_names import HELP
from cpkv.errors import TransferError

TOTAL = "_total"


class _Collector:
    """Turns one reading into metric families."""

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        for name, value in self._read().items():
            counts = name.endswith(TOTAL)
            yield (CounterMetricFamily if counts else GaugeMetricFamily)(name, HELP[name], value=value)


class MetricsServer:
    """Serves metrics until it is closed.

    Args:
        host: to listen on. There is no authentication: loopback, unless a firewall is in front of it.
        port: to listen on; 0 takes a free one.
        read: the values by name, called in the server's threads.

    Raises:
        TransferError: the port is taken.
    """

    def __init__(self, host: str, port: int, read: Callable[[], Mapping[str, float]]) -> None:
        registry = CollectorRegistry()
        registry.register(_Collector(read))
        try:
            self._server: Any
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise TransferError(
                f"cannot serve metrics on {host}:{port}: {error}; give a free --metrics-port"
            ) from error

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
