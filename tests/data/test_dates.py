import pickle
import re
from collections import Counter
from datetime import date, datetime, time
from decimal import Decimal
from functools import partial
from itertools import product

import pytest

from transformer_jax.data.cldr import (
    CURRENCIES,
    DATE_FORMS,
    TIME_FORMS,
    UNIT_FORMS,
    write_date,
    write_number,
    write_time,
    write_unit,
)
from transformer_jax.data.dates import Dates, split_of
from transformer_jax.errors import UserError

LANGUAGES = ("de", "fr", "es", "ja", "zh")
TUESDAY = datetime(2025, 3, 4, 15, 4, 25)


@pytest.fixture(scope="module")
def texts() -> dict[str, list[tuple[str, str, str]]]:
    """The splits at full size and more, as (tag, English, target)."""
    data = Dates(train_size=50_000)
    return {
        name: [(*r["source"].split(" ", 1), r["target"]) for r in data.split(name)]
        for name in ("train", "valid", "test")
    }


def english(records) -> set[str]:
    return {record["source"].split(" ", 1)[1] for record in records}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (
            "full",
            "Dienstag, 4. März 2025|mardi 4 mars 2025|martes, 4 de marzo de 2025|2025年3月4日火曜日|2025年3月4日星期二",
        ),
        ("long", "4. März 2025|4 mars 2025|4 de marzo de 2025|2025年3月4日|2025年3月4日"),
        ("yMMMEd", "Di., 4. März 2025|mar. 4 mars 2025|mar, 4 mar 2025|2025年3月4日(火)|2025年3月4日周二"),
        ("yMd", "4.3.2025|04/03/2025|4/3/2025|2025/3/4|2025/3/4"),
        ("yMMMM", "März 2025|mars 2025|marzo de 2025|2025年3月|2025年3月"),
        ("MMMMd", "4. März|4 mars|4 de marzo|3月4日|3月4日"),
    ],
)
def test_a_known_day_is_written_as_people_write_it(form, expected):
    assert [write_date(form, TUESDAY.date(), language) for language in LANGUAGES] == expected.split("|")


def test_known_times_and_numbers_are_written_as_people_write_them():
    assert write_time("short", TUESDAY, "de") == "15:04"
    assert write_time("datetime", TUESDAY, "de") == "04.03.2025, 15:04:25"
    assert write_number("decimal", Decimal("-1234567.25"), "", "de") == "-1.234.567,25"
    assert write_number("decimal", Decimal("1234.5"), "", "fr") == "1\u202f234,5"
    assert write_number("percent", Decimal("12.5"), "", "de") == "12,5\u00a0%"
    assert write_number("standard", Decimal("1234.5"), "EUR", "de") == "1.234,50\u00a0€"
    assert write_number("name", Decimal(2), "JPY", "ja") == "2円"
    assert write_number("name", Decimal(1), "JPY", "de") == "1 Japanischer Yen"
    assert write_number("name", Decimal(1), "USD", "en") == "1.00 US dollars"


@pytest.mark.parametrize(
    ("unit", "length", "number", "language", "expected"),
    [
        ("duration-month", "long", "1", "de", "1 Monat"),
        ("duration-month", "long", "2", "de", "2 Monate"),
        ("duration-hour", "long", "1.5", "fr", "1,5\u00a0heure"),
        ("duration-hour", "long", "2", "fr", "2\u00a0heures"),
        ("duration-hour", "short", "1", "es", "1 h"),  # no singular of its own in CLDR
        ("length-kilometer", "long", "5", "zh", "5公里"),  # no long name of its own in CLDR
        ("length-kilometer", "long", "2000000", "fr", "2\u202f000\u202f000\u00a0kilomètres"),  # a plural "many"
        ("temperature-celsius", "long", "-3", "ja", "摂氏 -3 度"),
    ],
)
def test_a_unit_agrees_with_its_number(unit, length, number, language, expected):
    assert write_unit(unit, length, Decimal(number), language) == expected


def test_a_language_is_written_alike_whatever_was_written_before():
    september = date(2021, 9, 15)
    assert write_date("MMMEd", september, "ar").endswith("15 سبتمبر")
    assert write_date("MMMEd", september, "ar_MA").endswith("15 شتنبر")  # Morocco, where months have French names


def readings():
    """Every form of every kind, over all months and kinds of plural: what is said, and the function that writes it."""
    days = [date(year, month, day) for year in (1925, 2025) for month in range(1, 13) for day in (1, 4, 12)]
    for form, day in product(DATE_FORMS, days):
        weekday = day.weekday() if form in ("full", "yMMMEd", "yMEd", "MMMEd") else None
        yield (form, str(day)[DATE_FORMS[form]], weekday), partial(write_date, form, day)
    clocks = [time(hour, minute, second) for hour in (0, 3, 12, 15) for minute in (0, 4) for second in (0, 9)]
    for form, day, clock in product(TIME_FORMS, days[::3], clocks):
        said = (form, str(clock)[TIME_FORMS[form]], day if form == "datetime" else None)
        yield said, partial(write_time, form, datetime.combine(day, clock))
    numbers = [Decimal(n) for n in (0, 1, -1, 2, 3, 5, 11, 12, 21, 22, 100, 101, 1234, 99999)]
    fractions = [Decimal(text) for text in ("0.5", "1.5", "-1234.5")]
    for form, number in product(("decimal", "percent"), numbers + fractions):
        yield (form, number), partial(write_number, form, number, "")
    for form, number, currency in product(("standard", "name"), numbers, CURRENCIES):
        yield (form, number, currency), partial(write_number, form, number, currency)
    for (unit, length), number in product(UNIT_FORMS, numbers + fractions):
        yield (unit, length, number), partial(write_unit, unit, length, number)


def test_no_english_text_has_two_readings():
    said = {}
    for meaning, write in readings():
        assert said.setdefault(write("en"), meaning) == meaning


@pytest.mark.parametrize("language", [*LANGUAGES, "ru", "ko", "ar", "hi", "pt_BR"])
def test_a_text_and_a_language_have_one_translation_in_every_form(language):
    translations = {}
    for _, write in readings():
        target = write(language)
        assert target and translations.setdefault(write("en"), target) == target


def test_a_source_has_one_target(texts):
    targets = {}
    for tag, text, target in texts["train"] + texts["valid"] + texts["test"]:
        assert targets.setdefault((tag, text), target) == target


def test_the_splits_share_no_text_in_any_language_or_seed(texts):
    train, valid, test = ({text for _, text, _ in texts[name]} for name in ("train", "valid", "test"))
    assert not train & valid and not train & test and not valid & test
    assert not train & english(Dates(seed=7, languages=("ru",)).split("test"))


def test_the_splits_share_no_value_in_any_form(texts):
    """Read back by hand what the texts say: days, amounts of US dollars, kilometers."""
    months = {date(2025, month, 1).strftime("%b"): month for month in range(1, 13)}
    spelt = re.compile(r"\b([A-Z][a-z]{2})[a-z]* (\d+), (\d{4})")
    figures = re.compile(r"\b(\d+)/(\d+)/(\d{4})$")
    amounts = re.compile(r"(-?)\$([\d.,]+)|(-?)([\d.,]+) (?:US dollars?)")
    lengths = re.compile(r"([\d.,]+) (?:kilometers?|km)$")

    def values(name):
        for _, text, _ in texts[name]:
            if match := spelt.search(text):
                yield int(match[3]), months[match[1]], int(match[2])
            elif match := figures.search(text):
                yield int(match[3]), int(match[1]), int(match[2])
            elif match := amounts.fullmatch(text):
                yield "USD", "".join(part or "" for part in match.groups())
            elif match := lengths.fullmatch(text):
                yield "km", match[1]

    train, valid, test = set(values("train")), set(values("valid")), set(values("test"))
    assert len(train) > 8_000 and len(test) > 250
    assert not train & valid and not train & test and not valid & test


def test_a_twentieth_of_the_values_is_for_each_of_valid_and_test():
    counts = Counter(split_of(str(date.fromordinal(700_000 + day))) for day in range(20_000))
    assert counts["train"] + counts["valid"] + counts["test"] == 20_000
    assert 900 < counts["valid"] < 1100 and 900 < counts["test"] < 1100


def test_singulars_are_frequent_in_training_and_only_there(texts):
    train, held_out = ({text for _, text, _ in texts[name] if text.startswith("1 ")} for name in ("train", "test"))
    assert {"1 foot", "1 mile per hour", "1 degree Celsius", "1 day", "1 hr"} <= train
    assert {write_unit(*form, Decimal(1), "en") for form in UNIT_FORMS if form[1] == "long"} <= train
    assert 1_000 < sum(text.startswith("1 ") for _, text, _ in texts["train"]) < 1_800  # of 12,500 units
    assert not held_out


def test_languages_kinds_and_lengths_of_numbers_are_balanced(texts):
    tags = Counter(tag for tag, _, _ in texts["train"])
    assert set(tags) == {"<de>", "<fr>", "<es>", "<ja>", "<zh>"} and all(9_500 < n < 10_500 for n in tags.values())
    assert 12_000 < sum(text.endswith(("AM", "PM")) for _, text, _ in texts["train"]) < 13_000  # one kind in four
    integers = Counter(len(text.replace(",", "")) for _, text, _ in texts["train"] if re.fullmatch("[0-9,]+", text))
    assert set(integers) == set(range(1, 8)) and max(integers.values()) < 3 * min(integers.values())


def test_a_source_has_plain_spaces_and_a_target_those_of_cldr(texts):
    sources = {character for _, text, _ in texts["test"] for character in text if character.isspace()}
    targets = {character for _, _, text in texts["test"] for character in text if character.isspace()}
    assert sources == {" "} and targets == {" ", "\u00a0", "\u202f"}
    assert any(re.fullmatch(r"\d+:\d\d [AP]M", text) for _, text, _ in texts["test"])


def test_an_example_is_fixed_by_the_fields_the_split_and_its_index():
    data = Dates()
    first = ["<fr> 5:29 AM", "<de> Oct 22, 1981, 10:01:10 AM", "<ja> 2:11 AM"]  # in every process and Python version
    assert [record["source"] for record in data.split("train")[:3]] == first
    assert data.split("test")[1234] == pickle.loads(pickle.dumps(data.split("test")))[1234]
    assert data.split("train")[7] == Dates(train_size=8, test_size=0).split("train")[7]
    assert data.split("train")[:20] != Dates(seed=1).split("train")[:20]


def test_a_split_is_a_sequence():
    split = Dates(train_size=5).split("train")
    assert len(split) == len(list(split)) == 5
    assert split[-1] == split[4] == split[3:][1]
    with pytest.raises(IndexError):
        split[5]


def test_kinds_choose_what_is_translated():
    times = english(Dates(kinds=("time",), train_size=50).split("train"))
    assert all(re.search(r"\d+:\d\d(:\d\d)? [AP]M$", text) for text in times)


def test_a_prompt_begins_with_a_tag():
    data = Dates(languages=("pt_BR", "ko"))
    assert data.tags() == ("<pt_BR>", "<ko>")
    assert data.prompt("March 4") == "<pt_BR> March 4"
    assert data.prompt("<ko> March 4") == "<ko> March 4"
    assert data.prompt("<de> March 4") == "<pt_BR> <de> March 4"
    assert data.prompt("<ko>March 4") == "<pt_BR> <ko>March 4"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"languages": ()}, "languages is empty"),
        ({"languages": ("de", "xx")}, "languages has 'xx'.*such as 'de'"),
        ({"languages": ("pt-BR",)}, "languages has 'pt-BR'.*'pt_BR'"),
        ({"languages": ("de", "de")}, "languages=.*twice"),
        ({"kinds": ("date", "poem")}, "kinds=.*'poem'.*date, time, number, unit"),
        ({"kinds": ()}, r"kinds=\(\)"),
        ({"valid_size": -1}, "valid_size=-1"),
    ],
)
def test_a_field_that_cannot_be_is_named(fields, message):
    with pytest.raises(UserError, match=message):
        Dates(**fields)


def test_an_unknown_split_is_named():
    with pytest.raises(UserError, match=r"'dev'.*train, valid, test"):
        Dates().split("dev")
