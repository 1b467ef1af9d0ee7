import warnings

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from fontTools.ttLib import TTFont
from matplotlib import font_manager
from matplotlib.figure import Figure

from transformer_jax.visualize import fonts
from transformer_jax.visualize.fonts import Face, font_families, missing_message, sentence, visible


@pytest.fixture
def pretend(monkeypatch):
    """Pretend that these families are installed, each with these characters; returns the list of those looked into."""

    def install(**families: str) -> list[str]:
        characters = {name.replace("_", " "): text for name, text in families.items()}
        opened: list[str] = []

        def shown(face, wanted):
            opened.append(face.path)
            return wanted & set(characters[face.path])

        monkeypatch.setattr(fonts, "_faces", lambda: {name: Face(name, 0) for name in characters})
        monkeypatch.setattr(fonts, "_shown", shown)
        monkeypatch.setattr(fonts, "_add_new_fonts", lambda: None)
        return opened

    return install


def test_other_fonts_are_opened_only_when_the_default_does_not_suffice(pretend):
    opened = pretend(DejaVu_Sans="abc", Noto_Sans_CJK_JP="火", Zapfino="ξ")
    assert font_families("abc") == (["DejaVu Sans"], "")
    assert opened == ["DejaVu Sans"]
    assert font_families("ab火") == (["DejaVu Sans", "Noto Sans CJK JP"], "")
    assert "Zapfino" not in opened
    assert font_families(["ξ", "a"]) == (["DejaVu Sans", "Zapfino"], "")


def test_the_fewest_families_are_taken(pretend):
    pretend(DejaVu_Sans="a", Han="火曜", Kana="かな", Hangul="화", Everything="火曜かな화")
    assert font_families("a火かな") == (["DejaVu Sans", "Everything"], "")
    assert font_families(["火曜", "?"]) == (["DejaVu Sans", "Han"], "?")


def test_characters_that_no_font_has_are_named(pretend):
    pretend(DejaVu_Sans="2025 ␣", Noto_Sans_CJK_JP="年")
    assert font_families(["2025", " ", "年", "火", "曜", "火"]) == (["DejaVu Sans", "Noto Sans CJK JP"], "曜火")


def test_families_agree_with_the_character_maps_of_the_files_matplotlib_draws_with():
    text = "aЖع한日火ꙮम"
    families, missing = font_families(text)
    shown = set()
    for family in families:
        path = font_manager.findfont(family, fallback_to_default=False)
        with TTFont(path, fontNumber=getattr(path, "face_index", 0), lazy=True) as font:
            shown |= {character for character in text if ord(character) in font.getBestCmap()}
    assert shown == set(text) - set(missing)
    assert families[0] == "DejaVu Sans"
    assert {"a", "Ж", "ع"} <= shown


def test_a_font_installed_after_matplotlib_listed_the_fonts_is_found(tmp_path, monkeypatch):
    character = "\U0010ff00"  # for private use: no real font has it
    manager = font_manager.fontManager
    monkeypatch.delenv("MPL_IGNORE_SYSTEM_FONTS", raising=False)
    monkeypatch.setattr(manager, "ttflist", list(manager.ttflist))
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(tmp_path / "new.ttf")])
    (tmp_path / "new.ttf").write_bytes(b"not a font")
    fonts._add_new_fonts.cache_clear()
    assert font_families(character) == (["DejaVu Sans"], character)

    write_font(tmp_path / "new.ttf", "Brand New", character)
    fonts._add_new_fonts.cache_clear()
    families, missing = font_families(character)
    assert (families, missing) == (["DejaVu Sans", "Brand New"], "")
    figure = Figure()
    figure.text(0, 0, character, fontfamily=families)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(tmp_path / "drawn.png")
    fonts._add_new_fonts.cache_clear()


def write_font(path, family, character):
    pen = TTGlyphPen(None)
    for point in ((0, 0), (0, 500), (500, 500)):
        (pen.moveTo if point == (0, 0) else pen.lineTo)(point)
    pen.closePath()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "glyph"])
    builder.setupCharacterMap({ord(character): "glyph"})
    builder.setupGlyf({".notdef": pen.glyph(), "glyph": pen.glyph()})
    builder.setupHorizontalMetrics({".notdef": (600, 0), "glyph": (600, 0)})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": family, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("Tuesday", "Tuesday"),
        (" March", "␣March"),
        ("\u00a0", "␣"),
        ("\u202f", "␣"),
        ("\u3000", "␣"),
        ("a\n", "a⏎"),
        ("\t", "⇥"),
        ("\u200b", "U+200B"),
        ("\x00", "U+0000"),
        ("\ud800", "U+D800"),
        ("火", "U+706B"),
        ("火曜", "U+706B 曜"),
        ("2025火3", "2025 U+706B 3"),
        ("火火", "U+706B U+706B"),
        ("", ""),
    ],
)
def test_a_token_is_drawn_so_that_everything_in_it_is_seen(text, drawn):
    assert visible(text, missing="火") == drawn


def test_every_sign_that_stands_for_something_invisible_is_in_the_default_font():
    assert font_families(" \n\t\u200b") == (["DejaVu Sans"], "")


def test_a_sentence_keeps_its_spaces():
    assert sentence("March 4 → 火 $x$", missing="火") == "March 4 → U+706B $x$"


def test_the_message_says_which_characters_and_what_to_install():
    assert missing_message("曜火").startswith("no installed font shows 曜 火: drawn as code points, such as U+66DC")
    assert "fonts-noto-cjk" in missing_message("曜火")
    assert "fonts-noto-core" in missing_message("म") and "cjk" not in missing_message("म").lower()
    assert "and 5 more" in missing_message("".join(chr(0x4E00 + i) for i in range(25)))
