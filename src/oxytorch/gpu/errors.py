"""What can go wrong between a kernel and a GPU."""

from __future__ import annotations


class ImageError(RuntimeError):
    """An image or a manifest is damaged, or made for another version of oxytorch."""


class NoKernelError(RuntimeError):
    """No way leads to a kernel on a device. forced: OXYTORCH_GPU left only one way."""

    def __init__(self, message: str, forced: bool = False) -> None:
        super().__init__(message)
        self.forced = forced


class DriverError(RuntimeError):
    """A call of a GPU's driver failed. name: what the driver calls the error."""

    def __init__(self, call: str, name: str, meaning: str, detail: str = "") -> None:
        words = f"{call}: {name}: {meaning}"
        super().__init__(f"{words}; {detail}" if detail else words)
        self.name = name


class OutOfDeviceMemoryError(DriverError):
    """The device has no memory left for the kernel's code."""
