"""The embedded data set: English dates, times, numbers and units, and how other languages write them.

Both sides are written from Unicode CLDR: real strings, without end, without a network. Two properties make a fair task
of it. The forms are chosen so that no English text has two readings, hence a source has one target. And values are held
out, not texts: a date of the test split is in no other split, whatever the form and the language.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from functools import partial
from random import Random
from typing import Literal, TypeVar

from babel.numbers import get_currency_precision

from transformer_jax.data.cldr import (
    CURRENCIES,
    DATE_FORMS,
    FIRST_DAY,
    LAST_DAY,
    NUMBER_FORMS,
    TIME_FORMS,
    UNIT_FORMS,
    YEAR_MONTH_DAY,
    locale_of,
    write_date,
    write_number,
    write_time,
    write_unit,
)
from transformer_jax.data.source import Lazy, Record, Source, Split, check_split
from transformer_jax.errors import UserError

Kind = Literal["date", "time", "number", "unit"]
Writer = Callable[[str], str]
T = TypeVar("T")

PLAIN_SPACES = str.maketrans("\u00a0\u202f", "  ")  # nobody types the no-break spaces that CLDR writes


def split_of(value: str) -> Split:
    """The split that a value belongs to, whatever the seed, language and form: 5 % valid, 5 % test, the rest train."""
    if value.startswith("1 "):  # "foot" goes with no other number: held out, it would be a word never seen
        return "train"
    bucket = int.from_bytes(hashlib.blake2b(value.encode(), digest_size=4).digest(), "big") % 20
    return "test" if bucket == 0 else "valid" if bucket == 1 else "train"


def _below(rng: Random, bound: int) -> int:
    return int(rng.random() * bound)  # random() is all of Random that Python promises to keep as it is


def _pick(rng: Random, choices: Sequence[T]) -> T:
    return choices[_below(rng, len(choices))]


def _sample(split: Split, sample: Callable[[], T], value: Callable[[T], str]) -> T:
    """The first sample whose value belongs to the split."""
    while split_of(value(sampled := sample())) != split:
        pass
    return sampled


def _day(rng: Random, split: Split, shown: slice) -> date:
    first, last = FIRST_DAY.toordinal(), LAST_DAY.toordinal()
    return _sample(split, lambda: date.fromordinal(first + _below(rng, last - first + 1)), lambda day: str(day)[shown])


def _clock(rng: Random, split: Split, shown: slice) -> time:
    return _sample(split, lambda: time(_below(rng, 24), _below(rng, 60), _below(rng, 60)), lambda now: str(now)[shown])


def _quantity(rng: Random, split: Split, what: str, digits: int, decimals: int, signed: bool = True) -> Decimal:
    """A number of up to so many digits, any length as likely as another, that is held out together with its `what`."""

    def sample() -> Decimal:
        number = Decimal(_below(rng, 10 ** (1 + _below(rng, digits)))).scaleb(-decimals)
        number = -number if signed and _below(rng, 5) == 0 else number
        return Decimal(f"{number.normalize():f}")  # 5.0 and 5 are one value

    return _sample(split, sample, lambda number: f"{number} {what}")


def _date(rng: Random, split: Split) -> Writer:
    form = _pick(rng, list(DATE_FORMS))
    return partial(write_date, form, _day(rng, split, DATE_FORMS[form]))


def _time(rng: Random, split: Split) -> Writer:
    form = _pick(rng, list(TIME_FORMS))
    clock = _clock(rng, split, TIME_FORMS[form])
    day = _day(rng, split, YEAR_MONTH_DAY) if form == "datetime" else FIRST_DAY
    return partial(write_time, form, datetime.combine(day, clock))


def _number(rng: Random, split: Split) -> Writer:
    form, currency = _pick(rng, NUMBER_FORMS), _pick(rng, CURRENCIES)
    cents = get_currency_precision(currency)
    if form == "decimal":
        number = _quantity(rng, split, form, digits=7, decimals=_below(rng, 4))
    elif form == "percent":
        number = _quantity(rng, split, form, digits=4, decimals=_below(rng, 3))
    else:
        number = _quantity(rng, split, currency, digits=5 + cents, decimals=cents)
    return partial(write_number, form, number, currency)


def _unit(rng: Random, split: Split) -> Writer:
    unit, length = _pick(rng, UNIT_FORMS)
    if split == "train" and _below(rng, 10) == 0:  # one number among thousands, but a form of its own: the singular
        return partial(write_unit, unit, length, Decimal(1))
    signed = unit.startswith("temperature")
    return partial(write_unit, unit, length, _quantity(rng, split, unit, 4, _below(rng, 2), signed))


WRITERS = {"date": _date, "time": _time, "number": _number, "unit": _unit}


@dataclass(frozen=True)
class Dates(Source[Record]):
    """English dates, times, numbers and units beside their form in another language, from Unicode CLDR."""

    languages: tuple[str, ...] = ("de", "fr", "es", "ja", "zh")
    """CLDR locales to translate into, such as de, pt_BR or zh_Hant; a source begins with a tag of one, as <de>."""
    kinds: tuple[Kind, ...] = ("date", "time", "number", "unit")
    """Kinds of text to translate, each as frequent as another."""
    train_size: int = 40_000
    """Number of examples to train on."""
    valid_size: int = 1_000
    """Number of examples to evaluate on during the training."""
    test_size: int = 2_000
    """Number of examples to evaluate the trained model on."""
    seed: int = 0
    """Seed of the examples that are generated; which values are held out does not depend on it."""

    def __post_init__(self) -> None:
        if not self.languages:
            raise UserError("languages is empty; name at least one CLDR locale, such as 'de'")
        if len(set(self.languages)) < len(self.languages):
            raise UserError(f"languages={self.languages} names a locale twice; name each once")
        for language in self.languages:
            locale_of(language)
        if not self.kinds or not set(self.kinds) <= set(WRITERS):
            raise UserError(f"kinds={self.kinds} is not one or more of {', '.join(WRITERS)}; choose among these")
        for size in ("train_size", "valid_size", "test_size"):
            if getattr(self, size) < 0:
                raise UserError(f"{size}={getattr(self, size)} is negative; give 0 or more examples")

    def split(self, name: Split) -> Sequence[Record]:
        """The examples of "train", "valid" or "test", each made when it is asked for."""
        check_split(name)
        return _Examples(self, name, getattr(self, f"{name}_size"))

    def tags(self) -> tuple[str, ...]:
        """The special token of each language, which begins a source."""
        return tuple(f"<{language}>" for language in self.languages)

    def prompt(self, text: str) -> str:
        """The source for a text: as it is where it begins with a tag, else behind the tag of the first language."""
        tags = self.tags()
        return text if text.startswith(tuple(f"{tag} " for tag in tags)) else f"{tags[0]} {text}"


@dataclass(frozen=True)
class _Examples(Lazy[Record]):
    data: Dates
    name: Split
    size: int

    def __len__(self) -> int:
        return self.size

    def item(self, index: int) -> Record:
        rng = Random(f"{self.data.seed}/{self.name}/{index}")
        language, kind = _pick(rng, self.data.languages), _pick(rng, self.data.kinds)
        write = WRITERS[kind](rng, self.name)
        english = write("en").translate(PLAIN_SPACES)
        return {"source": f"<{language}> {english}", "target": write(language)}
