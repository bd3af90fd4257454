"""What a user is told."""


class SelfTPTError(Exception):
    """A mistake a user can mend: its text says what is wrong, where, and what to do."""


class SelfTPTWarning(UserWarning):
    """Something a user should know, after which the work goes on."""
