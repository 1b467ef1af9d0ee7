"""What the commands that use a trained run share: opening it, and flags that follow from its own settings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from transformer_jax.commands.configs import find_config, import_file
from transformer_jax.commands.parsing import parse, with_settings
from transformer_jax.errors import UserError
from transformer_jax.training import Run
from transformer_jax.training.workdir import Workdir


@dataclass(frozen=True)
class RunCommand:
    """A command that reads a run."""

    workdir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    step: int | None = None
    """Step of the checkpoint to use; None takes the newest."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type that the parameters are kept in: bfloat16 takes half the memory; None takes that of the checkpoint."""
    config: Path | None = None
    """Python file with the models, sources and tasks of the run that are not part of this package; it is executed."""

    def open(self) -> Run:
        """The run, with the settings of its data and of its decoding that the flags ask for."""
        run, changes = open_run(self.workdir, self.config), {}
        if (data := getattr(self, "data", None)) is not None:
            changes["data"] = data
        if (decoding := getattr(self, "decoding", None)) is not None:
            changes["task"] = replace(run.config.task, decoding=decoding)  # type: ignore[call-arg]
        return run.replace(**changes) if changes else run

    def restore(self, run: Run) -> tuple[Any, int]:
        """The parameters of the checkpoint that the flags ask for, and its step."""
        return run.restored_model(self.step, dtype=self.dtype)


Command = TypeVar("Command", bound=RunCommand)


def parse_run_command(kind: type[Command], arguments: Sequence[str], prog: str, *, with_data: bool = False) -> Command:
    """A command whose flags follow from the run that it names first: how its task decodes, and what data it reads."""
    first = arguments[0] if arguments else "-"
    path = next((argument for argument in arguments if Workdir(Path(argument)).is_run()), first)
    if path.startswith("-"):
        about = f"{kind.__doc__} {prog} RUN --help shows the flags of a run's own settings, too."
        return parse(kind, arguments, prog=prog, description=about)
    settings = open_run(Path(path), _config_file(arguments)).config
    found: dict[str, Any] = {"data": settings.data} if with_data else {}
    if (decoding := getattr(settings.task, "decoding", None)) is not None:
        found["decoding"] = decoding
    return parse(with_settings(kind, found, without_prefix=("decoding",)), arguments, prog=prog)


def _config_file(arguments: Sequence[str]) -> Path | None:
    """The value of --config, which is needed before the other flags are known."""
    for argument, after in zip(arguments, [*arguments[1:], ""], strict=True):
        name, has_value, value = argument.partition("=")
        if name == "--config" and (has_value or after):
            return Path(value if has_value else after)
    return None


def open_run(path: Path, config: Path | None = None) -> Run:
    """The run in a folder; `config` is a file that the user names, with types that the run needs."""
    if config is not None:
        import_file(find_config(str(config)))
    return Run.open(path)


def require_ability(task: Any, ability: type, what: str) -> None:
    """Raise, saying what cannot be done, unless a task has an ability."""
    if not isinstance(task, ability):
        raise UserError(f"a run of {type(task).__name__} cannot {what}: the task has no ability {ability.__name__}")
