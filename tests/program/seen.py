"""What the backend makes of graphs, for the tests."""

from __future__ import annotations

from typing import Any


class Seen:
    """How many graphs became programs, and why others did not.

    programs: what calls each of them.
    """

    def __init__(self) -> None:
        self.programs: list[Any] = []
        self.reasons: list[str] = []

    @property
    def text(self) -> str:
        """The text of the only program."""
        (call,) = self.programs
        return str(call.program)
