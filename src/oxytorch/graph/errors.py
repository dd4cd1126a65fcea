"""Why a run cannot be captured."""


class CaptureError(Exception):
    """The module cannot be captured; the text says why."""
