"""A user's mistake is one line, not a stack trace."""

import contextlib
import sys
from collections.abc import Iterator

from transformer_jax.errors import UserError
from transformer_jax.training import Interrupted
from transformer_jax.training.interrupt import EXIT_CODE, MESSAGE


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """End the program with one line on standard error for what the user can mend."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except Interrupted:
        print(MESSAGE, file=sys.stderr)
        raise SystemExit(EXIT_CODE) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(1) from None
