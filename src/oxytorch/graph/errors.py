"""Why a run cannot be captured, or a converted model not called."""


class CaptureError(Exception):
    """The module cannot be captured; the text says why."""


class DtypeError(RuntimeError):
    """The code of a model mixes the dtype that it was converted to with others; the text says what
    to do, and torch's own error is its cause."""
