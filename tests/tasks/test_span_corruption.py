import itertools
from collections import Counter

import numpy as np
import pytest

from tests.tasks.test_token_masking import is_fair
from transformer_jax.errors import UserError
from transformer_jax.tasks.span_corruption import corrupt_spans, lengths_for, noise_mask

END = 1
SENTINELS = range(32_099, 31_999, -1)


def corrupted(ids, mask, sentinels=SENTINELS):
    inputs, targets = corrupt_spans(np.array(ids, np.int32), np.array(mask, bool), sentinels=sentinels, end_id=END)
    assert inputs.dtype == targets.dtype == np.int32
    return inputs.tolist(), targets.tolist()


def restored(inputs, targets):
    """The text, from the span that follows each sentinel."""
    spans, last = {}, None
    for id in targets[:-1]:
        if id in SENTINELS:
            spans[last := id] = []
        else:
            spans[last].append(id)
    return [token for id in inputs[:-1] for token in spans.get(id, [id])]


def runs(mask):
    return [(value, len(list(run))) for value, run in itertools.groupby(mask)]


def test_the_example_of_the_paper():
    """Figure 2: the text goes on after "last", so a last sentinel closes."""
    text = ["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week", "."]
    x, y, z = SENTINELS[:3]
    numbers = {**{word: 10 + place for place, word in enumerate(text)}, "<X>": x, "<Y>": y, "<Z>": z, "</s>": END}
    inputs, targets = corrupted(
        [numbers[word] for word in text], [word in ("for", "inviting", "last") for word in text]
    )
    names = {number: word for word, number in numbers.items()}
    assert " ".join(names[id] for id in inputs) == "Thank you <X> me to your party <Y> week . </s>"
    assert " ".join(names[id] for id in targets) == "<X> for inviting <Y> last <Z> </s>"
    assert (x, y, z) == (32_099, 32_098, 32_097)


def test_a_span_at_the_end_needs_no_sentinel_after_it():
    assert corrupted([10, 11, 12, 13], [0, 1, 0, 1]) == (
        [10, 32_099, 12, 32_098, END],
        [32_099, 11, 32_098, 13, END],
    )


def marked(ids, mask):
    """T5's replacement, a token at a time: each run of the mask becomes the next sentinel."""
    out, sentinels, before = [], iter(SENTINELS), False
    for id, hidden in zip(ids, mask, strict=True):
        if not hidden:
            out.append(id)
        elif not before:
            out.append(next(sentinels))
        before = hidden
    return [*out, END]


def test_every_mask_of_a_short_text():
    for length in range(8):
        for mask in itertools.product([False, True], repeat=length):
            ids = list(range(10, 10 + length))
            inputs, targets = corrupted(ids, mask)
            assert inputs == marked(ids, mask)
            assert restored(inputs, targets) == ids
            if not any(mask[:1]):  # else t5's sentinels are one apart
                assert targets == marked(ids, [not hidden for hidden in mask])


def test_too_few_sentinels_are_an_error():
    sentinels = SENTINELS[:2]
    corrupted([10, 11, 12, 13], [0, 1, 0, 1], sentinels)
    with pytest.raises(UserError, match="sentinels has 2 ids but this text of 5 tokens takes 3"):
        corrupted([10, 11, 12, 13, 14], [0, 1, 0, 1, 0], sentinels)
    with pytest.raises(ValueError, match=r"mask has shape \(1,\) but ids has shape \(2,\)"):
        corrupted([10, 11], [True])


@pytest.mark.parametrize(
    ("length", "density", "mean_span", "noise", "spans"),
    [
        (568, 0.15, 3.0, 85, 28),
        (512, 0.15, 3.0, 77, 26),
        (512, 0.5, 3.0, 256, 85),
        (100, 0.15, 10.0, 15, 2),  # 1.5: to the even one
        (100, 0.25, 10.0, 25, 2),  # 2.5 too
        (10, 0.15, 3.0, 2, 1),
        (3, 0.15, 3.0, 1, 1),  # one token at least, and one span
        (2, 0.9, 3.0, 1, 1),  # and one that stays
        (7, 0.5, 1.0, 4, 3),  # no more spans than tokens between them
    ],
)
def test_the_numbers_of_noise_tokens_and_spans(length, density, mean_span, noise, spans):
    for seed in range(20):
        mask = noise_mask(length, np.random.default_rng(seed), density=density, mean_span=mean_span)
        assert mask.dtype == bool and mask.shape == (length,)
        assert mask.sum() == noise and sum(value for value, _ in runs(mask)) == spans
        assert not mask[0] and mask[-1]


@pytest.mark.parametrize("length", [0, 1])
def test_a_text_too_short_to_lose_a_token_is_whole(length):
    assert noise_mask(length, np.random.default_rng(0)).tolist() == [False] * length


def test_all_masks_are_equally_likely():
    """Four of ten tokens in two spans: all masks there are, by brute force."""
    possible = {
        mask
        for mask in itertools.product([False, True], repeat=10)
        if sum(mask) == 4 and [value for value, _ in runs(mask)] == [False, True, False, True]
    }
    random = np.random.default_rng(0)
    masks = (noise_mask(10, random, density=0.4, mean_span=2) for _ in range(3000))
    counts = Counter(tuple(mask.tolist()) for mask in masks)
    assert set(counts) == possible and len(possible) == 15
    assert is_fair(list(counts.values()), np.full(15, 1 / 15))


def test_the_lengths_of_t5():
    """As its `random_spans_helper` gives them."""
    assert lengths_for(512) == (568, 114)
    assert lengths_for(128) == (141, 29)
    assert lengths_for(512, density=0.5) == (767, 513)
    assert lengths_for(512, density=0.15, mean_span=10.0) == (591, 99)


@pytest.mark.parametrize(("density", "mean_span"), [(0.15, 3.0), (0.5, 3.0), (0.3, 1.0), (0.9, 1.0), (0.1, 8.0)])
def test_the_input_of_so_many_tokens_fits_and_of_more_does_not(density, mean_span):
    for input_length in [*range(3, 40), 190, 512]:
        length, target_length = lengths_for(input_length, density=density, mean_span=mean_span)
        for more in (0, 1):
            ids = np.arange(10, 10 + length + more)
            mask = noise_mask(length + more, np.random.default_rng(1), density=density, mean_span=mean_span)
            inputs, targets = corrupt_spans(ids, mask, sentinels=range(-1, -1000, -1), end_id=END)
            if more:
                assert len(inputs) > input_length
            else:
                assert len(inputs) <= input_length and len(targets) == target_length


def test_a_mask_is_a_function_of_its_arguments():
    one, two, other = (noise_mask(100, np.random.default_rng(seed)).tolist() for seed in (1, 1, 2))
    assert one == two != other


def test_what_cannot_be_is_named():
    for density in (0, 1, 15):
        with pytest.raises(UserError, match=f"density={density} must be between 0 and 1"):
            noise_mask(10, np.random.default_rng(0), density=density)
    with pytest.raises(UserError, match=r"mean_span=0.5 at least 1"):
        lengths_for(512, mean_span=0.5)
    with pytest.raises(UserError, match="input_length=2 has no room"):
        lengths_for(2)
