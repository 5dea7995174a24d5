"""The errors of this package: a checkpoint that cannot be written, found or read as asked."""


class CheckpointError(ValueError):
    """Says which checkpoint, what is wrong with it and what to do; the message is meant for the user."""


class NoCheckpointError(CheckpointError):
    """There is no checkpoint, or no such step, where one was looked for."""


class DamagedCheckpointError(CheckpointError):
    """What is on disk is not what was written: files missing, cut short or changed. An older step may be whole.

    ``agreed``: every process of the run sees the same damage; otherwise others may still be reading.
    """

    def __init__(self, message: str, *, agreed: bool = True):
        super().__init__(message)
        self.agreed = agreed
