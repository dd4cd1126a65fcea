"""What became of the calls of a model with a program, in words."""

from __future__ import annotations

from itertools import chain

from torch import nn

from .replay import Replay


def call_report(model: nn.Module) -> list[str]:
    """Which calls its programs serve, and why no others; nothing if it has none."""
    return [line for replay in replays_of(model) for line in _lines(replay)]


def replays_of(model: nn.Module) -> list[Replay]:
    """What stands in for the forwards of a model and its parts, where that runs programs."""
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    return [own for own in forwards if isinstance(own, Replay)]


def _lines(replay: Replay) -> list[str]:
    forms = len(replay._programs)
    plural = "s" * (forms != 1)
    lines = [f"programs for {forms} input signature{plural}", *replay._builder.in_words()]
    for failed in dict.fromkeys(chain(*(own.left_out for own in replay.programs()))):
        lines.append(f"a program is made without the pass {failed}")
    if why := replay.why_not_now():
        lines.append(f"no program is made for now: {why}")
    if replay.latest and not forms:
        lines.append(f"the latest call has no program: {replay.latest}")
    refused = dict.fromkeys(replay._refused.copy().values())
    return [*lines, *(f"an input signature has no program: {why}" for why in refused)]
