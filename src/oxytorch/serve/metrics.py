"""What the server counts, in Prometheus' text format."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator, Sequence

Labels = tuple[str, ...]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Counter:
    """Counts up, for each combination of labels."""

    kind = "counter"

    def __init__(self, name: str, meaning: str, labels: Labels = ()) -> None:
        self.name, self.meaning, self.labels = name, meaning, labels
        self._values: dict[Labels, float] = {} if labels else {(): 0.0}
        self._lock = threading.Lock()

    def add(self, *labels: str, value: float = 1) -> None:
        """Counts `value` more."""
        with self._lock:
            self._values[labels] = self._values.get(labels, 0) + value

    @property
    def total(self) -> float:
        """The sum over all labels."""
        with self._lock:
            return sum(self._values.values())

    def of(self, *labels: str) -> float:
        """The count of one combination of labels."""
        with self._lock:
            return self._values.get(labels, 0)

    def lines(self) -> Iterator[str]:
        """The samples."""
        with self._lock:
            values = sorted(self._values.items())
        for labels, value in values:
            yield f"{self.name}{_braces(self.labels, labels)} {value:g}"


class Gauge:
    """A number that is asked for when it is shown."""

    kind = "gauge"

    def __init__(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        self.name, self.meaning, self.value = name, meaning, value

    def lines(self) -> Iterator[str]:
        """The sample."""
        yield f"{self.name} {self.value():g}"


class Histogram:
    """How often a value was at most each of `bounds`."""

    kind = "histogram"

    def __init__(self, name: str, meaning: str, bounds: Sequence[float] = SECONDS) -> None:
        self.name, self.meaning, self.bounds = name, meaning, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Counts a value."""
        with self._lock:
            self._counts[bisect.bisect_left(self.bounds, value)] += 1
            self._sum += value

    @property
    def count(self) -> int:
        """How many values there were."""
        with self._lock:
            return sum(self._counts)

    @property
    def mean(self) -> float:
        """Of all values; 0 before the first."""
        with self._lock:
            return self._sum / max(sum(self._counts), 1)

    def lines(self) -> Iterator[str]:
        """Buckets, sum and count."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        so_far = 0
        for bound, count in zip((*self.bounds, float("inf")), counts, strict=True):
            so_far += count
            shown = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'{self.name}_bucket{{le="{shown}"}} {so_far}'
        yield f"{self.name}_sum {total:.9g}"
        yield f"{self.name}_count {so_far}"


Metric = Counter | Gauge | Histogram


class Metrics:
    """All that a server counts."""

    def __init__(self) -> None:
        self.requests = Counter(
            "oxytorch_requests_total", "Requests by path and HTTP status.", ("path", "status")
        )
        self.cancelled = Counter(
            "oxytorch_cancelled_total", "Requests whose client went away before the end."
        )
        self.tokens = Counter(
            "oxytorch_tokens_total",
            "Tokens by kind: prompt (read), cached (taken from an earlier prompt), new (written).",
            ("kind",),
        )
        self.duration = Histogram(
            "oxytorch_request_seconds", "From a request to the end of its response."
        )
        self.first_token = Histogram(
            "oxytorch_first_token_seconds", "From a request to its first token (TTFT)."
        )
        self.step = Histogram(
            "oxytorch_step_seconds", "A step of all sequences that are written together."
        )
        self.batch = Histogram(
            "oxytorch_batch_size", "Sequences of a step, or inputs of a call.", SIZES
        )
        self._gauges: list[Gauge] = []

    def gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """Adds a number that is asked for when it is shown."""
        self._gauges.append(Gauge(name, meaning, value))

    def gauges(self) -> dict[str, float]:
        """The present values by name."""
        return {gauge.name: gauge.value() for gauge in self._gauges}

    def text(self) -> str:
        """All of them, in Prometheus' text format 0.0.4."""
        own = [value for value in vars(self).values() if isinstance(value, Metric)]
        lines: list[str] = []
        for metric in (*own, *self._gauges):
            lines += [
                f"# HELP {metric.name} {metric.meaning}",
                f"# TYPE {metric.name} {metric.kind}",
            ]
            lines += metric.lines()
        return "\n".join(lines) + "\n"


def _braces(names: Labels, values: Labels) -> str:
    if not names:
        return ""
    shown = (
        f'{name}="{value}"'
        for name, value in zip(names, (_escaped(value) for value in values), strict=True)
    )
    return "{" + ",".join(shown) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
