"""A step whose numbers are not finite: it changes nothing, is named, and its batch is kept."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import tiny
from tests.training.test_verify import TRANSFORMER
from transformer_jax.errors import UserError
from transformer_jax.functional import cross_entropy
from transformer_jax.layers import is_parameter
from transformer_jax.parallel import MeshConfig
from transformer_jax.tasks.translation import Translation
from transformer_jax.training import TrainState, make_train_step, train
from transformer_jax.training.diagnosis import first_non_finite
from transformer_jax.training.metrics import read_metrics


def loss(model, batch, key):
    logits = model(batch["source"], batch["target"][:, :-1], dropout_key=key)
    labels = batch["target"][:, 1:]
    return cross_entropy(logits, labels, labels != tiny.PAD)


@pytest.fixture(scope="module")
def batch():
    return dict(zip(("source", "target"), tiny.pairs(), strict=True))


def with_weight(model, name, change):
    """The model with one of its weights changed."""

    def changed(path, leaf):
        here = jax.tree_util.keystr(path, simple=True, separator=".") == name
        return leaf.replace(change(leaf[...])) if here else leaf

    return jax.tree_util.tree_map_with_path(changed, model, is_leaf=is_parameter)


@pytest.mark.parametrize(
    ("name", "layer", "place"),
    [
        ("encoder.blocks.feed_forward.output.weight", 1, "layer 1 of encoder (of 0 to 1)"),
        ("decoder.blocks.cross_attention.value.weight", 0, "layer 0 of decoder (of 0 to 1)"),
        ("decoder.blocks.feed_forward.input.bias", 1, "layer 1 of decoder (of 0 to 1)"),
    ],
)
def test_the_first_layer_that_overflows_is_named(batch, name, layer, place):
    model = with_weight(tiny.make(), name, lambda x: x.at[layer].set(3e38))
    assert first_non_finite(loss, model, batch) == place


def test_a_weight_that_is_not_finite_is_named(batch):
    model = with_weight(tiny.make(), "embedding.table", lambda x: x.at[5, 3].set(jnp.nan))
    assert first_non_finite(loss, model, batch) == "the weight embedding.table is not finite"


def test_what_is_wrong_without_any_layer_is_in_the_embedding_or_the_output(batch):
    model = with_weight(tiny.make(), "embedding.table", lambda x: x.at[5].set(1e38))
    assert first_non_finite(loss, model, batch).startswith("the embedding or the output layer")


def test_a_batch_that_is_fine_is_said_to_be(batch):
    assert "are finite now" in first_non_finite(loss, tiny.make(), batch)


def test_a_step_that_is_not_finite_changes_nothing_but_its_number(batch):
    def sometimes(model, batch, key):
        total, weight = loss(model, batch, key)
        return total * batch["factor"][0], weight

    optimizer = optax.adam(1e-2)
    step = jax.jit(make_train_step(sometimes, optimizer, skip_non_finite=True))
    before = TrainState.create(tiny.make(), optimizer, jax.random.key(0))
    factors = {
        name: {**batch, "factor": np.full(4, value, np.float32)} for name, value in (("bad", np.inf), ("good", 1))
    }
    skipped, metrics = step(before, factors["bad"])
    assert not np.isfinite(metrics["loss"])
    assert int(skipped.step) == 1
    for old, new in zip(*(jax.tree.leaves((s.model, s.optimizer)) for s in (before, skipped)), strict=True):
        np.testing.assert_array_equal(old, new)
    changed, _ = step(skipped, factors["good"])
    assert any(
        (old != new).any() for old, new in zip(*map(jax.tree.leaves, (skipped.model, changed.model)), strict=True)
    )


@pytest.fixture
def overflowing(monkeypatch):
    """A training whose loss is infinite for batches with a certain first token."""
    right = Translation.loss

    def wrong(self, model, batch, key):
        total, weight = right(self, model, batch, key)
        is_bad = (batch["slot"][0] == 0) & (key is not None) & (jnp.sum(batch["source"]) % 3 == 0)
        return jnp.where(is_bad, jnp.inf, total), weight

    monkeypatch.setattr(Translation, "loss", wrong)


def test_training_stops_and_keeps_the_batch(overflowing, tmp_path):
    config = replace(TRANSFORMER, steps=30, workdir=tmp_path / "run", mesh=MeshConfig(data=1), step_timeout=None)
    with pytest.raises(UserError, match=r"the loss became inf at step \d+: first in .* The batch is kept in"):
        train(config)
    (kept,) = (tmp_path / "run").glob("not_finite_*.npz")
    with np.load(kept) as arrays:
        assert arrays["source"].sum() % 3 == 0 and {"target", "slot"} <= {*arrays}


def test_training_skips_such_batches_if_it_is_told_to(overflowing, tmp_path, capsys):
    config = replace(TRANSFORMER, steps=12, log_every=1, non_finite="skip", mesh=MeshConfig(data=1))
    _, state = train(replace(config, workdir=tmp_path / "run"))
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["split"] == "train"]
    bad = [line["step"] for line in lines if line.get("skipped")]
    assert all(("loss" in line) != ("skipped" in line) for line in lines)
    assert bad and len(lines) == 12
    assert {path.name for path in (tmp_path / "run").glob("not_finite_*")} == {f"not_finite_{n}.npz" for n in bad}
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(state.model))
    assert f"step {bad[0]}: the loss is inf; skipped" in capsys.readouterr().err
