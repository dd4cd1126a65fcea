"""How long the calls of a module wait for a program, and which may take longer for one."""

from __future__ import annotations

FREE = 6
"""Changes to a module's state, one soon after the other, until calls wait longer for a program."""
ENOUGH = 8
"""Calls that a program has to serve, for each that was waited for it, to have been worth it."""
FREE_TRIES, CALLS_OF_A_TRY = 32, 16
"""Calls that are looked on or recorded for programs: so many, and one more for so many calls. They
take several times as long as others, and sizes may never come again."""
FREE_SECONDS, SHARE = 5.0, 0.1
"""Seconds that such calls may take where nobody asked for programs: so many, and this part of the
seconds of all other calls."""


class Patience:
    """Counts calls, and decides by these counts.

    calls: all of them.
    tries: those that took longer.
    served: by programs, in the present state of the module.
    seconds, spent: those of the calls that did not take longer, and of those that did.
    waits: how many calls of a form there are until the last of them is captured.
    """

    __slots__ = ("calls", "seconds", "served", "spent", "tries", "waits", "wasted")

    def __init__(self) -> None:
        self.calls = self.served = self.tries = self.wasted = 0
        self.seconds = self.spent = 0.0
        self.waits = 2

    def has_tries(self, are_asked_for: bool) -> bool:
        """Whether a call may take longer, so that later ones are served by a program.

        are_asked_for: whether somebody asked for programs.
        """
        has_time = are_asked_for or self.spent <= FREE_SECONDS + SHARE * self.seconds
        return has_time and self.tries < FREE_TRIES + self.calls // CALLS_OF_A_TRY

    def begin_again(self) -> None:
        """Note that the module has another state, for which there are no programs yet."""
        was_worth_it = self.served >= ENOUGH * self.waits
        self.wasted = 0 if was_worth_it else self.wasted + 1
        self.waits = 2 << max(0, min(self.wasted - FREE, 20))
        self.served = 0
