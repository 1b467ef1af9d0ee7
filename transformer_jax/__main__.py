"""`python -m transformer_jax {evaluate,generate,attention,convert,checkpoints,doctor}`."""

from typing import Annotated

import tyro

from transformer_jax.commands.attention import Attention
from transformer_jax.commands.checkpoints import Average, List
from transformer_jax.commands.convert import Convert
from transformer_jax.commands.doctor import Doctor
from transformer_jax.commands.errors import run_program, user_errors
from transformer_jax.commands.evaluate import Evaluate
from transformer_jax.commands.generate import Generate
from transformer_jax.parallel import prepare_host

Checkpoints = Annotated[List, tyro.conf.subcommand("list")] | Annotated[Average, tyro.conf.subcommand("average")]
Command = (
    Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Attention, tyro.conf.subcommand("attention")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
    | Annotated[
        Checkpoints, tyro.conf.subcommand("checkpoints", description="List the checkpoints of a run, or average them.")
    ]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)


def main() -> None:
    """Run the command that was typed."""
    with user_errors():
        prepare_host()
        tyro.cli(Command, prog="python -m transformer_jax", description="Use a trained model.").run()


if __name__ == "__main__":
    run_program(main)
