"""Files that lie: nothing outside of their folder is read, nothing is allocated by a header's word."""

import json
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import save_file

from transformer_jax.errors import UserError
from transformer_jax.interop.tensors import open_tensors
from transformer_jax.interop.untrusted import is_file_name, json_object, shown


def raw(path, header: str | bytes, data: bytes = b""):
    header = header if isinstance(header, bytes) else header.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def assert_refused(path, message):
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=rf"^[^\n]*{message}[^\n]*\Z") as caught:
            {name: tensor.read() for name, tensor in open_tensors(path).items()}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**24 and len(str(caught.value)) < 1000
    str(caught.value).encode()  # so that it can be printed


OUTSIDE = ["../secret.safetensors", "{folder}/secret.safetensors", "sub/../../secret.safetensors", "./x.safetensors"]
OUTSIDE += ["sub/x.safetensors", "sub\\x.safetensors", "..\\secret.safetensors", "C:x.safetensors", "C:\\x", "//host/x"]
OUTSIDE += ["", ".", "..", "x.safetensors\0", "\0", "x.safetensors/", "~/../x"]


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_names_files_of_its_own_folder(tmp_path, monkeypatch, kind, name):
    folder = tmp_path / "checkpoint"
    (folder / "sub").mkdir(parents=True)
    for path in (tmp_path / "secret.safetensors", folder / "x.safetensors", folder / "sub" / "x.safetensors"):
        save_file({"a": np.ones(1), "b": np.ones(1)}, path)
    files = {"b": "x.safetensors", "a": name.format(folder=tmp_path)}
    (folder / f"{kind}.index.json").write_text(json.dumps({"weight_map": files}))
    monkeypatch.setattr("transformer_jax.interop.tensors._open_file", lambda path: pytest.fail(f"{path} was opened"))
    assert_refused(folder, "index.json names .*, which is not the name of a file in its folder; do not use it")


def test_a_shard_may_be_a_link_as_in_the_cache_of_the_hub(tmp_path):
    (tmp_path / "snapshot").mkdir()
    save_file({"a": np.ones(1)}, tmp_path / "blob")
    (tmp_path / "snapshot" / "1.safetensors").symlink_to(tmp_path / "blob")
    index = tmp_path / "snapshot" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))
    assert open_tensors(tmp_path / "snapshot")["a"].read() == [1]


@pytest.mark.parametrize("name", ["x" * 5000, "\ud800", "line\nbreak", "x" * 200])
def test_a_file_that_no_system_can_have_is_not_there(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert_refused(tmp_path, "index.json names .*, which is not there; get it, too")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}', "its JSON has a twice"),
        ('{"weight_map": {"a": "1"}, "weight_map": {"a": "2"}}', "its JSON has weight_map twice"),
        ('{"weight_map": {"a\\nb": "1", "a\\nb": "1"}}', r"its JSON has 'a\\nb' twice"),
        ('{"weight_map": {"\\ud800": "1.safetensors"}}', "surrogates not allowed"),
        ('{"weight_map": {"a": "1"}, "metadata": {"total_size": NaN}}', "its JSON has NaN"),
        ('{"weight_map": {"a": "1"}, "metadata": {"total_size": ' + "9" * 5000 + "}}", "digits"),
        ('{"weight_map": {"a": ' + '{"a":' * 90_000, "nested too deeply"),
        ('{"weight_map": {"a": ["1"]}}', "no weight_map from names to files"),
        (b"\xff\xfe{\0}\0", "decode"),
        ('{"weight_map": {"a": "1"}}'.encode("utf-16"), "decode"),
        (b"\xef\xbb\xbf{}", "BOM"),
    ],
    ids=range(11),
)
def test_a_malformed_index_is_an_error(tmp_path, index, message):
    index = index if isinstance(index, bytes) else index.encode()
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    assert_refused(tmp_path, f"is not the index of a checkpoint: .*{message}.*; get it again")


def header(entry: str = "", *, dtype='"F32"', shape="[1]", offsets="[0, 4]") -> str:
    return f'{{"a": {{"dtype": {dtype}, "shape": {shape}, "data_offsets": {offsets}}}{entry}}}'


HUGE = "9" * 4000
HEADERS = {
    "a name twice": (header(', "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'), "its JSON has a twice"),
    "a field twice": (header().replace('"shape"', '"dtype": "F32", "shape"'), "its JSON has dtype twice"),
    "metadata twice": (header(', "__metadata__": {}, "__metadata__": {}'), "its JSON has __metadata__ twice"),
    "metadata of numbers": (header(', "__metadata__": {"format": 1}'), "__metadata__ that is not a map"),
    "metadata of a list": (header(', "__metadata__": []'), "__metadata__ that is not a map"),
    "metadata of nothing": (header(', "__metadata__": null'), "__metadata__ that is not a map"),
    "nested": ('{"a":' * 20_000 + "1" + "}" * 20_000, "nested too deeply"),
    "a list": ("[1]", "its JSON is not an object"),
    "a name of half a character": (header(', "\\ud800": 3'), "surrogates not allowed"),
    "latin": (b'{"\xe9": 3}', "decode"),
    "of 16 bits": (header().encode("utf-16"), "decode"),
    "infinity": (header(shape="[Infinity]"), "its JSON has Infinity"),
    "a float": (header(shape="[1.0]"), "says of a"),
    "a large float": (header(shape="[1e999]"), "says of a"),
    "true": (header(shape="[true]"), "says of a"),
    "offsets of bools": (header(offsets="[false, 4]"), "says of a"),
    "offsets of floats": (header(offsets="[0, 4.0]"), "says of a"),
    "offsets before the data": (header(offsets="[-4, 0]"), "says of a"),
    "offsets in reverse": (header(offsets="[4, 0]"), "says of a"),
    "three offsets": (header(offsets="[0, 4, 4]"), "says of a"),
    "no offsets": (header(offsets="null"), "says of a"),
    "a huge size": (header(shape=f"[{HUGE}]"), "says of a"),
    "a huger size": (header(shape=f"[{HUGE * 2}]"), "digits"),
    "a huge offset": (header(offsets=f"[{HUGE}, {HUGE}]"), "says of a"),
    "huge, and nothing": (header(shape=f"[0, {HUGE}]", offsets="[0, 0]"), "says of a"),
    "large, and nothing": (header(shape="[0, 4611686018427387904]", offsets="[0, 0]"), "says of a"),
    "an overflow": (header(shape="[4294967296, 4294967296]"), "says of a"),
    "an overflow to 4": (header(shape="[9223372036854775809, 2]"), "says of a"),
    "many axes": (header(shape="[" + "1," * 99 + "1]"), "says of a"),
    "very many axes": (header(shape="[" + "9999999999," * 200_000 + "1]"), "says of a"),
    "an unknown dtype": (header(dtype='"F31"'), "a has dtype F31, which is not one of"),
    "a dtype of two lines": (header(dtype='"F\\n31"'), r"a has dtype 'F\\n31', which is not one of"),
    "a dtype that does not exist": (header(dtype="32"), "says of a"),
    "a long name": ('{"%s": 3}' % ("x" * 100_000), "says of x+\\.\\.\\. 3"),
    "a name of two lines": ('{"x\\ny": 3}', r"says of 'x\\ny' 3"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_malformed_header_is_an_error(tmp_path, name):
    content, message = HEADERS[name]
    assert_refused(raw(tmp_path / "model.safetensors", content, bytes(4)), message)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**64 - 8, 10**8, 300])
def test_a_header_is_as_long_as_the_file_shows(tmp_path, length):
    content = raw(tmp_path / "model.safetensors", header(), bytes(4)).read_bytes()
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + content[8:])
    assert_refused(tmp_path, "its header ends at byte")


def test_json_is_what_everybody_reads_in_it():
    assert json_object('{"é": [1, {"a": null}], "b": {"a": 2.5}}'.encode()) == {"é": [1, {"a": None}], "b": {"a": 2.5}}


def test_names_of_files_are_plain():
    assert all(map(is_file_name, ["model-00001-of-00002.safetensors", "a b", "é", "...", ".hidden", "~", "-x"]))
    assert not any(map(is_file_name, ["", ".", "..", "a/b", "/a", "a/", "a\\b", "\\a", "C:a", "a:b", "a\0", "a/.."]))


def test_text_of_others_is_one_short_line():
    assert [shown(text) for text in ("a.b", "é中", "a\nb", "\x1b[0m", "\ud800", 3)] == [
        *("a.b", "é中", r"'a\nb'", r"'\x1b[0m'", r"'\ud800'", "3")
    ]
    assert len(shown("x" * 1000)) < 100
