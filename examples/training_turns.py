"""Training runs that take turns: their step times side by side, and their held-out losses."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.optim import Optimizer

from oxytorch.benchmark.core.results import Result
from oxytorch.benchmark.core.rounds import paired_ratio, spread
from oxytorch.benchmark.optim.runs import bytes_of_low_bits


class Training(Protocol):
    """A model that is trained in some way, from some seed."""

    way: str
    seed: int
    optimizer: Optimizer

    def step(self) -> None:
        """One training step, with one step of the optimizer."""

    def held_out_loss(self) -> float:
        """The loss on text, or whatever it is, that the model is not trained on."""

    def plain_loss(self) -> float:
        """The held-out loss of a stock float32 model that has loaded this one's checkpoint."""


@dataclass
class Log:
    """What was seen of one training.

    curve: (steps done, held-out loss). step_seconds, optimizer_seconds: a median per turn.
    """

    training: Training
    curve: list[tuple[int, float]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)


def take_turns(trainings: Sequence[Training], steps: int, turn: int, losses: bool) -> list[Log]:
    """Train all, `turn` steps at a time and in alternating order; tells on standard error.

    losses: evaluate at the start and after every turn.
    """
    logs = [Log(training) for training in trainings]
    began = time.perf_counter()
    if losses:
        names = dict.fromkeys(training.way for training in trainings)
        print(f"held-out losses are told of {'; '.join(names)}", file=sys.stderr)
        for log in logs:
            log.curve.append((0, log.training.held_out_loss()))
    for done in range(0, steps, turn):
        count = min(turn, steps - done)
        for log in logs if done // turn % 2 == 0 else reversed(logs):
            _take_turn(log, count)
            if losses:
                log.curve.append((done + count, log.training.held_out_loss()))
        _tell(logs, done + count, steps, time.perf_counter() - began)
    return logs


def _take_turn(log: Log, steps: int) -> None:
    """Some steps and their medians; the first brings the weights into the caches and is left out.

    The optimizer is timed by hooks around its step.
    """
    optimizer = log.training.optimizer
    moments: list[float] = []

    def note(*_: object) -> None:
        moments.append(time.perf_counter())

    hooks = [optimizer.register_step_pre_hook(note), optimizer.register_step_post_hook(note)]
    durations = []
    for _ in range(steps):
        began = time.perf_counter()
        log.training.step()
        durations.append(time.perf_counter() - began)
    for hook in hooks:
        hook.remove()
    of_optimizer = [
        after - before for before, after in zip(moments[::2], moments[1::2], strict=True)
    ]
    log.step_seconds.append(statistics.median(durations[1:] or durations))
    log.optimizer_seconds.append(statistics.median(of_optimizer[1:] or of_optimizer))


def _tell(logs: Sequence[Log], done: int, steps: int, seconds: float) -> None:
    means = [
        f"{statistics.fmean(log.curve[-1][1] for log in found):.3f}"
        for found in _by_way(logs).values()
        if found[0].curve
    ]
    left = seconds / done * (steps - done)
    told = "".join(f" {mean}" for mean in means)
    print(f"step {done} of {steps}, {left:.0f} s left{told}", file=sys.stderr, flush=True)


def _by_way(logs: Sequence[Log]) -> dict[str, list[Log]]:
    found: dict[str, list[Log]] = {}
    for log in logs:
        found.setdefault(log.training.way, []).append(log)
    return found


def time_results(logs: Sequence[Log]) -> list[Result]:
    """Per way: spreads of the step times, ratios of the first way's times to these, and memory."""
    ways = _by_way(logs)
    base = [seconds for log in next(iter(ways.values())) for seconds in log.step_seconds]
    results = []
    for way, found in ways.items():
        steps = [seconds for log in found for seconds in log.step_seconds]
        of_optimizer = [seconds for log in found for seconds in log.optimizer_seconds]
        results.append(
            {
                "measure": "step",
                "way": way,
                "threads": torch.get_num_threads(),
                "step_seconds": spread(steps),
                "optimizer_seconds": spread(of_optimizer),
                "speedup": paired_ratio(base, steps),
                "bytes_per_parameter": bytes_per_parameter(found[0].training.optimizer),
            }
        )
    return results


def loss_results(logs: Sequence[Log]) -> list[Result]:
    """Per way: held-out losses of all seeds, on the way and at the end."""
    return [
        {
            "measure": "loss",
            "way": way,
            "threads": torch.get_num_threads(),
            "seeds": [log.training.seed for log in found],
            "curves": [log.curve for log in found],
            "losses": [log.curve[-1][1] for log in found],
            "plain_losses": [log.training.plain_loss() for log in found],
        }
        for way, found in _by_way(logs).items()
    ]


def bytes_per_parameter(optimizer: Optimizer) -> dict[str, float]:
    """Memory of weights, gradients and each state of any optimizer that has made a step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    weights = sum(parameter.nbytes for parameter in parameters)
    # A gradient has its parameter's dtype.
    total = {"weights": weights, "gradients": weights}
    for parameter in parameters:
        for name, state in optimizer.state[parameter].items():
            if name != "step":
                total[name] = total.get(name, 0) + state.nbytes
    lows = bytes_of_low_bits(optimizer, parameters)
    if lows:
        total["low_half"] = lows
    count = sum(parameter.numel() for parameter in parameters)
    return {name: amount / count for name, amount in total.items()}
