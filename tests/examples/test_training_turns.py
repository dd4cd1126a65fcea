"""Trainings that take turns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from training_turns import (
    bytes_per_parameter,
    loss_results,
    take_turns,
    time_results,
)


class Steps:
    """A training of one weight that writes down when it was asked for what."""

    def __init__(self, way: str, seed: int, asked: list[str]) -> None:
        self.way, self.seed, self.asked = way, seed, asked
        self.weight = nn.Parameter(torch.tensor([1.0 + seed]))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.5, momentum=0.9)

    def step(self) -> None:
        self.asked.append(f"{self.way}{self.seed}")
        self.optimizer.zero_grad()
        (self.weight**2).sum().backward()
        self.optimizer.step()

    def held_out_loss(self) -> float:
        return float(self.weight.detach() ** 2)

    def plain_loss(self) -> float:
        return self.held_out_loss()


def test_turns_alternate_and_the_rest_is_done() -> None:
    asked: list[str] = []
    take_turns([Steps("a", 0, asked), Steps("b", 0, asked)], steps=5, turn=2, losses=False)
    assert asked == ["a0"] * 2 + ["b0"] * 4 + ["a0"] * 2 + ["a0"] + ["b0"]


def test_results_are_grouped_by_way(capsys: pytest.CaptureFixture[str]) -> None:
    trainings = [Steps(way, seed, []) for seed in (0, 1) for way in "ab"]
    logs = take_turns(trainings, steps=3, turn=2, losses=True)
    first, second = loss_results(logs)
    assert (first["way"], second["way"]) == ("a", "b")
    assert first["seeds"] == [0, 1]
    assert [step for step, _ in first["curves"][1]] == [0, 2, 3]
    assert first["curves"][1][0] == (0, 4.0)
    assert first["losses"] == [t.held_out_loss() for t in trainings if t.way == "a"]
    assert "step 3 of 3, 0 s left" in capsys.readouterr().err


def test_the_optimizer_is_timed_within_the_step() -> None:
    trainings = [Steps(way, 0, []) for way in "ab"]
    logs = take_turns(trainings, steps=8, turn=2, losses=False)
    assert all(len(log.step_seconds) == 4 for log in logs)
    for log in logs:
        for step, optimizer in zip(log.step_seconds, log.optimizer_seconds, strict=True):
            assert 0 < optimizer < step
    before, after = time_results(logs)
    assert before["speedup"]["median"] == 1
    assert after["speedup"]["count"] == 4
    assert not trainings[0].optimizer._optimizer_step_pre_hooks, "hooks are taken away"


def test_bytes_count_states_but_not_the_step_number() -> None:
    weight = nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    found = bytes_per_parameter(optimizer)
    assert found == {"weights": 2, "gradients": 2, "exp_avg": 2, "exp_avg_sq": 2}
