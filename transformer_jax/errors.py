"""Errors that the user can fix."""

import errno
import os

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, a full quota, a limit on the size of files."""


class UserError(ValueError):
    """Something asked for cannot be done: the message names it and says what to do. Commands print it in one line."""


def out_of_space(error: BaseException | None) -> str | None:
    """The operating system's words if an error comes from a full disk, else None.

    Libraries raise errors of their own then (Orbax a ValueError, tokenizers an Exception), with those words in them.
    """
    while error is not None:
        for code in NO_SPACE:
            if getattr(error, "errno", None) == code or os.strerror(code) in str(error):
                return os.strerror(code)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None
