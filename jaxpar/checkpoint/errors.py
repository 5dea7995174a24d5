"""The one error of this package: a checkpoint that cannot be written, found or read as asked."""


class CheckpointError(ValueError):
    """Says which checkpoint, what is wrong with it and what to do; the message is meant for the user."""
