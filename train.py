"""Train a model: `python train.py [CONFIG.py] [--flags]`. Without a config it trains configs/dates.py."""

import runpy
import signal
import sys
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    # The imports below take seconds. Ctrl-C ends them as it ends any program, without a stack trace.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
elif __name__ == "__mp_main__":  # a worker process, which leaves signals to the training and ends with it
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

import tyro

from transformer_jax.commands.errors import run_program, user_errors
from transformer_jax.commands.train import train_and_show
from transformer_jax.errors import UserError
from transformer_jax.parallel import prepare_host
from transformer_jax.training import Config


def parse(arguments: list[str]) -> Config:
    """The config that a command line asks for."""
    has_file = bool(arguments) and not arguments[0].startswith("-")
    path = Path(arguments[0]) if has_file else Path(__file__).parent / "configs" / "dates.py"
    if not path.is_file():
        raise UserError(f"config file {path} does not exist")
    config = runpy.run_path(str(path)).get("config")
    if not isinstance(config, Config):
        raise UserError(f"{path} defines no `config = Config(...)`")
    config = replace(config, workdir=config.workdir or Path("runs") / path.stem)
    return tyro.cli(
        Config,
        default=config,
        args=arguments[has_file:],
        config=(tyro.conf.AvoidSubcommands,),
        prog=f"train.py {path}" if has_file else "train.py",
        description=__doc__,
    )


def main() -> None:
    """Train what the command line asks for."""
    with user_errors():
        prepare_host()
        train_and_show(parse(sys.argv[1:]))


if __name__ == "__main__":
    run_program(main)
