"""The process that measures: `python -m oxytorch.benchmark.core.worker`.

It reads requests from standard input, one JSON line each, and writes events, one JSON line each, to
what was its standard output; whatever a library prints goes to standard error instead. Between two
requests it waits, so that contestants can take turns while all their weights stay in memory.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from oxytorch.benchmark.core.contest import Absent, first_line


def main() -> int:
    """Does what it is asked for, until nobody asks."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(event: str, **fields: Any) -> None:
        events.write(json.dumps({"event": event, **fields}) + "\n")
        events.flush()

    def progress(peer: str, stage: str) -> None:
        send("stage", peer=peer, stage=stage)

    for line in sys.stdin:
        request = json.loads(line)
        try:
            function = getattr(importlib.import_module(request["module"]), request["function"])
            found = function(progress, **request["arguments"])
            for result in found if isinstance(found, Iterator) else [found]:
                send("result", result=result)
            send("done")
        except Absent as absent:
            send("absent", reason=str(absent))
        except Exception as error:
            traceback.print_exc()
            send("error", reason=first_line(error))
    # Some peers' libraries crash while they are unloaded, after all the work is done.
    events.close()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
