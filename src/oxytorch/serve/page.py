"""The status page: what the server does, in a table that renews itself."""

from __future__ import annotations

import html
import time

from .metrics import Metrics

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="refresh" content="2">
<title>oxytorch serve</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
td { border-top: 1px solid #8884; padding: .3rem 0 }
td + td { text-align: right; font-variant-numeric: tabular-nums }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd } a { color: #8bf } }
</style>
</head>
<body>
<h1>oxytorch serve</h1>
<table>
DATA
</table>
<p><a href="metrics">metrics</a> &middot; <a href="docs">routes</a>
&middot; <a href="v1/models">models</a></p>
</body>
</html>
"""


class Figures:
    """What the page shows. Rates are those since the page was shown last."""

    def __init__(self, name: str, kind: str, metrics: Metrics) -> None:
        self.name, self.kind, self.metrics = name, kind, metrics
        self._begin = time.monotonic()
        self._last = (self._begin, 0.0, 0.0)
        self._rates = (0.0, 0.0)

    def rows(self) -> str:
        """Rows of the table."""
        metrics = self.metrics
        tokens, requests = self._renewed()
        found: list[tuple[str, str]] = [
            ("model", f"{self.name} ({self.kind})"),
            ("running for", f"{time.monotonic() - self._begin:.0f} s"),
            ("responses", f"{metrics.duration.count}, {requests:.1f} a second"),
            ("mean time of a response", _milliseconds(metrics.duration.mean)),
            ("clients that went away", f"{metrics.cancelled.total:g}"),
        ]
        found += [
            (name.removeprefix("oxytorch_").replace("_", " "), f"{value:g}")
            for name, value in metrics.gauges().items()
        ]
        if metrics.first_token.count:
            found += [
                ("tokens a second", f"{tokens:.1f}"),
                ("mean time to the first token", _milliseconds(metrics.first_token.mean)),
                ("mean time of a step", _milliseconds(metrics.step.mean)),
            ]
        if metrics.batch.count:
            found.append(("mean batch", f"{metrics.batch.mean:.1f}"))
        return "\n".join(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
            for name, value in found
        )

    def _renewed(self) -> tuple[float, float]:
        """Tokens and responses a second."""
        then, tokens, answers = self._last
        now = time.monotonic()
        if now - then >= 1:
            latest = (now, self.metrics.tokens.of("new"), float(self.metrics.duration.count))
            self._rates = (
                (latest[1] - tokens) / (now - then),
                (latest[2] - answers) / (now - then),
            )
            self._last = latest
        return self._rates


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
