import pytest

from transformer_jax.atomic import atomic


def test_what_was_there_stays_until_the_new_is_whole(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    (tmp_path / "a.partial").write_text("of somebody else")
    with pytest.raises(TypeError), atomic(path) as unfinished, unfinished.open("w") as file:
        file.writelines(["half", 0])
    assert path.read_text() == "old"
    with atomic(path) as unfinished:
        unfinished.write_text("new")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "a.json": "new",
        "a.partial": "of somebody else",
    }


def test_a_folder_is_as_open_as_any_other(tmp_path):
    (tmp_path / "plain").mkdir()
    with atomic(tmp_path / "new") as unfinished:
        unfinished.mkdir()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    with pytest.raises(IsADirectoryError) as error, atomic(tmp_path / "folder") as unfinished:
        unfinished.touch()
    assert error.value.filename == str(tmp_path / "folder")
