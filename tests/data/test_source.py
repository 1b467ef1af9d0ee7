from dataclasses import dataclass
from typing import get_type_hints

import numpy as np
import pytest
import tyro

from transformer_jax import data
from transformer_jax.data.source import Checked, Chosen, Source
from transformer_jax.errors import UserError


@dataclass(frozen=True)
class Numbers(Source):
    """A source as a user writes it."""

    count: int = 3

    def split(self, name):
        return [{"text": str(n), "label": n, "image": np.zeros(n)} for n in range(self.count)]


def test_a_source_of_a_users_own_needs_a_split():
    numbers = Numbers()
    assert numbers.fields() == ("source", "target") and numbers.tags() == () == numbers.files()
    assert numbers.prompt("text") == "text" and hash(numbers)


def test_sources_are_told_from_other_configs():
    """As the config of a run does when it is read back."""
    sources = (Numbers, data.Datasets, data.Dates, data.Files, data.Mixture, data.Records, data.Text, data.Tfds)
    assert all(issubclass(source, Source) for source in sources)
    assert not issubclass(data.TokenizerConfig, Source) and not issubclass(data.BatchingConfig, Source)


def test_only_texts_must_be_texts():
    records = Checked(Numbers().split("train"), ("text", "label", "image"), ("text",), "Numbers, train")
    assert records[2]["label"] == 2 and len(records) == 3
    with pytest.raises(UserError, match="Numbers, train, record 1 has 1 as 'label'; give a string"):
        Checked(Numbers().split("train"), ("text", "label"), ("label",), "Numbers, train")[1]
    message = "Numbers, train, record 0 has no 'source', but text, label, image; the task reads source, label"
    with pytest.raises(UserError, match=message):
        Checked(Numbers().split("train"), ("source", "label"), ("source",), "Numbers, train")[0]
    with pytest.raises(UserError, match=r"Numbers, train, record 0 is \[1\]; give a dict with text"):
        Checked([[1]], ("text",), (), "Numbers, train")[0]


def test_what_is_no_text_is_named_with_its_file_and_line(tmp_path):
    path = tmp_path / "n.jsonl"
    path.write_text('{"t": "a", "y": 1}\n{"t": null, "y": [1, 2]}\n{"t": "c", "y": {"z": 1.5}}\n')
    split = data.Files(path, columns={"text": "t", "label": "y"}, held_out=0).split("train")
    assert isinstance(split, Chosen)
    records = Checked(split, ("text", "label"), ("text",), "Files, train")
    assert records[0] == {"text": "a", "label": 1} and records[2] == {"text": "c", "label": {"z": 1.5}}
    with pytest.raises(
        UserError, match=r"Files, train, record 1 \(.*n.jsonl, line 2\) has None as 'text'; give a string"
    ):
        records[1]


CONFIGS = [
    data.BatchingConfig,
    data.Datasets,
    data.Dates,
    data.Files,
    data.Mixture,
    data.Records,
    data.Text,
    data.Tfds,
    data.TokenizerConfig,
]


def sentences(config):
    """The docstring of each field, as the command line shows it."""
    from tyro._docstrings import get_field_docstring

    return {name: get_field_docstring(config, name, ()) for name in config.__dataclass_fields__}


@pytest.mark.parametrize("config", CONFIGS)
def test_every_setting_has_a_help_text_that_stands_alone(config):
    for name, text in sentences(config).items():
        assert text and text[0].isupper() and text.rstrip().endswith("."), (name, text)
        for word in ("The same", "the same for", "follow the training", "judge", "Here and below", "place"):
            assert word not in text, (name, text)
    assert get_type_hints(config)


def test_columns_are_flags_of_a_command_line():
    words = ["--train", "reviews.csv", "--columns.label", "stars"]
    files = tyro.cli(data.Files, args=words, default=data.Files(columns={"text": "", "label": ""}))
    assert files.columns == {"text": "", "label": "stars"} and files.fields() == ("text", "label")
    sets = tyro.cli(data.Datasets, args=["--path", "imdb", "--columns", "text", "text", "--download"])
    assert sets.columns == {"text": "text"} and sets.download


@pytest.mark.filterwarnings("ignore:The field `data` is annotated")
def test_records_in_memory_can_be_the_default_of_a_command_line():
    given = data.Records(train=[("a", "b")], fields=("text", "label"))

    @dataclass(frozen=True)
    class Config:
        data: data.Source
        steps: int = 1

    config = tyro.cli(Config, args=["--steps", "3"], default=Config(given), config=(tyro.conf.AvoidSubcommands,))
    assert config.data == given and config.steps == 3 and config.data.split("train") == [{"text": "a", "label": "b"}]
