"""Train a model: `python train.py [CONFIG.py] [--flags]`. Without a config it trains configs/dates.py."""

import signal
import sys

if __name__ == "__main__":
    # The imports below take seconds. Ctrl-C ends them as it ends any program, without a stack trace.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
elif __name__ == "__mp_main__":  # a worker process, which leaves signals to the training and ends with it
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

from transformer_jax.commands.errors import run_program, user_errors
from transformer_jax.commands.together import together
from transformer_jax.commands.train import parse_config, train_and_show
from transformer_jax.parallel import prepare_host


def main() -> None:
    """Train what the command line asks for."""
    with user_errors():
        prepare_host()
        with together(sys.argv[1:]) as (peers, arguments):
            train_and_show(parse_config(arguments, "train.py"), peers)


if __name__ == "__main__":
    run_program(main)
