"""Fonts that show tokens of any script, and what is drawn instead of characters that no installed font has."""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

DEFAULT = "DejaVu Sans"  # comes with matplotlib, so it is always there

# Complete, well-drawn families for Chinese, Japanese and Korean, tried before every font of the system is opened.
PREFERRED = (
    *("Noto Sans CJK JP", "Noto Sans JP", "Source Han Sans JP", "Source Han Sans", "Noto Sans CJK SC", "Noto Sans SC"),
    *("Source Han Sans SC", "Noto Sans CJK TC", "Noto Sans TC", "Noto Sans CJK KR", "Noto Sans KR"),
    *("Hiragino Sans", "Hiragino Kaku Gothic Pro", "Yu Gothic", "Meiryo", "MS Gothic", "IPAexGothic", "IPAGothic"),
    *("TakaoGothic", "VL Gothic", "PingFang SC", "Hiragino Sans GB", "Microsoft YaHei", "SimHei"),
    *("WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans Fallback", "PingFang TC", "Microsoft JhengHei"),
    *("Apple SD Gothic Neo", "Malgun Gothic", "NanumGothic", "Arial Unicode MS"),
)

# These claim characters that they do not draw: TeX's encodings, fragments of brackets, boxes and blanks.
_NOT_TEXT = re.compile(r"cm[a-z]+10|STIX(NonUnicode|Size).*|Last ?Resort.*|Adobe ?Blank.*|\..*")

_SIGNS = {"\n": "⏎", "\t": "⇥"}
_INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_CJK = re.compile(
    "[\u1100-\u11ff\u2e80-\ua4cf\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\ufe30-\uffef\U0001b000-\U0003ffff]"
)


@dataclass(frozen=True)
class Face:
    """One face of a font file: a .ttc holds several."""

    path: str
    index: int


def font_families(text: str | Iterable[str]) -> tuple[list[str], str]:
    """Font families that together show `text`, and the characters that no installed font shows.

    DejaVu Sans comes first, then as few others as it takes; matplotlib looks through such a list glyph by glyph.
    Fonts other than DejaVu Sans are opened only when it does not suffice.
    """
    missing = {character for piece in text for character in visible(piece)}
    families = [DEFAULT]
    for faces in _candidates():
        shown = {family: _shown(face, frozenset(missing)) for family, face in faces.items()}
        while any(missing & characters for characters in shown.values()):
            best = max(shown, key=lambda family: len(missing & shown[family]))
            missing -= shown.pop(best)
            families.append(best)
        if not missing:
            break
    return list(dict.fromkeys(families)), "".join(sorted(missing))


def visible(text: str, missing: str = "") -> str:
    """`text` as it can be drawn: a space as "␣", a newline as "⏎", the invisible and the `missing` as code points."""
    drawn = ""
    for character in text:
        category = unicodedata.category(character)
        if category == "Zs" or character in _SIGNS:
            drawn += _SIGNS.get(character, "␣")
        elif category in _INVISIBLE or "\ufe00" <= character <= "\ufe0f" or character in missing:
            drawn += f" U+{ord(character):04X} "
        else:
            drawn += character
    return drawn.replace("  ", " ").strip()


def sentence(text: str, missing: str = "") -> str:
    """`text` as it can be drawn, its spaces left as they are: for titles."""
    return " ".join(visible(word, missing) for word in text.split(" "))


def missing_message(missing: str) -> str:
    """The warning for a user whose fonts do not show the characters in `missing`."""
    cjk = _CJK.search(missing)
    package = "fonts-noto-cjk" if cjk else "fonts-noto-core"
    font = "any Noto CJK font" if cjk else "the Noto font of that script"
    listed = " ".join(missing[:20]) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
    return (
        f"no installed font shows {listed}: drawn as code points, such as U+{ord(missing[0]):04X}. "
        f"To see them, install {package} (Debian, Ubuntu) or {font} (fonts.google.com/noto) and run again."
    )


def _candidates() -> Iterator[dict[str, Face]]:
    """The families to search, the faster ones first."""
    faces = _faces()
    yield {family: faces[family] for family in (DEFAULT,) if family in faces}
    yield {family: faces[family] for family in PREFERRED if family in faces}
    yield faces
    _add_new_fonts()
    yield _faces()


def _faces() -> dict[str, Face]:
    """The face matplotlib draws each family with: the preferred families first, then upright sans-serif ones."""
    manager = font_manager.fontManager
    best: dict[str, tuple[float, Face]] = {}
    for entry in manager.ttflist:
        if _NOT_TEXT.fullmatch(entry.name):
            continue
        score = (
            manager.score_style("normal", entry.style)
            + manager.score_variant("normal", entry.variant)
            + manager.score_weight("normal", entry.weight)
            + manager.score_stretch("normal", entry.stretch)
        )
        if entry.name not in best or score < best[entry.name][0]:
            # matplotlib 3.10 knows the first face of a file only.
            best[entry.name] = score, Face(entry.fname, getattr(entry, "index", 0))

    def rank(family: str) -> tuple[int, float, bool, str]:
        preference = PREFERRED.index(family) if family in PREFERRED else len(PREFERRED)
        return preference, best[family][0], "Sans" not in family, family

    return {family: best[family][1] for family in sorted(best, key=rank)}


@lru_cache(maxsize=4096)
def _shown(face: Face, characters: frozenset[str]) -> frozenset[str]:
    """Those of `characters` that the face has a glyph for."""
    try:
        font = FT2Font(face.path, face_index=face.index) if face.index else FT2Font(face.path)
        if not font.scalable:  # coloured emoji are bitmaps, which matplotlib does not draw
            return frozenset()
        return frozenset(character for character in characters if font.get_char_index(ord(character)))
    except (OSError, RuntimeError):  # an unreadable file: another font may do
        return frozenset()


@cache
def _add_new_fonts() -> None:
    """Add to matplotlib's list, kept on disk, the fonts that were installed since it was written."""
    known = {entry.fname for entry in font_manager.fontManager.ttflist}
    for path in sorted(set(font_manager.findSystemFonts()) - known):
        try:
            font_manager.fontManager.addfont(path)
        except (OSError, RuntimeError):
            continue
