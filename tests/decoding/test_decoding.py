"""Decoding against brute force: every sequence over a tiny vocabulary, scored by the plain forward pass."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from transformer_jax.decoding import beam_search, greedy, length_penalty

VOCAB, LENGTH = 5, 4
CONFIG = replace(tiny.CONFIG, vocab_size=VOCAB, norm="pre")
BEGIN, END, GOES_ON = tiny.BEGIN, tiny.END, 4


@pytest.fixture(scope="module")
def model():
    """Sharpened, so that hypotheses are far apart and beams change places."""
    model = tiny.make(CONFIG, seed=11)
    return jax.tree.map(lambda x: x * 2.5, model)


@pytest.fixture(scope="module")
def source():
    return jnp.array([[4, 0, 2, 4], [0, 4, 1, 1], [2, 2, 0, 1]])


@pytest.fixture(scope="module")
def prefix_scores(model, source):
    """The log-probability of every prefix, for each source."""
    sequences = np.array(list(itertools.product(range(VOCAB), repeat=LENGTH)))
    inputs = np.concatenate([np.full((len(sequences), 1), BEGIN), sequences[:, :-1]], axis=1)
    every = []
    for row in source:
        logits = tiny.forward(model, jnp.repeat(row[None], len(sequences), axis=0), jnp.asarray(inputs))
        chosen = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), sequences[:, :, None], axis=2)[:, :, 0]
        sums = np.cumsum(chosen, axis=1, dtype=np.float64)
        every.append(
            {tuple(map(int, t[: n + 1])): s[n] for t, s in zip(sequences, sums, strict=True) for n in range(LENGTH)}
        )
    return every


def run(strategy, model, source, **options):
    @jax.jit
    def search(model, source):
        prompt = jnp.full((len(source), 1), BEGIN)
        return strategy(model.decode, model.start(source, LENGTH), prompt, length=LENGTH, end_id=END, **options)

    return jax.tree.map(np.asarray, search(model, source))


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_a_beam_wide_enough_finds_the_best_of_all_sequences(model, source, prefix_scores, alpha):
    beams = run(beam_search, model, source, num_beams=VOCAB**LENGTH, alpha=alpha)
    for row, scores in enumerate(prefix_scores):
        whole = {t: s / ((5 + len(t)) / 6) ** alpha for t, s in scores.items() if END not in t[:-1]}
        finished = {tokens: score for tokens, score in whole.items() if tokens[-1] == END}
        best = sorted(finished, key=finished.get, reverse=True)
        for place in range(20):
            length = beams.lengths[row, place]
            assert tuple(beams.tokens[row, place, : length + 1]) == best[place]
            assert beams.scores[row, place] == pytest.approx(finished[best[place]], rel=1e-4)
        # All that ended come first, then those that did not.
        unfinished = max(score for tokens, score in whole.items() if END not in tokens and len(tokens) == LENGTH)
        assert beams.lengths[row, len(finished)] == LENGTH
        assert beams.scores[row, len(finished)] == pytest.approx(unfinished, rel=1e-4)


def python_beam_search(scores, num_beams, alpha):
    """The same search over a table of all prefixes, without arrays, caches or early stopping."""
    live, finished = [()], []
    for length in range(1, LENGTH + 1):
        grown = [(*tokens, token) for tokens in live for token in range(VOCAB)]
        grown = sorted(grown, key=scores.get, reverse=True)[: 2 * num_beams]
        finished += [(tokens, scores[tokens] / ((5 + length) / 6) ** alpha) for tokens in grown if tokens[-1] == END]
        finished = sorted(finished, key=lambda item: item[1], reverse=True)[:num_beams]
        live = [tokens for tokens in grown if tokens[-1] != END][:num_beams]
    unfinished = [(tokens, scores[tokens] / ((5 + LENGTH) / 6) ** alpha) for tokens in live]
    return [*finished, *unfinished][:num_beams]


@pytest.mark.parametrize("num_beams", [1, 2, 3])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_a_narrow_beam_is_the_textbook_search(model, source, prefix_scores, num_beams, alpha):
    beams = run(beam_search, model, source, num_beams=num_beams, alpha=alpha)
    for row, scores in enumerate(prefix_scores):
        expected = python_beam_search(scores, num_beams, alpha)
        assert len(expected) == num_beams
        for place, (tokens, score) in enumerate(expected):
            assert tuple(beams.tokens[row, place, : len(tokens)]) == tokens
            assert beams.lengths[row, place] == len(tokens) - (tokens[-1] == END)
            assert beams.scores[row, place] == pytest.approx(score, rel=1e-4)


@pytest.mark.parametrize(("num_beams", "num_results"), [(1, 1), (2, 1), (2, 2)])
def test_the_search_goes_on_while_a_live_beam_can_still_win(model, source, num_beams, num_results):
    """To end at once has the probability 0.6; what goes on has less, but by its length wins in the end."""
    first = jnp.log(jnp.full(VOCAB, 1e-9).at[END].set(0.6).at[GOES_ON].set(0.4))
    then, last = (jnp.log(jnp.full(VOCAB, 1e-9).at[token].set(1.0)) for token in (GOES_ON, END))

    def scripted(tokens, state):
        logits = jnp.where(state.position == 0, first, jnp.where(state.position < LENGTH - 1, then, last))
        return jnp.broadcast_to(logits, (len(tokens), 1, VOCAB)), replace(state, position=state.position + 1)

    prompt = jnp.full((len(source), 1), BEGIN)
    beams = beam_search(
        scripted,
        tiny.start(model, source, length=LENGTH),
        prompt,
        length=LENGTH,
        end_id=END,
        num_beams=num_beams,
        num_results=num_results,
        alpha=2.0,
    )
    assert beams.lengths[:, 0].tolist() == [LENGTH - 1] * len(source)
    expected = np.log(0.4) / length_penalty(LENGTH, 2.0)
    assert expected > np.log(0.6) > np.log(0.4)
    np.testing.assert_allclose(beams.scores[:, 0], expected, rtol=1e-4)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_fewer_results_are_the_first_of_all(model, source, alpha):
    every = run(beam_search, model, source, num_beams=4, alpha=alpha)
    for count in (1, 2):
        few = run(beam_search, model, source, num_beams=4, alpha=alpha, num_results=count)
        for a, b in zip(few, every, strict=True):
            np.testing.assert_array_equal(a, b[:, :count])


def test_greedy_takes_the_likeliest_token_each_time(model, source, prefix_scores):
    found = run(greedy, model, source)
    for row, scores in enumerate(prefix_scores):
        tokens = ()
        while len(tokens) < LENGTH and (not tokens or tokens[-1] != END):
            tokens = max(((*tokens, token) for token in range(VOCAB)), key=scores.get)
        assert tuple(found.tokens[row, : len(tokens)]) == tokens
        assert found.lengths[row] == len(tokens) - (tokens[-1] == END)
        assert found.scores[row] == pytest.approx(scores[tokens], rel=1e-4)


def test_rows_do_not_influence_each_other(model, source):
    together = run(beam_search, model, source, num_beams=3, alpha=0.6)
    for row in range(len(source)):
        alone = run(beam_search, model, source[row : row + 1], num_beams=3, alpha=0.6)
        np.testing.assert_array_equal(alone.tokens[0, 0], together.tokens[row, 0])
        np.testing.assert_allclose(alone.scores[0], together.scores[row], rtol=1e-4)


@pytest.mark.parametrize("strategy", [greedy, partial(beam_search, num_beams=3, alpha=0.6)])
def test_each_row_keeps_to_its_own_limit(model, source, strategy):
    limits = jnp.array([1, 3, 4])

    @partial(jax.jit, static_argnames="length")
    def search(model, source, limits, length):
        state, prompt = model.start(source, length), jnp.full((len(source), 1), BEGIN)
        return strategy(model.decode, state, prompt, length=length, limits=limits, end_id=END)

    together = search(model, source, limits, LENGTH)
    for row, limit in enumerate([1, 3, 4]):
        alone = search(model, source[row : row + 1], limits[row : row + 1], limit)
        np.testing.assert_array_equal(alone.lengths[0], together.lengths[row])
        np.testing.assert_allclose(alone.scores[0], together.scores[row], rtol=1e-4)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row, ..., :limit])


def test_length_penalty_counts_the_end_token():
    np.testing.assert_allclose(length_penalty(1, 0.6), 1)
    np.testing.assert_allclose(length_penalty(7, 0.6), 2**0.6, rtol=1e-6)
    np.testing.assert_allclose(length_penalty(np.array([1, 4, 13]), 1.0), [1, 1.5, 3])


def never_ending(tokens, state):
    logits = jnp.zeros((*tokens.shape, VOCAB)).at[..., 4].set(1.0).at[..., END].set(-jnp.inf)
    return logits, state


def test_without_an_end_token_nothing_is_cut(model, source):
    state = model.start(source, LENGTH)
    prompt = jnp.full((3, 1), BEGIN)
    found = greedy(never_ending, state, prompt, length=LENGTH, end_id=END)
    np.testing.assert_array_equal(found.tokens, np.full((3, LENGTH), 4))
    np.testing.assert_array_equal(found.lengths, LENGTH)
    beams = beam_search(never_ending, state, prompt, length=LENGTH, end_id=END, num_beams=2, alpha=0.6)
    np.testing.assert_array_equal(beams.tokens[:, 0], np.full((3, LENGTH), 4))
    np.testing.assert_array_equal(beams.lengths, LENGTH)


def test_cached_equals_uncached_at_every_position_and_prompt_length():
    model = tiny.make()
    source, target = tiny.pairs()
    expected = tiny.forward(model, source, target)
    for prompt_length in (1, 2, 4, 5):
        state = tiny.start(model, source, length=8)
        logits, state = tiny.decode(model, target[:, :prompt_length], state)
        pieces = [logits]
        for position in range(prompt_length, 5):
            logits, state = tiny.decode(model, target[:, position : position + 1], state)
            pieces.append(logits)
        np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), expected, atol=1e-5)
        assert int(state.position) == 5


def test_a_longer_prompt_is_continued(model, source, prefix_scores):
    found = run(greedy, model, source)

    @jax.jit
    def search(model, source, prompt):
        return greedy(model.decode, model.start(source, LENGTH), prompt, length=LENGTH - 1, end_id=END)

    prompt = jnp.concatenate([jnp.full((3, 1), BEGIN), jnp.asarray(found.tokens[:, :1])], axis=1)
    rest = search(model, source, prompt)
    for row in range(3):
        if found.tokens[row, 0] != END:
            np.testing.assert_array_equal(rest.tokens[row], found.tokens[row, 1:])


def test_too_little_room_is_an_error(model, source):
    prompt = jnp.full((3, 2), BEGIN)
    with pytest.raises(ValueError, match="a prompt of 2 and 4 new tokens need room for 5; the cache holds 4"):
        greedy(model.decode, model.start(source, LENGTH), prompt, length=LENGTH, end_id=END)
    with pytest.raises(ValueError, match="the cache holds 4 positions; 5 more from position 0 do not fit"):
        model.decode(jnp.full((3, 5), BEGIN), model.start(source, LENGTH))
    state = replace(model.start(source, LENGTH), position=jnp.int32(3))
    search = partial(beam_search, num_beams=2, alpha=0.6)
    found = search(model.decode, model.start(source, LENGTH), prompt[:, :1], length=LENGTH, end_id=END)
    assert np.isfinite(found.scores[:, 0]).all()  # there is just enough room
    with pytest.raises(ValueError, match="the cache holds 4 positions; 2 more from position 3 do not fit"):
        model.decode(prompt, state)
