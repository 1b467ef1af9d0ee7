"""Several processes that run one command together: each computes its part, and the first of them speaks."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence

from transformer_jax.commands.streams import keep_output_apart
from transformer_jax.parallel import Peers, connect, find_processes, start_jax
from transformer_jax.parallel.processes import FLAG_HELP, take_process_flags
from transformer_jax.training import Interrupted

HELP = "\n".join(f"  --processes.{name} {value}  {text}" for name, (value, text) in FLAG_HELP.items())
"""What the flags of several processes mean. Schedulers say the same in the environment."""


@contextlib.contextmanager
def together(arguments: Sequence[str]) -> Iterator[tuple[Peers, list[str]]]:
    """Meet the other processes that flags or the environment speak of; gives them and the rest of the arguments.

    What the others print to standard output is left out: it is the same in every process. When one fails, the others
    are told why, and end.
    """
    flags, rest = take_process_flags(arguments)
    peers = connect(find_processes(os.environ, flags))
    try:
        if peers.count > 1:
            keep_output_apart()
        start_jax(peers)
        with contextlib.nullcontext() if peers.index == 0 else contextlib.redirect_stdout(io.StringIO()):
            yield peers, rest
    except Interrupted:
        peers.close()
        raise
    except BaseException as error:
        if isinstance(error, Exception):
            peers.explain(error)  # which ends here, naming it, if another process is what is wrong
        peers.fail(error if str(error) else type(error).__name__)
        raise
    sys.stdout.flush()
    peers.close()
