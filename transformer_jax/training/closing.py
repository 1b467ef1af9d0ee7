"""How a training ends, in order or not: writers are closed, and a full disk is told."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from transformer_jax.errors import UserError, out_of_space
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.metrics import MetricsLog
from transformer_jax.training.saved import saved_step
from transformer_jax.training.workdir import Workdir


@contextmanager
def closing(*writers: Checkpoints | MetricsLog) -> Iterator[None]:
    """Finish what the writers are writing."""
    try:
        yield
    except KeyboardInterrupt:
        raise  # to end at once: what is unfinished has a temporary name, and no start looks at it
    except BaseException:
        for writer in writers:
            with suppress(Exception):  # the error that came first is the one to tell
                writer.close()
        raise
    for writer in writers:
        writer.close()


@contextmanager
def disk_errors(workdir: Workdir) -> Iterator[None]:
    """Say of a full disk what can be done about it, whoever was writing."""
    try:
        yield
    except Exception as error:
        if not (reason := out_of_space(error)):
            raise
        raise UserError(
            f"{workdir.path}: {reason}; free some space, and the same command goes on from step "
            f"{saved_step(workdir.checkpoints) or 0:,}"
        ) from error
