from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import written_out
from tests.models.weights import abstract, activate, count, drawn, drops, filled, first_block, large, named, program
from transformer_jax.errors import UserError
from transformer_jax.models import Bert, BertConfig
from transformer_jax.training import decays

PAD, VOCAB, ROWS, LENGTH = 1, 17, 3, 6
HEADS = ("pooler", "masked_lm", "next_sentence", "classifier", "tagger", "span")

BERT = replace(
    BertConfig.base(VOCAB, pad_id=PAD),
    d_model=16,
    num_heads=2,
    d_ff=20,
    num_layers=2,
    max_length=13,
    heads=HEADS,
    num_labels=3,
    dtype="float32",
)
ROBERTA = replace(BERT, num_types=1, position_start=PAD + 1)
DISTILBERT = replace(BERT, num_types=0, pooler_activation="relu", heads=("pooler",))
KINDS = {"bert": BERT, "roberta": ROBERTA, "distilbert": DISTILBERT}

forward = jax.jit(Bert.__call__)


@pytest.fixture
def ids():
    return np.random.default_rng(0).integers(PAD + 1, VOCAB, (ROWS, LENGTH))


@pytest.fixture
def hidden():
    return np.random.default_rng(1).normal(size=(ROWS, LENGTH, 16)).astype(np.float32)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (replace(BertConfig.base(), heads=("pooler",)), 109_482_240),
        (BertConfig.base(), 110_106_428),
        (replace(BertConfig.large(), heads=("pooler",)), 335_141_888),
        # RoBERTa-base, of 514 positions, and DistilBERT.
        (replace(BertConfig.base(50_265), heads=("pooler",), num_types=1, position_start=2), 124_645_632),
        (replace(BertConfig.base(), heads=(), num_types=0, num_layers=6), 66_362_880),
    ],
)
def test_published_parameter_counts(config, expected):
    assert count(config) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_paper_written_out_in_numpy(kind):
    ids = np.array([[5, 6, 7, 8, 9, 10], [11, 12, PAD, 13, PAD, PAD], [PAD, PAD, 14, 15, 16, 2]])
    # In RoBERTa only tokens are counted, from 2 on, and padding is at 1.
    positions = np.array([[0, 1, 2, 3, 4, 5]] * 3)
    if kind == "roberta":
        positions = np.array([[2, 3, 4, 5, 6, 7], [2, 3, 1, 4, 1, 1], [1, 1, 2, 3, 4, 5]])
    types = np.array([0, 0, 1, 1, 1, 1]) if kind == "bert" else None
    config = KINDS[kind]
    x = forward(filled(config), ids, None if types is None else np.stack([types] * 3))
    for row in range(ROWS):
        expected, _ = written_out.bert(large(config), config, ids[row], positions[row], types)
        np.testing.assert_allclose(x[row], expected, atol=2e-5)


def test_attention_weights_are_those_of_the_pass(ids):
    ids[1, 4:] = PAD
    weights = jax.jit(Bert.attention)(filled(BERT), ids)
    for row in range(ROWS):
        _, seen = written_out.bert(large(BERT), BERT, ids[row], np.arange(LENGTH))
        np.testing.assert_allclose(weights[:, row], seen, atol=1e-5)
    np.testing.assert_array_equal(weights[:, 1, :, :, 4:], 0)


def test_every_token_reads_every_other(ids):
    before = forward(filled(ROBERTA), ids)
    for place in range(LENGTH):
        changed = ids.copy()
        changed[:, place] = 2 + (ids[:, place] - 1) % (VOCAB - 2)
        assert (np.abs(forward(filled(ROBERTA), changed) - before).max(-1) > 1e-4).all()


@pytest.mark.parametrize("extra", [1, 7])
def test_padding_changes_nothing(ids, extra):
    model, ends = filled(BERT), ((0, 0), (0, extra))
    types = np.array([[0, 0, 0, 1, 1, 1]] * ROWS)
    padded, types = np.pad(ids, ends, constant_values=PAD), np.pad(types, ends)
    x = forward(model, ids, types[:, :LENGTH])
    np.testing.assert_allclose(forward(model, padded, types)[:, :LENGTH], x, atol=1e-5)
    # Whoever says what is padding may pad with anything.
    said = forward(model, np.pad(ids, ends, constant_values=9), types, valid=np.asarray(padded != PAD))
    np.testing.assert_allclose(said[:, :LENGTH], x, atol=1e-5)


def test_tokens_are_of_the_first_type_unless_told_otherwise(ids):
    model = filled(BERT)
    first, second = (forward(model, ids, np.full_like(ids, kind)) for kind in (0, 1))
    np.testing.assert_allclose(forward(model, ids), first, atol=1e-6)
    assert not np.allclose(first, second, atol=0.1)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_packed_texts_have_the_vectors_that_they_have_alone(kind, ids):
    model = filled(KINDS[kind])
    segments = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 2], [1, 1, 1, 1, 1, 1]])
    ids[0, 5] = PAD
    packed = forward(model, ids, segments=segments)
    for row, begin, end in [(0, 0, 2), (0, 2, 5), (1, 0, 5), (1, 5, 6), (2, 0, 6)]:
        alone = np.full_like(ids, PAD)
        alone[:, : end - begin] = ids[:, begin:end]
        np.testing.assert_allclose(packed[row, begin:end], forward(model, alone)[row, : end - begin], atol=1e-5)
    others = np.where(segments == 1, ids, 3)
    np.testing.assert_array_equal(forward(model, others, segments=segments)[0, :2], packed[0, :2])


def test_positions_may_be_given(ids):
    model = filled(BERT)
    straight = forward(model, ids, positions=np.arange(LENGTH)[None])
    np.testing.assert_allclose(straight, forward(model, ids), atol=1e-6)
    # What stands in another order, and says so, is the same.
    order = np.array([3, 0, 5, 1, 4, 2])
    np.testing.assert_allclose(forward(model, ids[:, order], positions=order[None]), straight[:, order], atol=1e-5)


@jax.jit
def all_heads(model, x):
    names = ("pool", "masked_lm", "next_sentence", "classify", "tag", "span")
    return {name: getattr(model, name)(x) for name in names}


def test_heads_read_the_vectors_as_the_paper_says(hidden):
    given, w = all_heads(filled(BERT), hidden), large(BERT)

    def linear(x, name):
        return x @ w[f"{name}/weight"] + w[f"{name}/bias"]

    pooled = np.tanh(linear(hidden[:, 0], "pooler/output"))
    transformed = written_out.activation("gelu", linear(hidden, "lm_head/transform"))
    expected = {
        "pool": pooled,
        "masked_lm": written_out.norm(transformed, w, "lm_head/norm", BERT) @ w["embedding/table"].T
        + w["lm_head/bias"],
        "next_sentence": linear(pooled, "next_sentence_head/output"),
        "classify": linear(pooled, "classification_head/output"),
        "tag": linear(hidden, "tagging_head/output"),
        "span": linear(hidden, "span_head/output"),
    }
    shapes = {"next_sentence": (ROWS, 2), "classify": (ROWS, 3), "tag": (ROWS, LENGTH, 3), "span": (ROWS, LENGTH, 2)}
    for name, value in expected.items():
        np.testing.assert_allclose(given[name], value, atol=1e-5, err_msg=name)
        assert given[name].shape == shapes.get(name, value.shape)


def test_the_pooler_of_distilbert_is_rectified(hidden):
    pooled, w = jax.jit(Bert.pool)(filled(DISTILBERT), hidden), large(DISTILBERT)
    expected = np.maximum(hidden[:, 0] @ w["pooler/output/weight"] + w["pooler/output/bias"], 0)
    np.testing.assert_allclose(pooled, expected, atol=1e-5)


def test_logits_of_some_places_are_those_places_of_all_logits(hidden):
    model, places = filled(BERT), np.array([[0, 5], [3, 3], [4, 1]])[:, :, None]
    some = jax.jit(Bert.masked_lm)(model, np.take_along_axis(hidden, places, axis=1))
    every = all_heads(model, hidden)["masked_lm"]
    np.testing.assert_allclose(some, np.take_along_axis(np.asarray(every), places, axis=1), atol=1e-6)


def test_dropout_needs_keys_and_differs_between_rows(ids, hidden):
    model = filled(replace(BERT, dropout_rate=0.5))
    keys = jax.random.split(jax.random.key(0), 2)[np.array([0, 0, 1])]
    same, x = np.broadcast_to(ids[:1], ids.shape), np.broadcast_to(hidden[:1], hidden.shape)

    @jax.jit
    def run(model, same, x, key):
        return model(same, dropout_key=key), model.classify(x, dropout_key=key), model.tag(x, dropout_key=key)

    for dropped, whole in zip(run(model, same, x, keys), run(model, same, x, None), strict=True):
        np.testing.assert_array_equal(dropped[0], dropped[1])
        assert np.abs(dropped[0] - dropped[2]).max() > 0.1
        assert np.abs(dropped[0] - whole[0]).max() > 0.1
        np.testing.assert_array_equal(whole[0], whole[2])


def test_dropout_is_on_what_is_embedded_what_a_sublayer_gives_and_the_weights(ids):
    config = replace(BERT, dropout_rate=0.1, attention_dropout_rate=0.2)
    assert drops(Bert.__call__, config, ids) == {((LENGTH, 16), 0.1): 3, ((2, LENGTH, LENGTH), 0.2): 1}


def test_gelu_is_the_exact_one():
    points = [-3.0, -1.0, 0.0, 0.5, 2.0]
    erf_gelu = [-0.00404969, -0.15865525, 0.0, 0.34573123, 1.95449974]
    np.testing.assert_allclose(activate(first_block(filled(BERT).encoder).feed_forward, points), erf_gelu, atol=1e-6)


def test_norms_of_small_numbers_show_their_epsilon():
    x = np.tile(np.array([2e-6, 0.0], np.float32), 8)[None, None]  # of variance 1e-12
    plain = {name: np.full_like(value, float(name.endswith("scale"))) for name, value in large(BERT).items()}
    model = filled(BERT, plain)
    block = first_block(model.encoder)
    residuals = block.self_attention_residual, block.feed_forward_residual
    for norm in (model.embedding_norm, model.lm_head.norm, *(residual.norm for residual in residuals)):
        np.testing.assert_allclose(norm(x)[0, 0, :2], [0.5**0.5, -(0.5**0.5)], rtol=1e-4)


def test_deviations_at_the_start():
    sizes = {"d_model": 64, "num_heads": 4, "d_ff": 256, "max_length": 128, "num_labels": 100}
    for name, value in named(drawn(replace(BERT, vocab_size=400, num_types=100, **sizes))).items():
        if name.endswith(("bias", "scale")):
            np.testing.assert_array_equal(value, float(name.endswith("scale")), err_msg=name)
        else:
            few = name.startswith(("next_sentence", "span"))  # 128 numbers
            assert value.std() == pytest.approx(0.02, rel=0.2 if few else 0.05), name


def test_matrices_decay_and_nothing_else_does():
    decayed = {name for name, decay in named(decays(abstract(BERT))).items() if decay}
    attention = [f"self_attention/{part}" for part in ("query", "key", "value", "output")]
    outputs = [f"{name}_head/output" for name in ("next_sentence", "classification", "tagging", "span")]
    assert decayed == {
        "embedding/table",
        *(f"encoder/blocks/{part}/weight" for part in (*attention, "feed_forward/input", "feed_forward/output")),
        *(f"{part}/weight" for part in ("pooler/output", "lm_head/transform", *outputs)),
    }


def test_bfloat16_computation_stays_near_float32(ids):
    narrow, model = filled(replace(BERT, dtype="bfloat16")), filled(BERT)

    @jax.jit
    def run(model, ids):
        x = model(ids)
        return x, model.masked_lm(x), model.next_sentence(x), model.span(x)

    near, expected = run(narrow, ids), run(model, ids)
    assert [array.dtype for array in near] == [jnp.bfloat16, *[jnp.float32] * 3]
    for a, b in zip(near, expected, strict=True):
        assert 0 < np.abs(np.asarray(a, np.float32) - b).max() < 0.05 * np.abs(b).max()


def test_ids_outside_their_tables(ids):
    model, wrong = filled(BERT), np.where(ids == ids[0, 0], VOCAB, ids)
    with pytest.raises(ValueError, match="id 17 is outside the vocabulary of 17"):
        model(wrong)
    with pytest.raises(ValueError, match=r"type 2 is outside the table of 2 \(types 0 to 1\)"):
        model(ids, np.full_like(ids, 2))
    with pytest.raises(ValueError, match=r"position 13 is outside the table of 13 \(positions 0 to 12\)"):
        model(np.full((1, 14), 5))
    with pytest.raises(ValueError, match="position 13 is outside"):
        forward(model, np.full((1, 14), 5))
    assert np.isnan(forward(model, wrong)[0]).all()


def test_compiles_the_same_program_for_every_depth(ids):
    shallow, deep = (program(Bert.__call__, replace(BERT, num_layers=depth), ids) for depth in (2, 24))
    assert shallow == deep


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": ("next_sentence",)}, "the head 'next_sentence' reads the pooler; add 'pooler' to heads"),
        ({"heads": ("classifier",)}, "the head 'classifier' reads the pooler; add 'pooler' to heads"),
        ({"heads": ("pooler", "classifier"), "num_labels": None}, "the head 'classifier' needs num_labels"),
        ({"heads": ("tagger",), "num_labels": None}, "the head 'tagger' needs num_labels"),
        ({"heads": ("lm",)}, "heads has 'lm'; choose among pooler, masked_lm, next_sentence, classifier, tagger, span"),
        ({"label_names": ("yes", "no")}, "num_labels=3, but there are 2 label_names"),
        ({"num_labels": 0}, "num_labels must be at least 1; got 0"),
        ({"num_heads": 3}, "num_heads=3 does not divide d_model=16; set num_heads to a divisor such as 2"),
        ({"dropout_rate": -0.1}, "dropout_rate must be at least 0 and below 1; got -0.1"),
    ],
)
def test_impossible_configs_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        replace(BERT, **changes)


@pytest.mark.parametrize("name", ["vocab_size", "pad_id"])
def test_a_vocabulary_must_be_known(name):
    with pytest.raises(UserError, match="vocab_size and pad_id come from the tokenizer; set both to make a model"):
        abstract(replace(BERT, **{name: None}))
