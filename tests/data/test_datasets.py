import json
import pickle
import socket
import sys

import pytest

from transformer_jax.data import Datasets
from transformer_jax.errors import UserError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    asked = []

    def fail(*args, **kwargs):
        asked.append(args)
        raise OSError("a test asked for the network")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, fail)
    yield
    assert not asked


def rows(size):
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["bad", "good"]),
            "tags": datasets.List(datasets.ClassLabel(names=["O", "NAME"])),
            "stars": datasets.Value("float32"),
            "translation": datasets.Translation(["de", "en"]),
        }
    )
    content = [
        {
            "text": f"text {n}",
            "label": n % 3 - 1,
            "tags": [0, 1],
            "stars": n / 2,
            "translation": {"de": f"d{n}", "en": f"e{n}"},
        }
        for n in range(size)
    ]
    return datasets.Dataset.from_list(content, features=features)


@pytest.fixture
def saved(tmp_path):
    def saved(**sizes):
        datasets.DatasetDict({name: rows(size) for name, size in sizes.items()}).save_to_disk(str(tmp_path / "set"))
        return str(tmp_path / "set")

    return saved


def test_labels_become_their_names(saved):
    data = Datasets(saved(train=3, validation=1), columns={"text": "text", "label": "label", "words": "tags"})
    assert list(data.split("train")) == [
        {"text": "text 0", "label": None, "words": ["O", "NAME"]},
        {"text": "text 1", "label": "bad", "words": ["O", "NAME"]},
        {"text": "text 2", "label": "good", "words": ["O", "NAME"]},
    ]
    assert data.fields() == ("text", "label", "words") and hash(data) == hash(pickle.loads(pickle.dumps(data)))


def test_nested_columns_and_all_columns(saved):
    path = saved(train=1, validation=1)
    pairs = Datasets(path, columns={"source": "translation.en", "target": "translation.de"})
    assert list(pairs.split("valid")) == [{"source": "e0", "target": "d0"}]
    everything = Datasets(path)
    assert everything.fields() == ("text", "label", "tags", "stars", "translation")
    assert everything.split("train")[0]["stars"] == 0.0


def test_a_split_is_a_sequence_that_pickles(saved):
    split = Datasets(saved(train=40), columns={"text": "text"}, held_out=0).split("train")
    assert pickle.loads(pickle.dumps(split))[-1] == split[-1] == {"text": "text 39"}


@pytest.mark.parametrize(
    ("sizes", "settings", "expected"),
    [
        ({"train": 50, "validation": 2, "test": 3}, {}, (50, 2, 3)),
        ({"train": 50, "validation": 2}, {}, (50, 2, 0)),
        ({"train": 50, "test": 3}, {}, (48, 2, 3)),
        ({"train": 50}, {}, (46, 2, 2)),
        ({"train": 50}, {"held_out": 1}, (48, 1, 1)),
        ({"all": 50, "other": 4}, {"train_split": "all", "valid_split": "other"}, (50, 4, 0)),
    ],
)
def test_splits_are_those_of_the_set_or_held_out(saved, sizes, settings, expected):
    data = Datasets(saved(**sizes), columns={"text": "text"}, **settings)
    splits = [list(data.split(name)) for name in ("train", "valid", "test")]
    assert tuple(map(len, splits)) == expected
    if len(sizes) == 1:
        assert len({record["text"] for split in splits for record in split}) == 50


def test_a_set_without_splits_is_for_training(tmp_path):
    rows(3).save_to_disk(str(tmp_path / "set"))
    data = Datasets(tmp_path / "set", columns={"text": "text"})
    assert [record["text"] for record in data.split("train")] == ["text 0", "text 1", "text 2"]
    assert data.files() and all(path.is_file() for path in data.files())


def test_without_download_the_network_is_not_asked(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(UserError) as caught:
        Datasets("nobody/nothing").split("train")
    message = str(caught.value)
    assert message.startswith("nobody/nothing cannot be loaded: ") and "\n" not in message
    assert message.endswith("it is no folder and not in the cache: add --data.download to fetch it")
    assert not datasets.config.HF_HUB_OFFLINE and not huggingface_hub.constants.HF_HUB_OFFLINE


def test_with_download_it_is(monkeypatch):
    asked = []

    def load(path, name):
        asked.append((path, name, datasets.config.HF_HUB_OFFLINE))
        return datasets.DatasetDict(train=rows(2))

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = Datasets("somebody/something", "de-en", columns={"text": "text"}, download=True)
    assert len(data.split("train")) == 2 and asked == [("somebody/something", "de-en", False)]


def test_what_is_in_the_cache_is_read_without_the_network(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    folder = tmp_path / "nobody___cached_set" / "default" / "0.0.0" / "abc"
    folder.mkdir(parents=True)
    content = datasets.Dataset.from_dict({"text": ["one", "two"]})
    with datasets.arrow_writer.ArrowWriter(path=str(folder / "cached_set-train.arrow")) as writer:
        for row in content:
            writer.write(row)
        writer.finalize()
    info = {
        "builder_name": "parquet",
        "dataset_name": "cached_set",
        "config_name": "default",
        "version": "0.0.0",
        "features": content.features.to_dict(),
        "splits": {"train": {"name": "train", "num_examples": 2, "dataset_name": "cached_set"}},
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
    assert list(Datasets("nobody/cached_set").split("train")) == [{"text": "one"}, {"text": "two"}]


def test_what_cannot_be_read_is_named(saved, tmp_path, monkeypatch):
    path = saved(train=2)
    with pytest.raises(UserError, match=r"columns\['text'\]='body' is not a column of .*; its columns are text, label"):
        Datasets(path, columns={"text": "body"}).split("train")
    with pytest.raises(
        UserError, match=r"valid_split='dev' is not a split of .*; its splits are train; set data.valid_s"
    ):
        Datasets(path, valid_split="dev").split("train")
    with pytest.raises(UserError, match=r"record 1, counted from 0 has no 'translation.fr'"):
        Datasets(path, columns={"text": "translation.fr"}).split("train")[1]
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match=r"other cannot be read as a folder that save_to_disk made: .*use data.Files"):
        Datasets(tmp_path / "other").split("train")
    datasets.Dataset.from_dict({"text": ["a", " "]}).save_to_disk(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="empty, train, record 1, counted from 0 has an empty text"):
        Datasets(tmp_path / "empty").split("train")[1]
    assert Datasets(tmp_path / "empty", allow_empty=True).split("train")[1] == {"text": " "}
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        UserError, match=r'needs the datasets library to be read: pip install "transformer_jax\[datasets'
    ):
        Datasets(path).split("train")
