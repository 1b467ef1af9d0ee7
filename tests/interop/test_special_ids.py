"""What generation begins, ends and pads with: read from checkpoints, given back, and never outside the vocabulary."""

import json
from dataclasses import replace

import pytest

from tests.interop.checkpoints import assert_refused, changed, loaded
from transformer_jax.data import Tokenizer, TokenizerConfig
from transformer_jax.interop import SpecialIds, from_pretrained, save_pretrained

TEXTS = ["a b c d e f g h"]


def written(folder, name="config.json"):
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize(
    ("name", "fields", "generation", "expected"),
    [
        ("gpt2_lm", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}, None, SpecialIds(1, (2,), 3)),
        ("gpt2_lm", {"eos_token_id": [2, 7]}, None, SpecialIds(None, (2, 7))),
        ("gpt2_lm", {"eos_token_id": 2, "bos_token_id": 1}, {"eos_token_id": [4, 5]}, SpecialIds(1, (4, 5))),
        ("gpt2_lm", {"eos_token_id": 2, "bos_token_id": 1}, {"eos_token_id": None}, SpecialIds(1, (2,))),
        (
            "gpt2_lm",
            {"bos_token_id": 50_256, "eos_token_id": [2, 50_256], "pad_token_id": -1},
            {},
            SpecialIds(end=(2,)),
        ),
        ("llama_grouped", {}, None, SpecialIds(1, (2,))),
        ("llama_grouped", {}, {"pad_token_id": 9}, SpecialIds(1, (2,), 9)),
        ("t5_v1_0", {}, None, SpecialIds(None, (1,), 0, 0)),
        ("t5_v1_0", {"decoder_start_token_id": 6, "eos_token_id": 5}, None, SpecialIds(None, (5,), 0, 6)),
        ("marian_shared", {}, None, SpecialIds(None, (0,), 39, 39, None, (0,))),
        (
            "marian_shared",
            {"forced_bos_token_id": 8},
            {"forced_eos_token_id": 3},
            SpecialIds(None, (0,), 39, 39, 8, (3,)),
        ),
        ("pegasus_shared", {}, {"decoder_start_token_id": 4}, SpecialIds(None, (1,), 39, 4, None, (1,))),
        ("bert_model", {}, None, SpecialIds(pad=0)),
    ],
)
def test_they_are_read_and_given_back(tmp_path, name, fields, generation, expected):
    (tmp_path / "in").mkdir()
    folder = changed(tmp_path / "in", name, **fields)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    found = from_pretrained(folder)
    assert found.special_ids == expected
    save_pretrained(found.model, tmp_path / "out", special_ids=found.special_ids)
    assert from_pretrained(tmp_path / "out").special_ids == expected
    (tmp_path / "out" / "generation_config.json").unlink(missing_ok=True)
    assert from_pretrained(tmp_path / "out").special_ids == expected


@pytest.mark.parametrize("name", ["gpt2_lm", "llama_grouped", "t5_v1_0", "marian_shared", "pegasus_shared"])
def test_those_of_the_tokenizer_are_written_by_default(tmp_path, name):
    tokenizer = Tokenizer.train(TEXTS, TokenizerConfig(kind="characters"))
    model = loaded(name).model
    if hasattr(model.config, "pad_id"):
        model = from_pretrained(changed(tmp_path, name, pad_token_id=tokenizer.pad_id)).model
    save_pretrained(model, tmp_path / "out", tokenizer=tokenizer)
    start = {"marian_shared": tokenizer.begin_id, "pegasus_shared": tokenizer.begin_id, "t5_v1_0": tokenizer.pad_id}
    for file in ("config.json", "generation_config.json"):
        fields = written(tmp_path / "out", file)
        assert fields["bos_token_id"] == tokenizer.begin_id and fields["eos_token_id"] == tokenizer.end_id
        assert fields["pad_token_id"] == tokenizer.pad_id
        assert fields.get("decoder_start_token_id") == start.get(name)


def test_what_is_not_known_is_none_and_not_the_default_of_transformers(tmp_path):
    save_pretrained(loaded("gpt2_lm").model, tmp_path)
    fields = written(tmp_path)
    assert [fields[f"{which}_token_id"] for which in ("bos", "eos", "pad")] == [None] * 3
    save_pretrained(loaded("marian_shared").model, tmp_path / "marian")
    fields = written(tmp_path / "marian")
    assert fields["decoder_start_token_id"] == 39 and fields["eos_token_id"] is None
    assert fields["forced_eos_token_id"] is None


@pytest.mark.parametrize(
    ("special", "message"),
    [
        (SpecialIds(end=(40,)), r"special_ids.end=40 is outside the vocabulary of 40 \(ids 0 to 39\)"),
        (SpecialIds(begin=-1), "special_ids.begin=-1 is outside"),
        (SpecialIds(end=(2, 99)), "special_ids.end=99 is outside"),
        (SpecialIds(pad=40), "special_ids.pad=40 is outside"),
        (SpecialIds(begin="<s>"), "special_ids.begin='<s>' is outside"),
    ],
)
def test_an_id_outside_the_vocabulary_is_not_written(tmp_path, special, message):
    model = loaded("gpt2_lm").model
    assert_refused(message, lambda: save_pretrained(model, tmp_path / "new", special_ids=special))
    assert not (tmp_path / "new").exists()


def test_the_padding_is_that_of_the_model(tmp_path):
    special = replace(loaded("t5_v1_0").special_ids, pad=5)
    message = "special_ids.pad=5, but the model was made with pad_id=0; give that"
    assert_refused(message, lambda: save_pretrained(loaded("t5_v1_0").model, tmp_path / "new", special_ids=special))


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"eos_token_id": "2"}', b'{"eos_token_id": 2.0}', b"\xff"])
def test_a_generation_config_that_cannot_be_read_is_an_error(tmp_path, content):
    folder = changed(tmp_path, "gpt2_lm")
    (folder / "generation_config.json").write_bytes(content)
    assert_refused("generation_config.json", from_pretrained, folder)


@pytest.mark.parametrize("name", ["gpt2_lm", "llama_grouped", "t5_v1_0", "marian_shared", "pegasus_shared", "xlnet_lm"])
def test_transformers_generates_with_them(tmp_path, name, transformers):
    ids = replace(loaded(name).special_ids, begin=4, end=(5, 6))
    if loaded(name).special_ids.decoder_start is not None:
        ids = replace(ids, decoder_start=7, forced_end=(8,))
    save_pretrained(loaded(name).model, tmp_path, special_ids=ids)
    config = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (4, [5, 6], ids.pad)
    assert config.decoder_start_token_id == ids.decoder_start
    model = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (model.bos_token_id, model.eos_token_id, model.pad_token_id) == (4, [5, 6], ids.pad)
    config.save_pretrained(tmp_path / "theirs")
    (tmp_path / "generation_config.json").write_text((tmp_path / "theirs" / "generation_config.json").read_text())
    assert from_pretrained(tmp_path).special_ids == ids


def test_an_exported_gpt2_stops_at_its_own_end(tmp_path, transformers):
    import torch

    model = loaded("gpt2_lm").model
    save_pretrained(model, tmp_path / "free", special_ids=SpecialIds(pad=0))
    prompt = torch.tensor([[9, 10, 11]])

    def generated(folder):
        theirs = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
        return theirs.generate(prompt, max_new_tokens=6, do_sample=False)[0].tolist()

    free = generated(tmp_path / "free")
    assert len(free) == 9
    save_pretrained(model, tmp_path / "ends", special_ids=SpecialIds(end=(free[4],), pad=0))
    assert generated(tmp_path / "ends") == free[: free.index(free[4], 3) + 1]
