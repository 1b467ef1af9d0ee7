import re
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.reference import REFERENCES
from transformer_jax.errors import UserError
from transformer_jax.interop import from_pretrained
from transformer_jax.interop.hub import find_folder

hub = pytest.importorskip("huggingface_hub")  # which the tokenizers library brings along

OTHERS = ["README.md", "tf_model.h5", "onnx/model.safetensors", "flax_model.msgpack", "original/consolidated.00.pth"]


class Repository:
    """A repository on the hub, of which the files that were asked for come to be in a folder."""

    def __init__(self, folder: Path, files: list[str]):
        self.folder, self.files, self.asked = folder, files, []

    def snapshot_download(self, name: str, *, allow_patterns: list[str]) -> str:
        found = [file for file in self.files if any(fnmatch(file, pattern) for pattern in allow_patterns)]
        self.asked.append((name, found))
        for file in found:
            (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / file).touch()
        return str(self.folder)


@pytest.fixture
def serve(monkeypatch, tmp_path):
    def serve(*files: str) -> Repository:
        repository = Repository(tmp_path / "cache", list(files))
        monkeypatch.setattr(hub, "snapshot_download", repository.snapshot_download)
        return repository

    return serve


@pytest.fixture
def offline(monkeypatch):
    def fail(*_, **__):
        pytest.fail("asked the hub")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    monkeypatch.setattr(hub, "HfApi", fail)
    monkeypatch.setattr("socket.socket", fail)


@pytest.mark.parametrize("given", [str, Path])
def test_a_folder_is_a_folder(tmp_path, monkeypatch, offline, given):
    (tmp_path / "models" / "bert-base").mkdir(parents=True)
    assert find_folder(given(tmp_path / "models" / "bert-base")) == tmp_path / "models" / "bert-base"
    monkeypatch.chdir(tmp_path)
    assert find_folder(given("models/bert-base")) == Path("models/bert-base")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_folder(given("~/models")) == tmp_path / "models"


def test_a_checkpoint_in_a_folder_is_loaded_without_the_hub(offline):
    assert from_pretrained(REFERENCES["gpt2_lm"].folder).config.num_layers == 2


@pytest.mark.parametrize("name", ["bert-base-uncased", "google/t5-v1_1-small", "a.b_c/d.e-f"])
def test_what_is_not_a_folder_is_fetched_by_its_name(serve, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    repository = serve("config.json", "model.safetensors", *OTHERS)
    assert find_folder(name) == repository.folder
    assert repository.asked == [(name, ["config.json", "model.safetensors"])]


def test_all_that_is_read_is_fetched_and_nothing_else(serve):
    needed = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    needed += ["model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
    needed += ["vocab.txt", "vocab.json", "merges.txt"]
    repository = serve(*needed, *OTHERS, "pytorch_model.bin", "training_args.bin")
    find_folder("some/model")
    assert repository.asked == [("some/model", needed)]


def test_bin_files_are_fetched_where_there_is_no_safetensors(serve):
    older = ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"]
    repository = serve("config.json", *older, *OTHERS, "training_args.bin")
    assert find_folder("some/model") == repository.folder
    assert repository.asked == [("some/model", ["config.json"]), ("some/model", ["config.json", *older])]


@pytest.mark.parametrize("name", ["a/b/c", "/nowhere", "no such folder", "~/nowhere", "https://hub/model"])
def test_what_cannot_be_a_name_is_not_asked_for(offline, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^{re.escape(name)} is not a folder; give the folder of a checkpoint, or"):
        find_folder(name)


def test_a_file_is_not_a_name(offline, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model").touch()
    with pytest.raises(UserError, match=r"^model is not a folder; give the folder of a checkpoint"):
        find_folder("model")


def test_without_the_library_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        UserError, match=r"^there is no folder gpt2; to look for it .* pip install \"[a-z_]+\[hub\]\"\Z"
    ):
        find_folder("gpt2")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("no space left"), "no space left"),
        (OSError(), "OSError"),
        (ValueError("Repo id must be\nin the form"), "Repo id must be in the form"),
        (
            RuntimeError("401 Client Error.\n\nRepository Not Found for url: x\n"),
            "401 Client Error. Repository Not Found",
        ),
        (type("ConnectError", (Exception,), {})("[Errno -2] Name or\nservice"), r"\[Errno -2\] Name or service"),
    ],
    ids=lambda value: "",
)
@pytest.mark.parametrize("call", [1, 2])
def test_what_the_hub_says_against_it_is_one_line(serve, monkeypatch, error, reason, call):
    repository = serve("config.json", "pytorch_model.bin")

    def failing(*arguments, **options):
        if len(repository.asked) == call - 1:
            raise error
        return repository.snapshot_download(*arguments, **options)

    monkeypatch.setattr(hub, "snapshot_download", failing)
    message = rf"^some/model is not a folder, and cannot be fetched from the hub: {reason}[^\n]*\Z"
    with pytest.raises(UserError, match=message) as caught:
        find_folder("some/model")
    assert caught.value.__cause__ is error


def test_somebody_who_stops_it_is_not_told_a_reason(monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "snapshot_download", stopped)
    with pytest.raises(KeyboardInterrupt):
        find_folder("some/model")


def test_a_name_that_the_library_itself_refuses_is_one_line():
    with pytest.raises(
        UserError, match=r"^some/mo--del is not a folder, and cannot be fetched from the hub: [^\n]*--[^\n]*\Z"
    ):
        find_folder("some/mo--del")
