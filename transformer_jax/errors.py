"""The one kind of error that is the user's to mend."""


class UserError(Exception):
    """Something asked for cannot be done: the message names it and says what to do. Commands print it in one line."""
