"""A search from its first trial to its verdict."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .figures import Figure
from .placements import Placement
from .report import duration, number
from .results_file import ResultsFile
from .search import Goal, Tally, halving, halving_rounds, in_turns, judge
from .trial import InterruptError, Script, Trial, available_memory, run_trial


class NoFigureError(Exception):
    """The script has ended well and printed no figure; the text shows what it printed."""


@dataclass(frozen=True)
class Search:
    """What a search is about.

    strategy: "grid", "random" (a grid of a sample) or "halving".
    repeats: of each placement, or of the best ones.
    seconds: the most for a trial.
    is_careful: whether placements that would not fit into memory are left out.
    """

    script: Script
    figure: Figure
    goal: Goal
    placements: Sequence[Placement]
    strategy: str = "halving"
    repeats: int = 5
    seconds: float = 600.0
    is_careful: bool = True

    def schedule(self, tallies: Sequence[Tally]) -> Iterator[Tally]:
        """Which placement runs next; looks at what came of those before."""
        if self.strategy == "halving":
            return halving(tallies, self.goal, self.repeats)
        return in_turns(tallies, self.repeats)

    def trials(self) -> int:
        """About how many trials there will be."""
        count = len(self.placements)
        if self.strategy != "halving":
            return count * self.repeats
        total = done = 0
        for kept, target in halving_rounds(count, self.repeats):
            total, done = total + kept * (target - done), target
        return total


class Session:
    """Runs a search.

    kept: trials of before, and where new ones go.
    say: takes a line of progress; begin: the beginning of one.
    """

    def __init__(
        self,
        search: Search,
        kept: ResultsFile,
        say: Callable[[str], None],
        begin: Callable[[str], None],
    ) -> None:
        self.search, self._kept, self._say, self._begin = search, kept, say, begin
        self.tallies = [
            Tally(each, limits=[[] for _ in search.goal.limits]) for each in search.placements
        ]
        self._times: list[float] = []
        self._done = 0
        self._has_figure = False

    def run(self) -> bool:
        """All trials; False where the user has ended them. Raises NoFigureError."""
        total = self.search.trials()
        for tally in self.search.schedule(self.tallies):
            self._done += 1
            trial = self._kept.trial(tally.placement, len(tally.values))
            if trial is None:
                self._begin(f"[{self._done}/{max(total, self._done)}] {tally.placement}: ")
                began = time.monotonic()
                try:
                    trial = self._trial(tally.placement)
                except (InterruptError, KeyboardInterrupt):
                    self._say("interrupted")
                    return False
                if trial.is_silent and not self._has_figure:
                    self._say(trial.failure)
                    raise NoFigureError(_no_figure(self.search, trial))
                self._kept.add(tally.placement, trial)
                self._add(tally, trial)
                self._times.append(time.monotonic() - began)
                self._say(self._progress(trial, total))
            else:
                self._add(tally, trial)
        return True

    def _trial(self, placement: Placement) -> Trial:
        search = self.search
        if search.is_careful and (reason := self._too_large(placement)):
            return Trial(failure=reason)
        return run_trial(
            search.script, placement, search.figure, search.goal.limits, search.seconds
        )

    def _too_large(self, placement: Placement) -> str:
        """Why a placement would not fit into memory, by the largest process so far."""
        free, need = available_memory(), self._kept.peak() * placement.ninstances
        if free is None or need <= free or placement.ninstances == 1:
            return ""
        return (
            f"not started: {placement.ninstances} instances of {self._kept.peak() / 1e9:.1f} GB "
            f"need more than the {free / 1e9:.1f} GB of memory that are free"
        )

    def _add(self, tally: Tally, trial: Trial) -> None:
        if trial.value is None:
            tally.failure = trial.failure
            return
        self._has_figure = True
        tally.values.append(trial.value)
        for values, value in zip(tally.limits, trial.limits, strict=True):
            values.append(value)

    def _progress(self, trial: Trial, total: int) -> str:
        """What came of the last trial, the best so far, and the time that is left."""
        search = self.search
        text = trial.failure
        if trial.value is not None:
            text = f"{search.figure.what} {number(trial.value)}"
            for limit, value in zip(search.goal.limits, trial.limits, strict=True):
                text += f", {limit.figure.what} {number(value)}"
        best = judge(self.tallies, search.goal).best
        if best is not None:
            text += f"  | best {number(best.median)}: {best.placement}"
        left = max(total - self._done, 0) * statistics.fmean(self._times)
        return text + (f"  | {duration(left)} left" if left else "")


def _no_figure(search: Search, trial: Trial) -> str:
    wanted = next(
        figure
        for figure in (search.figure, *(limit.figure for limit in search.goal.limits))
        if trial.failure == f"printed no {figure.what}"
    )
    lines = "".join(f"\n  {line}" for line in trial.tail) or " nothing"
    return (
        f"the script has {trial.failure}: expected {wanted.how_to_print()}\n"
        f"the last lines of its output:{lines}"
    )
