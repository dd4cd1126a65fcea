"""A served model as an application of Ray Serve."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ray import serve

from .. import config
from ..serve.access import App
from ..serve.app import State, make_app
from ..serve.logs import set_up
from ..serve.metrics import Metrics
from ..serve.open_sentences import BATCH
from ..serve.opening import open_service
from .options import parsed
from .places import cpus_of_a_share, plan, take_place


def application(
    model: str | Path,
    *,
    cores: int | None = None,
    replicas: int | None = None,
    autoscaling: dict[str, Any] | None = None,
    deployment: dict[str, Any] | None = None,
    **options: Any,
) -> serve.Application:
    """What `oxytorch serve MODEL` serves, as an application for `ray.serve.run`.

    model: a folder or file that exists on every machine under this name.
    cores: of a replica; None gives each replica a whole NUMA node.
    replicas: how many; None starts one for every share of the cluster's machines.
    autoscaling: Ray's `autoscaling_config`, in place of a fixed number; up to as many replicas as
        there are shares, unless it says otherwise.
    deployment: more options of Ray's `deployment`.
    options: those of `oxytorch serve`, such as `weights="int4"`.

    Without `token` only requests to the machine's own name (localhost) are answered.

    Raises ValueError for wrong options, and where no machine has room for a replica. Needs a
    connection to a cluster (`ray.init`).
    """
    arguments = parsed(model, options)
    if replicas is not None and (replicas < 1 or autoscaling is not None):
        raise ValueError(
            f"application: expected replicas of at least 1 and no autoscaling, got {replicas}"
        )
    nodes = plan(cores)
    places = sum(len(node.shares) for node in nodes)
    # A replica's own queue refuses with 429; what exceeds it waits in Ray's proxies, or gets 503.
    together = max(arguments.slots, arguments.max_batch or BATCH)
    settings: dict[str, Any] = {
        "name": arguments.name or Path(model).stem,
        "ray_actor_options": {"num_cpus": cpus_of_a_share(nodes)},
        "max_ongoing_requests": arguments.queue + together,
        "max_queued_requests": arguments.queue,
        "graceful_shutdown_timeout_s": float(arguments.drain),
    }
    if autoscaling is None:
        settings["num_replicas"] = places if replicas is None else replicas
    else:
        limits = {"min_replicas": 1, "max_replicas": places, "target_ongoing_requests": together}
        settings["autoscaling_config"] = {**limits, **autoscaling}
    made = serve.deployment(Replica, **{**settings, **(deployment or {})})
    return made.bind(str(model), options, cores)


@serve.ingress()
class Replica:
    """One copy of the model, on cores of its own."""

    def __init__(self, model: str, options: dict[str, Any], cores: int | None) -> None:
        arguments = parsed(model, options)
        set_up(arguments.log_level)
        take_place(cores)
        self._metrics = Metrics()
        self._service = open_service(arguments, self._metrics)
        self._app = self._made(arguments)
        self._service.worker.start()

    def _made(self, arguments: argparse.Namespace) -> App:
        token = arguments.token if arguments.token is not None else config.current.serve_token
        return make_app(
            self._service,
            self._metrics,
            State(),
            token=token or None,
            largest=arguments.max_request_bytes,
            is_local=not token,
        )

    def __serve_build_asgi_app__(self) -> App:
        return self._app

    def check_health(self) -> None:
        """Ray replaces a replica that raises here."""
        if not self._service.worker.is_alive:
            raise RuntimeError("the thread of the model has ended")

    def __del__(self) -> None:
        if hasattr(self, "_service"):  # not where the model could not be opened
            self._service.worker.close()
