"""The error of an op that the machine cannot run."""


class KernelUnavailable(RuntimeError):  # noqa: N818 - reads as the state it names
    """No implementation of an op for this device and dtype."""
