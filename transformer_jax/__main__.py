"""`transformer-jax COMMAND`, or `python -m transformer_jax COMMAND`."""

import difflib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from transformer_jax import __version__
from transformer_jax.commands.attention import Attention
from transformer_jax.commands.checkpoints import Average, Diff, List, Prune, Show
from transformer_jax.commands.convert import Convert
from transformer_jax.commands.doctor import Doctor
from transformer_jax.commands.errors import run_program, user_errors
from transformer_jax.commands.evaluate import Evaluate
from transformer_jax.commands.generate import Generate
from transformer_jax.commands.launch import parse_launch
from transformer_jax.commands.parsing import parse
from transformer_jax.commands.plan import plan_and_show
from transformer_jax.commands.runs import parse_run_command
from transformer_jax.commands.together import HELP, together
from transformer_jax.commands.train import parse_config, train_and_show
from transformer_jax.commands.verify import verify_and_show
from transformer_jax.errors import UserError
from transformer_jax.parallel import prepare_host

Arguments = Sequence[str]


def _train(arguments: Arguments, prog: str) -> None:
    with together(arguments) as (peers, rest):
        train_and_show(parse_config(rest, prog), peers)


def _plain(kind: type, arguments: Arguments, prog: str) -> None:
    parse(kind, arguments, prog=prog).run()


def _of_run(kind: type, arguments: Arguments, prog: str, *, with_data: bool = False) -> None:
    with together(arguments) as (peers, rest):
        parse_run_command(kind, rest, prog, with_data=with_data).run(peers)


def _checkpoints(arguments: Arguments, prog: str) -> None:
    kinds = {"list": List, "show": Show, "diff": Diff, "average": Average, "prune": Prune}
    _dispatch({name: partial(_plain, kind) for name, kind in kinds.items()}, CHECKPOINTS, arguments, prog)


def _launch(arguments: Arguments, prog: str) -> None:
    parse_launch(arguments, prog).run()


COMMANDS: dict[str, Callable[[Arguments, str], None]] = {
    "train": _train,
    "evaluate": partial(_of_run, Evaluate, with_data=True),
    "generate": partial(_of_run, Generate),
    "attention": partial(_of_run, Attention),
    "convert": partial(_plain, Convert),
    "checkpoints": _checkpoints,
    "plan": plan_and_show,
    "verify": verify_and_show,
    "launch": _launch,
    "doctor": partial(_plain, Doctor),
}
ABOUT = {
    "train": "Train a model: a config of this package by its name, or a file of your own.",
    "evaluate": "Evaluate a trained model on a split of its data, or on other data.",
    "generate": "Write what a trained model makes of each line of standard input.",
    "attention": "Draw what a trained model attends to.",
    "convert": "Make a run of a checkpoint of Hugging Face transformers, or the reverse.",
    "checkpoints": "List, show, compare, average or remove the checkpoints of a run.",
    "plan": "Compile the train step of a config for devices that need not be here, and say what it takes.",
    "verify": "Compute the first steps of a config on every mesh, packed and resumed, and compare.",
    "launch": "Run a script or a command in several processes on this machine.",
    "doctor": "Show versions, devices, and what is missing.",
}
CHECKPOINTS = {
    "list": "Print the steps of which there is a checkpoint, one a line.",
    "show": "Print the name, shape, type and statistics of each array of parameters in a checkpoint.",
    "diff": "Compare the parameters of two checkpoints.",
    "average": "Make a new run of which the model is the mean of a run's checkpoints.",
    "prune": "Remove all checkpoints but the newest and the best.",
}


def _dispatch(
    commands: dict[str, Callable[[Arguments, str], None]], about: dict[str, str], arguments: Arguments, prog: str
) -> None:
    """Run the command that the first argument names."""
    name, *rest = arguments or ("--help",)
    if name == "--version":
        print(f"transformer_jax {__version__}")
        return
    if name in ("-h", "--help"):
        width = max(map(len, about))
        print(f"usage: {prog} COMMAND ...\n")
        print("\n".join(f"  {command:{width}}  {text}" for command, text in about.items()))
        print(f"\n{prog} COMMAND --help shows the flags of a command.")
        if commands is COMMANDS:
            print(f"\nSeveral processes, for train, evaluate, generate and attention:\n{HELP}")
        return
    if name not in commands:
        near = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(commands)}"
        raise UserError(f"{name!r} is not a command of {prog}; {hint}")
    commands[name](rest, f"{prog} {name}")


def _main() -> None:
    with user_errors():
        prepare_host()
        name = Path(sys.argv[0]).name
        _dispatch(COMMANDS, ABOUT, sys.argv[1:], "python -m transformer_jax" if name == "__main__.py" else name)


def main() -> None:
    """Run the command that was typed."""
    run_program(_main)


if __name__ == "__main__":
    main()
