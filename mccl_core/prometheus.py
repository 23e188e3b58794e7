"""The metrics for Prometheus: as text, which is also served over HTTP where MCCL_METRICS_PORT asks for it.

For node_exporter's textfile collector, write `metrics_text()` to a file beside the wanted one and rename it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mccl_core.metrics import AlgorithmMetrics, Metrics, get_metrics

# Name, help, value of one kind of op and algorithm. The bus bandwidth over any time is
# rate(mccl_bus_bytes_total) / rate(mccl_busy_seconds_total).
_COUNTERS: tuple[tuple[str, str, Callable[[AlgorithmMetrics], float]], ...] = (
    ("mccl_ops_total", "Ops that ended well.", lambda m: m["count"]),
    ("mccl_failed_ops_total", "Ops that ended with an error.", lambda m: m["failed"]),
    ("mccl_bytes_total", "Bytes of the callers' tensors.", lambda m: m["bytes"]),
    ("mccl_sent_bytes_total", "Payload that this rank sent, as it travelled.", lambda m: m["sent_bytes"]),
    ("mccl_bus_bytes_total", "Bytes that the ops need of this rank's link, each way.", lambda m: m["bus_bytes"]),
    ("mccl_busy_seconds_total", "Time in which at least one op was under way.", lambda m: m["busy_s"]),
    ("mccl_queue_seconds_total", "Time that ops waited to send their first bytes.", lambda m: m["queue_s"]),
    ("mccl_parked_bytes_total", "Bytes received before they could be used.", lambda m: m["parked_bytes"]),
)


def metrics_text() -> str:
    """`get_metrics()` in Prometheus's text format (0.0.4), with the labels `op`, `algorithm` and `peer`."""
    return "".join(f"{line}\n" for line in _lines(get_metrics()))


def _lines(metrics: Metrics) -> Iterator[str]:
    series = [
        (f'op="{kind}",algorithm="{name}"', entry)
        for kind, op in metrics["ops"].items()
        for name, entry in op["algorithms"].items()
    ]
    for name, text, value in _COUNTERS:
        yield from (f"# HELP {name} {text}", f"# TYPE {name} counter")
        yield from (f"{name}{{{labels}}} {value(entry)}" for labels, entry in series)
    yield "# HELP mccl_wait_seconds_total Time that ops waited for the first bytes of a peer."
    yield "# TYPE mccl_wait_seconds_total counter"
    for labels, entry in series:
        for peer, seconds in entry["wait_s"].items():
            yield f'mccl_wait_seconds_total{{{labels},peer="{_escaped(peer)}"}} {seconds}'
    yield "# HELP mccl_parked_bytes Bytes received and not yet of use."
    yield "# TYPE mccl_parked_bytes gauge"
    yield f"mccl_parked_bytes {metrics['parked_bytes']}"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
