"""Sets of TensorFlow Datasets, read, converted and prepared without TensorFlow and without a network."""

import gzip
import json
import pickle
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import tensorflow_datasets as tfds
from tensorboardX.record_writer import masked_crc32c
from tensorflow_datasets.core import dataset_info, file_adapters

from transformer_jax.data import Dates, Text, Tfds
from transformer_jax.data.builders import TjDates, prepare
from transformer_jax.errors import UserError

SIZES = {"train": 7, "validation": 3, "test": 2}
NAME = "user_pairs/de-en"
TRANSLATION = tfds.features.Translation(["de", "en"])


def pair(n):
    return {"en": f"The house has {n} doors.", "de": f"Das Haus hat {n} Türen."}


def records(size):
    return [{"source": pair(n)["en"], "target": pair(n)["de"]} for n in range(size)]


class Pairs(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A few sentences, made here."""

    VERSION = tfds.core.Version("1.0.0")
    features = TRANSLATION
    sizes = SIZES

    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=self.features, disable_shuffling=True)

    def _split_generators(self, manager):
        return {split: self._generate_examples(size) for split, size in self.sizes.items()}

    def _generate_examples(self, size):
        for n in range(size):
            yield n, self.example(n)

    def example(self, n):
        return pair(n)


class UserPairs(Pairs, skip_registration=True):
    BUILDER_CONFIGS: ClassVar = [tfds.core.BuilderConfig(name="de-en")]


class FetchedPairs(Pairs):
    """A set that TFDS knows and that nobody has prepared."""


class LostPairs(Pairs):
    """A set that TFDS knows and cannot fetch."""

    def _split_generators(self, manager):
        raise ConnectionError("no route to host\nwith details")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("a test asked for the network")

    monkeypatch.setattr(socket, "socket", fail)
    monkeypatch.setattr(socket, "getaddrinfo", fail)


def write(builder, folder, **arguments):
    shards = tfds.download.DownloadConfig(num_shards=2)
    builder(data_dir=folder, file_format="array_record", **arguments).download_and_prepare(download_config=shards)
    return folder


@pytest.fixture(scope="module")
def array_record(tmp_path_factory):
    return write(UserPairs, tmp_path_factory.mktemp("array_record"))


@pytest.fixture
def tfrecord(array_record, tmp_path):
    """The same set as tfrecord files, framed as TensorFlow frames them."""
    shutil.copytree(array_record, tmp_path, dirs_exist_ok=True)
    for path in folder_of(tmp_path).glob("*.array_record-*"):
        with path.with_name(path.name.replace("array_record", "tfrecord")).open("wb") as file:
            for record in file_adapters.array_record_data_source.ArrayRecordDataSource([str(path)]):
                length = struct.pack("<Q", len(record))
                checksums = [struct.pack("<I", masked_crc32c(data)) for data in (length, record)]
                file.write(length + checksums[0] + record + checksums[1])
        path.unlink()
    edit_info(tmp_path, fileFormat="tfrecord")
    return tmp_path


def folder_of(data_dir):
    return data_dir / "user_pairs" / "de-en" / "1.0.0"


def edit_info(data_dir, **fields):
    path = folder_of(data_dir) / "dataset_info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def contents(data_dir):
    return {path.name: path.read_bytes() for path in folder_of(data_dir).iterdir()}


def source(data_dir, name=NAME, **fields):
    return Tfds(name, **({"features": {"source": "en", "target": "de"}, "data_dir": data_dir} | fields))


def error(data, split="train"):
    with pytest.raises(UserError) as caught:
        data.split(split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", [NAME, "user_pairs", f"{NAME}:1.0.0", "user_pairs:1.*.*"])
def test_reads_a_set_that_tfds_has_no_builder_of(array_record, name):
    data = source(array_record, name)
    assert [list(data.split(split)) for split in ("train", "valid", "test")] == [*map(records, SIZES.values())]


def test_reads_the_newest_version_or_the_one_that_is_named(tmp_path):
    class Newer(Pairs, skip_registration=True):
        name = Pairs.name
        VERSION = tfds.core.Version("1.1.0")
        sizes: ClassVar = {"train": 4}

    write(Pairs, tmp_path)
    write(Newer, tmp_path)
    assert len(source(tmp_path, "pairs").split("train")) == 4
    assert len(source(tmp_path, "pairs:1.0.0").split("train")) == 7


def test_is_a_sequence_and_knows_tfds_slices(array_record):
    pairs, expected = source(array_record, train_split="train[2:]").split("train"), records(7)[2:]
    assert (pairs[-1], pairs[1:3], pairs[::-2], len(pairs)) == (expected[-1], expected[1:3], expected[::-2], 5)
    with pytest.raises(IndexError):
        pairs[5]


def test_a_worker_process_gets_the_path_and_not_the_text(array_record):
    pairs = source(array_record).split("train")
    assert pairs[0] == records(1)[0]
    pickled = pickle.dumps(pairs)
    assert b"doors" not in pickled
    assert list(pickle.loads(pickled)) == records(7)


class Mixed(Pairs, skip_registration=True):
    """Features of all kinds."""

    features = tfds.features.FeaturesDict(
        {
            "title": tfds.features.Text(),
            "body": tfds.features.Tensor(shape=(), dtype=np.str_),
            "topic": tfds.features.ClassLabel(names=["sport", "news"]),
            "tags": tfds.features.Sequence(tfds.features.ClassLabel(names=["O", "NAME"])),
            "stars": np.float32,
            "image": tfds.features.Tensor(shape=(2, 1), dtype=np.uint8),
            "words": tfds.features.Sequence(tfds.features.Text()),
            "both": TRANSLATION,
        }
    )

    def example(self, n):
        values = {"stars": n / 2, "image": np.full((2, 1), n, np.uint8), "words": ["one", "zwölf"], "both": pair(n)}
        return {"title": f"é{n}", "body": f"b{n}", "topic": n % 3 - 1, "tags": [0, 1], **values}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return write(Mixed, tmp_path_factory.mktemp("mixed"))


def test_reads_plain_strings(mixed):
    pairs = source(mixed, "mixed", features={"source": "title", "target": "body"}).split("test")
    assert list(pairs) == [{"source": "é0", "target": "b0"}, {"source": "é1", "target": "b1"}]


def test_labels_become_their_names_and_numbers_stay(mixed):
    names = ("title", "topic", "tags", "stars", "words", "image")
    found = source(mixed, "mixed", features={name: name for name in names}).split("train")
    first, second, third = ({name: record[name] for name in names[:-1]} for record in found[:3])
    same = {"tags": ["O", "NAME"], "words": ["one", "zwölf"]}
    assert first == {"title": "é0", "topic": None, "stars": 0.0, **same}  # -1 is no label
    assert second == {"title": "é1", "topic": "sport", "stars": 0.5, **same}
    assert third == {"title": "é2", "topic": "news", "stars": 1.0, **same}
    assert type(second["stars"]) is float
    np.testing.assert_array_equal(found[2]["image"], [[2], [2]])


@pytest.mark.parametrize(("name", "problem"), [("fr", "is not a feature"), ("both", "is a group of features")])
def test_what_is_no_feature_is_named_with_what_there_is(mixed, name, problem):
    start, _, known = error(source(mixed, "mixed", features={"title": "title", "target": name})).partition("; ")
    assert start == f"features['target']={name!r} {problem} of mixed"
    kinds = {"title (Text)", "body (Tensor)", "topic (ClassLabel)", "words (Sequence)", "both (Translation)"}
    assert kinds < set(known.removeprefix("its features are ").split(", "))


class Flawed(Pairs, skip_registration=True):
    """Texts of which some are empty or not UTF-8."""

    features = tfds.features.FeaturesDict({"de": tfds.features.Text(), "en": tfds.features.Text()})
    texts: ClassVar = {1: b"", 2: b" \n", 4: "für".encode("latin-1")}

    def example(self, n):
        return {"de": self.texts.get(n, b"gut"), "en": b"good"}


@pytest.fixture(scope="module")
def flawed(tmp_path_factory):
    return write(Flawed, tmp_path_factory.mktemp("flawed"))


def record_error(records, index):
    with pytest.raises(UserError) as caught:
        records[index]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("split", "first"), [("train", 0), ("train[1:6]", 1), ("train[-5:]", 2)])
def test_a_record_that_is_empty_or_not_utf8_is_named_with_its_file(flawed, split, first):
    data = source(flawed, "flawed", train_split=split)
    found = data.split("train")
    for position in range(len(found)):
        number = first + position
        shard, index = (0, number) if number < 4 else (1, number - 4)
        file = f"flawed-train.array_record-0000{shard}-of-00002, record {index}"
        if number not in Flawed.texts:
            assert found[position] == {"source": "good", "target": "gut"}
            continue
        message = record_error(found, position)
        assert message.startswith(f"flawed, {split}, record {position} (")
        assert f"{file}, counted from 0)" in message
        if number == 4:
            assert "has byte 2 of 'de', 0xfc, that is not UTF-8; prepare the set again as UTF-8" in message
        else:
            assert "has an empty target; remove the record, or set allow_empty=True" in message
    kept = source(flawed, "flawed", train_split=split, allow_empty=True).split("train")
    assert kept[2 - first]["target"] == " \n"


def test_a_record_that_cannot_be_parsed_is_named(flawed, monkeypatch):
    found = source(flawed, "flawed").split("train")
    monkeypatch.setattr(type(found.records), "__getitem__", lambda self, index: json.loads("{"))
    assert "flawed, train, record 0 (" in record_error(found, 0) and "cannot be read" in record_error(found, 0)


@pytest.mark.parametrize("split", ["dev", "train[:0]", "train[", "train[9:]"])
def test_a_split_without_examples_is_named_with_those_there_are(array_record, split):
    message = f"valid_split={split!r} has no examples in {NAME}; its splits are train, validation, test"
    assert error(source(array_record, valid_split=split), "valid") == message


@pytest.mark.parametrize("name", ["wmt14_translate/de-en", "nobodys_set", f"{NAME}:2.0.0"])
def test_a_set_that_is_not_there_says_how_to_prepare_it(array_record, name):
    command = (
        f'python -c "import tensorflow_datasets as tfds; tfds.builder({name!r}, data_dir={str(array_record)!r}, '
        """file_format='array_record').download_and_prepare()\""""
    )
    assert error(source(array_record, name)) == (
        f"{name} cannot be read from {array_record}: it is not there; set download=True, or prepare it with {command}; "
        'both need pip install "transformer_jax[tfds]"'
    )


def test_a_name_that_tfds_cannot_read(array_record):
    assert error(source(array_record, "no name")).startswith(f"no name cannot be read from {array_record}: Parsing ")


def test_a_missing_file_is_named(array_record, tmp_path):
    shutil.copytree(array_record, tmp_path, dirs_exist_ok=True)
    shard = folder_of(tmp_path) / "user_pairs-train.array_record-00001-of-00002"
    shard.unlink()
    assert error(source(tmp_path)) == f"{NAME} lacks its file {shard}; copy or prepare the set again"


def test_download_prepares_as_array_record_and_says_so_on_stderr(tmp_path, capsys):
    data = source(tmp_path, "fetched_pairs", download=True)
    assert list(data.split("train")) == records(7)
    assert list(tmp_path.rglob("fetched_pairs-train.array_record-*"))
    printed = capsys.readouterr()
    assert "Downloading and preparing" in printed.err and not printed.out


@pytest.mark.parametrize("installed", [True, False])
def test_a_download_that_fails(tmp_path, monkeypatch, installed):
    monkeypatch.setattr("transformer_jax.data.tfds.find_spec", lambda name: installed or None)
    advice = '; most sets need TensorFlow to be prepared: pip install "transformer_jax[tfds]"'
    message = "lost_pairs cannot be fetched and prepared: no route to host" + ("" if installed else advice)
    assert error(source(tmp_path, "lost_pairs", download=True)) == message


def test_tfrecord_is_converted_once_beside_the_original(tfrecord, capsys):
    before = contents(tfrecord)
    data = source(tfrecord)
    assert [list(data.split(split)) for split in ("train", "valid", "test")] == [*map(records, SIZES.values())]
    assert capsys.readouterr().err.count(f"converting {NAME} from tfrecord to array_record, once, in ") == 1
    after = contents(tfrecord)
    assert set(after) == {*before, *(name.replace("tfrecord", "array_record") for name in before)}
    assert [name for name in before if after[name] != before[name]] == ["dataset_info.json"]


def test_tfds_finds_the_converted_files(tfrecord):
    source(tfrecord).split("train")
    builder = tfds.builder_from_directory(folder_of(tfrecord))
    assert builder.info.available_file_formats() == {tfds.core.FileFormat.TFRECORD, tfds.core.FileFormat.ARRAY_RECORD}
    assert [text["de"].decode() for text in builder.as_data_source("test")] == [pair(n)["de"] for n in range(2)]


def cut_in_a_record(data):
    return data[:-5]


def cut_in_a_header(data):
    return data + data[:7]


def one_record_less(data):
    return data[16 + struct.unpack("<Q", data[:8])[0] :]


def overwritten(data):
    return b"\0" * 64 + data[64:]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_in_a_record, "is cut short, damaged or compressed"),
        (cut_in_a_header, "is cut short, damaged or compressed"),
        (overwritten, "is cut short, damaged or compressed"),
        (gzip.compress, "is cut short, damaged or compressed"),
        (one_record_less, "has 0 records in place of 1"),
    ],
)
def test_damaged_tfrecord_is_named_and_leaves_nothing_behind(tfrecord, damage, message):
    shard = folder_of(tfrecord) / "user_pairs-test.tfrecord-00001-of-00002"
    whole = contents(tfrecord)
    shard.write_bytes(damage(whole[shard.name]))
    damaged = contents(tfrecord)
    assert error(source(tfrecord)) == f"{shard} {message}; copy or prepare the set again"
    assert contents(tfrecord) == damaged
    shard.write_bytes(whole[shard.name])
    assert list(source(tfrecord).split("train")) == records(7)


def test_a_missing_tfrecord_file_is_named(tfrecord):
    shard = folder_of(tfrecord) / "user_pairs-test.tfrecord-00001-of-00002"
    shard.unlink()
    message = error(source(tfrecord))
    assert message.startswith(f"{NAME} cannot be converted from tfrecord to array_record: ") and str(shard) in message


@pytest.mark.parametrize("moment", ["write_examples", "write_dataset_info_proto"])
def test_an_interrupted_conversion_is_made_anew(tfrecord, monkeypatch, moment):
    owner = file_adapters.ArrayRecordFileAdapter if moment == "write_examples" else dataset_info
    done, calls = getattr(owner, moment), []

    def interrupted(*args, **kwargs):
        calls.append(moment)
        if moment == "write_dataset_info_proto" or len(calls) == 3:
            raise KeyboardInterrupt
        return done(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            source(tfrecord).split("train")
    builder = tfds.builder_from_directory(folder_of(tfrecord))
    assert builder.info.available_file_formats() == {tfds.core.FileFormat.TFRECORD}
    assert not list(folder_of(tfrecord).glob("incomplete.*"))
    assert list(source(tfrecord).split("train")) == records(7)


def test_other_formats_are_named(tfrecord):
    edit_info(tfrecord, fileFormat="riegeli")
    message = f"{NAME} is in {folder_of(tfrecord)} as riegeli; prepare it as array_record in another data_dir"
    assert error(source(tfrecord)) == message


def test_files_without_their_format_in_their_names_are_left_alone(tfrecord):
    info = json.loads((folder_of(tfrecord) / "dataset_info.json").read_text())
    for split in info["splits"]:
        split["filepathTemplate"] = "{DATASET}-{SPLIT}-{SHARD_X_OF_Y}"
    edit_info(tfrecord, splits=info["splits"])
    for path in folder_of(tfrecord).glob("*.tfrecord-*"):
        path.rename(path.with_name(path.name.replace(".tfrecord", "")))
    before = contents(tfrecord)
    assert "has no format in its name" in error(source(tfrecord))
    assert contents(tfrecord) == before


def test_the_embedded_set_as_tfds_prepares_it_is_the_embedded_set(tmp_path, capfd, caplog):
    dates = Dates(languages=("de", "ja"), train_size=30, valid_size=3, test_size=2)
    data = prepare(dates, tmp_path)
    assert all(list(data.split(split)) == list(dates.split(split)) for split in ("train", "valid", "test"))
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_the_documentation_as_tfds_prepares_it_is_the_documentation(tmp_path):
    data = prepare(Text(), tmp_path)
    assert all(list(data.split(split)) == list(Text().split(split)) for split in ("train", "valid"))
    assert tfds.builder("tj_text", data_dir=tmp_path).builder_config.source == Text()


def test_text_that_has_changed_is_prepared_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    book = tmp_path / "book"
    source = Text(book, document="line", valid_fraction=0.5)
    for text in ("one\n\ntwo\nten\n", "six\n\ntwo\nten\n"):
        book.write_text(text)
        data = prepare(source, tmp_path)
        assert all(list(data.split(split)) == list(source.split(split)) for split in ("train", "valid"))


def test_the_default_embedded_set_is_the_one_that_tfds_knows(tmp_path, monkeypatch):
    monkeypatch.setattr(TjDates, "download_and_prepare", lambda self: None)  # it is large
    builder = tfds.builder("tj_dates", data_dir=tmp_path)
    assert builder.builder_config.source == Dates()
    assert prepare(Dates(), tmp_path).name == f"tj_dates/{builder.builder_config.name}"


def test_each_embedded_set_has_its_own_folder_and_no_empty_split(tmp_path):
    sets = [Dates(train_size=5, valid_size=0, test_size=2, seed=seed) for seed in (0, 1)]
    for dates, data in [(dates, prepare(dates, tmp_path)) for dates in sets]:
        assert list(data.split("train")) == list(dates.split("train"))
        assert error(data, "valid").endswith("its splits are train, test")
    assert prepare(sets[0], tmp_path) == prepare(sets[0], tmp_path)


def test_tensorflow_is_never_imported(tfrecord):
    code = f"""
import sys
from pathlib import Path
from transformer_jax.data import Dates, Text, Tfds
from transformer_jax.data.builders import prepare

folder = Path({str(tfrecord)!r})
for data in (Tfds({NAME!r}, {{"text": "en"}}, folder), prepare(Dates(train_size=3, valid_size=1, test_size=1), folder)):
    assert data.split("train")[0]
assert "tensorflow_datasets" in sys.modules
print("tensorflow" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(tfrecord))
    assert result.stdout == "False\n", result.stderr


def test_a_set_does_not_say_which_modules_are_imported(tmp_path, monkeypatch):
    folder = tmp_path / "mine" / "1.0.0"
    folder.mkdir(parents=True)
    features = {"pythonClassName": "evil.X", "featuresDict": {"features": {}}}
    (folder / "features.json").write_text(json.dumps(features))
    about = {"name": "mine", "version": "1.0.0", "fileFormat": "array_record"}
    (folder / "dataset_info.json").write_text(json.dumps(about))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'called')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"names the class evil.X, and reading it would run the module evil"):
        Tfds("mine", features={"text": "text"}, data_dir=tmp_path).split("train")
    assert "evil" not in sys.modules and not (tmp_path / "called").exists()
