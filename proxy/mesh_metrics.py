"""The coordinator's numbers in Prometheus' text format, to stand behind this process' own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mlx_mesh.mesh.messages import Metric


class _Told(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = tuple(metrics)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for metric in self._metrics:
            labels = tuple(metric.labels)
            if metric.name not in families:
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                families[metric.name] = kind(metric.name, metric.help, labels=labels)
            families[metric.name].add_metric([metric.labels[name] for name in labels], metric.value)
        yield from families.values()


def text_of(metrics: Iterable[Metric]) -> bytes:
    """All values of one name stand together, with its help and type."""
    registry = CollectorRegistry()
    registry.register(_Told(metrics))
    return generate_latest(registry)
