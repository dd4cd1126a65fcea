"""The log: a line of JSON for each event, on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

log = logging.getLogger("oxytorch.serve")


class JsonLines(logging.Formatter):
    """One object a line: time, level, event, then what belongs to it."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class StandardError(logging.Handler):
    """Writes to what is standard error at the time of the event."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")
        sys.stderr.flush()


def set_up(level: str) -> None:
    """Sends what oxytorch.serve and uvicorn tell to standard error."""
    handler = StandardError()
    handler.setFormatter(JsonLines())
    for name in ("oxytorch.serve", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
