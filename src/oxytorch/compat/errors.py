"""The error of what is not served, and the text that it has."""

from __future__ import annotations

PAGE = "docs/migrate.md"
OLD = "intel_extension_for_pytorch"


class NotServedError(NotImplementedError):
    """A name, an argument or a value of the predecessor that there is no counterpart of; the text
    says what to do in its place."""


def not_served(what: str, way: str) -> NotServedError:
    """The error for `what` of the predecessor; way: what to do in its place."""
    return NotServedError(f"{OLD}: {what} is not served; {way} ({PAGE})")
