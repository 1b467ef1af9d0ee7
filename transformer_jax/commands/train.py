"""`transformer-jax train [CONFIG] [--flags]`, and `python train.py`: train, then show what came of it."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from transformer_jax.atomic import atomic
from transformer_jax.commands.attention import draw_attention
from transformer_jax.commands.configs import config_names, load_config
from transformer_jax.commands.parsing import parse
from transformer_jax.errors import UserError
from transformer_jax.parallel import Peers
from transformer_jax.tasks import GivesAttention, Predictor, ShowsSamples, WritesText
from transformer_jax.training import Config, Run, train

DEFAULT = "dates"
NUM_SAMPLES = 8
SHOWN = 240  # characters of a text in the table
READABLE = 120  # characters of a text whose tokens can still be told apart on the axes of a picture


def parse_config(arguments: Sequence[str], prog: str) -> Config:
    """The config that a command line asks for."""
    is_named = bool(arguments) and not arguments[0].startswith("-")
    name = arguments[0] if is_named else DEFAULT
    names = ", ".join(sorted(config_names()))
    default = load_config(name)
    parsed = parse(
        Config,
        arguments[is_named:],
        default=default,
        prog=f"{prog} {name}" if is_named else prog,
        description=f"Train a model: {prog} [CONFIG] [FLAGS], where CONFIG is a Python file or one of {names}. "
        f"The flags below are those of {name}; other configs have other models, data and tasks.",
    )
    config = Config(**vars(parsed))  # and not the class whose types are those of the flags
    _check_effect(config, default)
    return config


def _check_effect(config: Config, default: Config) -> None:
    """Raise on flags that change nothing, since the checkpoint or the task decides."""
    for group in ("model", "processor"):
        now, before = getattr(config, group), getattr(default, group)
        is_path_given = getattr(now, "path", None) is not None
        for field in fields(now) if is_dataclass(now) else ():
            if getattr(now, field.name) == getattr(before, field.name):
                continue
            flag = f"--{group}.{field.name}".replace("_", "-")
            if group == "model" and field.name in config.task.decides:
                raise UserError(f"{flag} has no effect: {type(config.task).__name__} sets it; leave it out")
            is_adjustable = field.name in config.model.adjustable if group == "model" else is_path_given  # type: ignore[union-attr]
            if config.init_from is not None and not is_adjustable:
                raise UserError(f"{flag} has no effect with --init-from, whose checkpoint decides it; leave it out")


def train_and_show(config: Config, peers: Peers | None = None) -> None:
    """Train, then print samples of the test split and draw the attention of the longest."""
    run, state = train(config, peers)
    is_first = peers is None or peers.index == 0
    predictor = run.predictor(state.model)
    with run.precision():
        samples = _samples(run, predictor)
    if samples:
        _print(samples)
        inputs = [next(iter(sample.values())) for sample in samples]
        if isinstance(run.task, GivesAttention) and (text := _readable(run.task, inputs)):
            picture = run.workdir.path / "attention.png"
            with atomic(picture) if is_first else nullcontext(picture) as unfinished:
                draw_attention(run, predictor, text, unfinished, write=is_first)
            print(f"attention picture: {picture}")
    print(f"run: {run.workdir.path} (config, metrics, checkpoints; the same command goes on from here)")


def _samples(run: Run, predictor: Predictor) -> list[dict[str, str]]:
    """What the model makes of the first records of the test split; of the validation split where there is none."""
    if not isinstance(run.task, ShowsSamples):
        return []
    records = run.config.data.split("test") or run.config.data.split("valid")
    first = [records[i] for i in range(min(4 * NUM_SAMPLES, len(records)))]
    return run.task.samples(first, predictor)[:NUM_SAMPLES] if first else []


def _readable(task: Any, texts: list[str]) -> str:
    """The longest text whose tokens can be told apart in a picture; "" if there is none that the task can take."""
    short = [text for text in texts if len(text) <= READABLE] or [min(texts, key=len)[:READABLE]]
    if isinstance(task, WritesText):
        short = [text for text, problem in zip(short, task.problems(short), strict=True) if problem is None]
    return max(short, key=len, default="")


def _print(samples: list[dict[str, str]]) -> None:
    table = Table(*samples[0], title="held-out samples", show_lines=any("\n" in text for text in samples[0].values()))
    for sample in samples:
        table.add_row(*(text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…" for text in sample.values()))
    Console(highlight=False).print(table, markup=False)
