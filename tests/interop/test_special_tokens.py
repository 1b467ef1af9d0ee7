"""The special tokens of a run that starts from a checkpoint: the checkpoint's ids come before the tokenizer's names."""

from dataclasses import replace

import pytest

from tests.interop.checkpoints import assert_refused, loaded
from transformer_jax.data import Tokenizer, TokenizerConfig
from transformer_jax.interop import SpecialIds
from transformer_jax.interop.special_tokens import tokenizer_config

TOKENIZER = Tokenizer.train(["a b c d e f g h"], TokenizerConfig(kind="characters"))
A, B = TOKENIZER.find("a"), TOKENIZER.find("b")
PAD, BEGIN, END = TOKENIZER.pad_id, TOKENIZER.begin_id, TOKENIZER.end_id


def config_of(name: str, **special_ids) -> TokenizerConfig:
    return tokenizer_config(TOKENIZER, replace(loaded(name), special_ids=SpecialIds(**special_ids)))


@pytest.mark.parametrize(
    ("name", "special_ids", "expected"),
    [
        ("gpt2_lm", {}, ("<pad>", "<s>", "</s>")),
        ("gpt2_lm", {"begin": A, "end": (B,), "pad": END}, ("</s>", "a", "b")),
        ("gpt2_lm", {"end": (A, B)}, ("<pad>", "<s>", "a")),
        ("gpt2_lm", {"end": (A, END)}, ("<pad>", "<s>", "</s>")),
        ("bert_masked_lm", {"begin": A, "end": (B,), "pad": PAD}, ("<pad>", "<s>", "</s>")),
        ("t5_v1_0", {"begin": A, "end": (B,), "pad": PAD, "decoder_start": PAD}, ("<pad>", "<pad>", "b")),
        ("marian_shared", {"begin": A, "end": (END,), "pad": PAD, "decoder_start": B}, ("<pad>", "b", "</s>")),
    ],
    ids=lambda value: "",
)
def test_they_have_the_ids_that_the_checkpoint_says(name, special_ids, expected):
    config = config_of(name, **special_ids)
    assert (config.pad, config.begin, config.end) == expected


@pytest.mark.parametrize("add_begin", [True, False])
def test_prompts_begin_as_the_tokenizer_says(add_begin):
    assert tokenizer_config(TOKENIZER.with_begin(add_begin), loaded("gpt2_lm")).add_begin is add_begin


def test_where_the_tokenizer_does_not_say_how_prompts_begin_its_file_does():
    assert TOKENIZER.add_begin is None and not TOKENIZER.begins_texts
    assert config_of("gpt2_lm").add_begin is False


@pytest.mark.parametrize("role", ["begin", "end", "pad"])
def test_an_id_without_a_token_is_named(role):
    ids = {"pad": PAD, "begin": BEGIN, role: (39,) if role == "end" else 39}
    assert_refused(
        f"the checkpoint's {role} id is 39, but its tokenizer has no token with that id; .*--processor.path",
        lambda: config_of("gpt2_lm", **ids),
    )


@pytest.mark.parametrize(
    ("name", "special_ids", "message"),
    [
        (
            "t5_v1_0",
            {"pad": PAD, "decoder_start": A},
            f"decoder_start_token_id={A}, but a T5 here begins its targets with its padding, pad_token_id={PAD}",
        ),
        ("t5_v1_0", {"pad": PAD, "decoder_start": PAD, "forced_begin": B}, f"forced_bos_token_id={B} would not be"),
        ("marian_shared", {"decoder_start": A, "forced_begin": B}, f"forced_bos_token_id={B} would not be honoured"),
    ],
)
def test_targets_that_a_run_would_begin_otherwise_are_an_error(name, special_ids, message):
    assert_refused(message, lambda: config_of(name, **special_ids))
