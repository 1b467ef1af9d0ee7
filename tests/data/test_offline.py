import socket

import pytest

from transformer_jax.data.dates import Dates
from transformer_jax.data.files import Files
from transformer_jax.data.mixture import Mixture
from transformer_jax.data.records import Records
from transformer_jax.data.text import Text


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    def refused(*args, **kwargs):
        raise AssertionError("the network was asked for")

    for name in ("socket", "create_connection", "getaddrinfo", "gethostbyname"):
        monkeypatch.setattr(socket, name, refused)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def files(folder) -> tuple[str, str]:
    (folder / "a.txt").write_text("one\ntwo\nthree\n")
    (folder / "b.txt").write_text("eins\nzwei\ndrei\n")
    return str(folder / "a.txt"), str(folder / "b.txt")


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: Dates(train_size=3),
        lambda folder: Files(files(folder)),
        lambda folder: Text(files(folder)),
        lambda folder: Text(),
        lambda folder: Records([("one", "eins")]),
        lambda folder: Mixture((Dates(train_size=3), Files(files(folder))), (1, 2)),
    ],
    ids=["Dates", "Files", "Text", "Python's documentation", "Records", "Mixture"],
)
def test_a_source_needs_no_network(tmp_path, make):
    data = make(tmp_path)
    splits = {name: list(data.split(name)) for name in ("train", "valid", "test")}
    assert splits["train"] and all(isinstance(record, dict) for split in splits.values() for record in split)
    assert data.prompt("text").endswith("text") and isinstance(data.tags(), tuple)


def test_the_network_would_be_noticed():
    with pytest.raises(AssertionError, match="network"):
        socket.create_connection(("localhost", 1))
