"""The classifier and the tagger of a GPT."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.weights import abstract, drops, filled, large, named
from transformer_jax.errors import UserError
from transformer_jax.functional import cross_entropy
from transformer_jax.models import GPT, GPTConfig

VOCAB, ROWS, LENGTH, LABELS = 19, 3, 8, 4
GPT2 = replace(
    GPTConfig.small(VOCAB),
    d_model=16,
    num_heads=2,
    d_ff=24,
    num_layers=2,
    max_length=15,
    dtype="float32",
    heads=("classifier", "tagger"),
    num_labels=LABELS,
)
LENGTHS = np.array([8, 5, 1])
VALID = np.arange(LENGTH)[None] < LENGTHS[:, None]

hidden = jax.jit(GPT.hidden)
classify = jax.jit(GPT.classify)
tag = jax.jit(GPT.tag)


@pytest.fixture
def ids():
    return np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH))


def test_the_classifier_reads_the_last_real_token_and_the_tagger_each(ids):
    model, weights = filled(GPT2), large(GPT2)
    x = np.asarray(hidden(model, ids, valid=VALID))
    last = x[np.arange(ROWS), LENGTHS - 1]
    np.testing.assert_allclose(
        classify(model, x, VALID), last @ weights["classification_head/output/weight"], atol=1e-4
    )
    expected = x @ weights["tagging_head/output/weight"] + weights["tagging_head/output/bias"]
    np.testing.assert_allclose(tag(model, x), expected, atol=1e-4)
    assert "classification_head/output/bias" not in weights


@pytest.mark.parametrize("left", [False, True])
def test_a_padded_row_is_classified_as_it_is_alone(ids, left):
    model = filled(GPT2)
    moved, positions = ids, np.arange(LENGTH)[None]
    valid = VALID
    if left:
        moved = np.stack([np.roll(row, LENGTH - length) for row, length in zip(ids, LENGTHS, strict=True)])
        valid = VALID[:, ::-1]
        positions = np.maximum(positions - (LENGTH - LENGTHS)[:, None], 0)
    padded = np.where(valid, moved, 3)
    logits = classify(model, hidden(model, padded, valid=valid, positions=positions), valid)
    for row, length in enumerate(LENGTHS):
        alone = classify(model, hidden(model, ids[row : row + 1, :length]))
        np.testing.assert_allclose(logits[row], alone[0], atol=2e-5)


def test_gradients_reach_the_heads_and_what_they_read_alone(ids):
    labels = np.array([1, 0, 3])

    def loss(model, method):
        x = model.hidden(ids, valid=VALID)
        if method == "classify":
            return cross_entropy(model.classify(x, VALID), labels)[0]
        return cross_entropy(model.tag(x), np.broadcast_to(labels[:, None], ids.shape), VALID.astype(np.float32))[0]

    for method, head, other in (
        ("classify", "classification_head", "tagging_head"),
        ("tag", "tagging_head", "classification_head"),
    ):
        gradients = named(jax.jit(jax.grad(lambda model, method=method: loss(model, method)))(filled(GPT2)))
        moving = {name for name, gradient in gradients.items() if bool(jnp.any(gradient != 0))}
        # A bias of the keys adds the same to all scores of a query.
        still = {name for name in gradients if name.startswith(other)} | {"decoder/blocks/self_attention/key/bias"}
        assert gradients.keys() - moving <= still and {f"{head}/output/weight", "embedding/table"} <= moving


def test_heads_are_there_when_asked_for_and_change_no_other_weight():
    plain, headed = (set(named(abstract(config))) for config in (replace(GPT2, heads=()), GPT2))
    assert headed - plain == {
        "classification_head/output/weight",
        "tagging_head/output/weight",
        "tagging_head/output/bias",
    }
    assert plain < headed


def test_the_rate_of_the_heads_is_their_own():
    config = replace(GPT2, head_dropout_rate=0.3)
    x = np.zeros((ROWS, LENGTH, 16), np.float32)
    assert drops(GPT.classify, config, x) == {((16,), 0.3): 1}
    assert drops(GPT.tag, config, x) == {((LENGTH, 16), 0.3): 1}
    assert not drops(GPT.classify, GPT2, x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": ("pooler",)}, "heads has 'pooler'; choose among classifier, tagger"),
        ({"num_labels": None}, "needs num_labels"),
        ({"num_labels": 0}, "num_labels must be at least 1; got 0"),
        ({"label_names": ("a", "b")}, "num_labels=4, but there are 2 label_names"),
        ({"head_dropout_rate": 1.0}, "head_dropout_rate must be at least 0 and below 1; got 1.0"),
    ],
)
def test_impossible_heads_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        replace(GPT2, **changes)


@pytest.mark.parametrize(("method", "head"), [("classify", "classifier"), ("tag", "tagger")])
def test_a_head_that_is_not_there_is_named(method, head):
    message = rf"the model has no head '{head}' \(its heads: none\); make or load one with it in heads"
    with pytest.raises(ValueError, match=message):
        getattr(abstract(replace(GPT2, heads=())), method)(np.zeros((1, 2, 16), np.float32))
