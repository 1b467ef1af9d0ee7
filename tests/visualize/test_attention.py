import warnings
from itertools import pairwise

import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest

from transformer_jax.errors import UserError
from transformer_jax.visualize import AttentionPanel, attention_figure, fonts, position_figure, save_figure
from transformer_jax.visualize.attention import COLOUR_MAP, check_suffix

ENGLISH = ["<ja>", "Tuesday", ",", " March", " 4", ",", " 2", "0", "2", "5", "</s>"]


def weights(*shape, seed=0):
    scores = np.random.default_rng(seed).exponential(size=shape)
    return scores / scores.sum(-1, keepdims=True)


def panel(name="cross", heads=2, queries=("a", "b", "c"), keys=("x", "y"), seed=0):
    return AttentionPanel(name, weights(heads, len(queries), len(keys), seed=seed), queries, keys)


def labels(ticklabels):
    return [label.get_text() for label in ticklabels]


@pytest.fixture
def only_default_font(monkeypatch):
    """As on a machine that has no font but the one that comes with matplotlib."""
    faces = {fonts.DEFAULT: fonts._faces()[fonts.DEFAULT]}
    monkeypatch.setattr(fonts, "_faces", lambda: faces)
    monkeypatch.setattr(fonts, "_add_new_fonts", lambda: None)


def test_a_row_per_panel_a_column_per_head_and_one_colour_bar():
    panels = [panel("encoder", heads=3), panel("cross", heads=3, keys=("x", "y", "z"), seed=1)]
    figure = attention_figure(panels, title="Layer 1")
    *maps, bar = figure.axes
    assert [axes.get_title() for axes in maps] == ["head 1", "head 2", "head 3"] * 2
    assert len({axes.get_position().x0 for axes in maps}) == 3
    assert len({axes.get_position().y1 for axes in maps}) == 2
    for axes, shown in zip(maps, [head for p in panels for head in p.weights], strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), shown)
        assert axes.images[0].get_clim() == (0, 1)
    assert bar.get_ylim() == (0, 1)
    assert {"Layer 1", "encoder", "cross"} <= set(labels(figure.texts))


def test_queries_stand_at_the_left_of_the_first_column_and_keys_on_top_of_all():
    first, second, _ = attention_figure([panel(queries=("a", "b", "c"), keys=("x", "Tuesday"))]).axes
    assert labels(first.get_yticklabels()) == ["a", "b", "c"]
    assert labels(second.get_yticklabels()) == []
    for axes in (first, second):
        assert labels(axes.get_xticklabels()) == ["x", "Tuesday"]
        assert axes.transData.transform((0, 0))[1] > axes.transData.transform((0, 2))[1], "the first query is on top"
        assert axes.get_xticklabels()[0].get_window_extent().y0 > axes.get_window_extent().y1


def test_more_than_eight_heads_go_into_lines_of_equal_length():
    def lines(heads):
        tops = [axes.get_position().y1 for axes in attention_figure([panel(heads=heads)]).axes[:-1]]
        return [tops.count(top) for top in sorted(set(tops), reverse=True)]

    assert lines(8) == [8]
    assert lines(12) == [6, 6]
    assert lines(17) == [6, 6, 5]


@pytest.mark.parametrize(("heads", "tokens"), [(1, 1), (3, 13), (1, 40), (1, 60)])
def test_nothing_overlaps_and_nothing_is_clipped(heads, tokens, tmp_path):
    words = [f"{ENGLISH[i % 11]}{'n' * (i % 7)}" for i in range(tokens)]
    figure = attention_figure([panel(heads=heads, queries=words, keys=words)], title="A title wider than small figures")
    figure.draw_without_rendering()
    edge = figure.bbox
    shown = list(figure.texts)
    for axes in figure.axes:
        ticks = [*axes.get_xticklabels(), *axes.get_yticklabels()]
        shown += [axes.title, axes.yaxis.label, *(tick for tick in ticks if tick.get_text())]
    for text in shown:
        box = text.get_window_extent()
        assert edge.x0 <= box.x0 and box.x1 <= edge.x1 and edge.y0 <= box.y0 and box.y1 <= edge.y1, text.get_text()
    for axes in figure.axes[:-1]:
        columns = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert all(left.x1 <= right.x0 for left, right in pairwise(columns))
        assert max(box.y1 for box in columns) <= axes.title.get_window_extent().y0
        rows = [label.get_window_extent() for label in axes.get_yticklabels()]
        assert all(upper.y0 >= lower.y1 - 1 for upper, lower in pairwise(rows))
    assert all(left.get_window_extent().x1 < right.get_window_extent().x0 for left, right in pairwise(figure.axes))
    assert min(label.get_fontsize() for label in figure.axes[0].get_xticklabels()) >= 5


def test_a_very_long_sequence_keeps_to_a_size_that_can_be_written_and_labels_some_of_its_tokens():
    words = [str(i) for i in range(600)]
    figure = attention_figure([panel(heads=1, queries=words, keys=words)])
    assert max(figure.get_size_inches()) < 12
    shown = [int(text) for text in labels(figure.axes[0].get_xticklabels())]
    assert 20 < len(shown) < 300 and shown == list(range(0, 600, shown[1]))


def test_jax_arrays_of_any_precision_are_drawn():
    given = AttentionPanel("cross", jnp.full((1, 2, 2), 0.5, jnp.bfloat16), "ab", "xy")
    assert isinstance(given.weights, np.ndarray) and given.weights.dtype == np.float32
    figure = attention_figure([given])
    np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), np.full((2, 2), 0.5))


def test_dollar_signs_are_not_mathematics_and_spaces_are_seen(tmp_path):
    keys = ("$x^2$", r"$\frac$", " ", "\n", "\u202f4")
    figure = attention_figure([panel(heads=1, keys=keys)], title=r"costs $5 to $\nothing")
    assert labels(figure.axes[0].get_xticklabels()) == ["$x^2$", r"$\frac$", "␣", "⏎", "␣4"]
    save_figure(figure, tmp_path / "a.png")  # matplotlib refuses to draw a wrong formula


def test_missing_characters_are_drawn_as_code_points_with_one_warning(only_default_font, tmp_path):
    with pytest.warns(UserWarning, match="no installed font shows 日 火: .*fonts-noto-cjk") as caught:
        figure = attention_figure([panel("火", queries=("火", "日", "a"), keys=("火日", "b"))], title="火 March")
    assert len(caught) == 1 and caught[0].filename == __file__
    assert labels(figure.axes[0].get_yticklabels()) == ["U+706B", "U+65E5", "a"]
    assert labels(figure.axes[0].get_xticklabels()) == ["U+706B U+65E5", "b"]
    assert {"U+706B March", "U+706B"} <= set(labels(figure.texts))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_figure(figure, tmp_path / "a.png")


def test_a_long_token_is_cut():
    figure = attention_figure([panel(heads=1, keys=("x" * 24, "y" * 1000))])
    assert labels(figure.axes[0].get_xticklabels()) == ["x" * 24, "y" * 23 + "…"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((weights(2, 12, 3), ["q"] * 11, ["k"] * 3), 'panel "cross": weights have 12 queries but 11 query tokens'),
        ((weights(2, 3, 12), ["q"] * 3, ["k"] * 13), 'panel "cross": weights have 12 keys but 13 key tokens'),
        ((weights(3, 3), ["q"] * 3, ["k"] * 3), r"must have shape \[heads, queries, keys\].*not \(3, 3\)"),
        ((np.zeros((2, 0, 3)), [], ["k"] * 3), r"none of them 0, not \(2, 0, 3\)"),
        ((np.full((1, 1, 1), 3.5), ["q"], ["k"]), r"lie in 0\.\.1 but range from 3\.5 to 3\.5; .*after the softmax"),
        ((np.full((1, 1, 1), np.nan), ["q"], ["k"]), r"lie in 0\.\.1"),
    ],
)
def test_weights_that_do_not_fit_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        AttentionPanel("cross", *given)


def test_no_panels_is_an_error():
    with pytest.raises(ValueError, match="panels is empty"):
        attention_figure([])


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG\r\n\x1a\n"), ("a.PDF", b"%PDF-"), ("a.svg", b"<?xml")])
def test_the_suffix_chooses_the_format(name, magic, tmp_path):
    save_figure(attention_figure([panel(heads=1)]), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_another_suffix_is_refused(tmp_path):
    """With a ValueError in research code; a command asks before it computes, and reports a UserError."""
    with pytest.raises(ValueError, match=r'"\.jpg".*use \.png, \.svg or \.pdf'):
        save_figure(attention_figure([panel(heads=1)]), tmp_path / "a.jpg")
    with pytest.raises(UserError, match=r'"\.jpg".*use \.png, \.svg or \.pdf'):
        check_suffix("a.jpg")


def test_a_users_style_is_neither_changed_nor_followed(tmp_path):
    with matplotlib.rc_context({"text.color": "white", "xtick.color": "white", "axes.grid": True}):
        before = matplotlib.rcParams.copy()
        figure = attention_figure([panel(heads=1)], title="t")
        save_figure(figure, tmp_path / "a.png")
        changed = [name for name in before if name != "backend" and matplotlib.rcParams[name] != before[name]]
        assert not changed
    axes = figure.axes[0]
    assert {text.get_color() for text in (*axes.get_xticklabels(), *axes.get_yticklabels())} == {"black"}
    assert not any(line.get_visible() for line in axes.get_xgridlines())


def test_equal_steps_of_weight_look_equal():
    red, green, blue = np.where(
        (c := COLOUR_MAP(np.linspace(0, 1, 11))[:, :3].T) < 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4
    )
    lightness = 116 * np.cbrt(0.2126 * red + 0.7152 * green + 0.0722 * blue) - 16  # CIE L*
    steps = -np.diff(lightness)
    assert lightness[0] == pytest.approx(100)
    assert 0 < steps.max() < 1.5 * steps.min()


def test_positions_are_shown_with_their_dot_products():
    encodings = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    encodings[0, 0] = 3  # more than the least is below 0
    figure = position_figure(jnp.asarray(encodings), title="$\\PE$")
    values, products = (axes.images[0] for axes in figure.axes[:2])
    np.testing.assert_array_equal(values.get_array(), encodings)
    low, high = values.get_clim()
    assert -low == high == 3
    expected = [[sum(a * b for a, b in zip(i, j, strict=True)) for j in encodings] for i in encodings]
    np.testing.assert_allclose(products.get_array(), expected, rtol=1e-5, atol=1e-6)
    figure.draw_without_rendering()


def test_positions_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"encodings must have shape \[length, d_model\].*not \(3,\)"):
        position_figure(np.zeros(3))
