"""The coordinator's numbers as Prometheus reads them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from mlx_mesh.mesh.messages import Metric
from mlx_mesh.proxy.mesh_metrics import text_of


def test_values_of_one_name_stand_together_with_their_labels() -> None:
    def verdict(kind: str, value: float) -> Metric:
        return Metric(name="m_verdicts_total", kind="counter", help="h", value=value, labels={"kind": kind})

    step = Metric(name="m_step", kind="gauge", help="steps", value=7)
    families = list(
        text_string_to_metric_families(text_of([verdict("dead", 2), step, verdict("silent", 1)]).decode())
    )
    assert [(family.name, family.type) for family in families] == [
        ("m_verdicts", "counter"),
        ("m_step", "gauge"),
    ]
    assert [(s.name, s.labels, s.value) for s in families[0].samples] == [
        ("m_verdicts_total", {"kind": "dead"}, 2.0),
        ("m_verdicts_total", {"kind": "silent"}, 1.0),
    ]
