"""How languages write dates, times, numbers and units: Unicode CLDR, by way of Babel."""

from copy import deepcopy
from datetime import date, datetime, time
from decimal import Decimal
from functools import cache

from babel import Locale, UnknownLocaleError
from babel.dates import format_date, format_datetime, format_skeleton, format_time
from babel.numbers import format_currency, format_decimal, format_percent, get_currency_precision

from transformer_jax.errors import UserError

# CLDR's name of a form, and the part of YYYY-MM-DD it shows. Not here: two-digit years, whose century is a guess, and
# forms that English tells from one of these by the abbreviated month alone, for "May" has no abbreviation.
YEAR_MONTH_DAY, YEAR_MONTH, MONTH_DAY = slice(0, 10), slice(0, 7), slice(5, 10)
DATE_FORMS = {
    "full": YEAR_MONTH_DAY,  # Tuesday, March 4, 2025
    "long": YEAR_MONTH_DAY,  # March 4, 2025
    "yMMMEd": YEAR_MONTH_DAY,  # Tue, Mar 4, 2025
    "yMEd": YEAR_MONTH_DAY,  # Tue, 3/4/2025
    "yMd": YEAR_MONTH_DAY,  # 3/4/2025
    "yMMMM": YEAR_MONTH,  # March 2025
    "yM": YEAR_MONTH,  # 3/2025
    "MMMMd": MONTH_DAY,  # March 4
    "MMMEd": MONTH_DAY,  # Tue, Mar 4
    "Md": MONTH_DAY,  # 3/4
}
FIRST_DAY, LAST_DAY = date(1900, 1, 1), date(2099, 12, 31)

# The same for times and HH:MM:SS: 3:04 PM; 3:04:25 PM; Mar 4, 2025, 3:04:25 PM.
TIME_FORMS = {"short": slice(0, 5), "medium": slice(0, 8), "datetime": slice(0, 8)}

NUMBER_FORMS = ("decimal", "percent", "standard", "name")  # -1,234.5; 12.5%; $3.50; 3.50 US dollars
CURRENCIES = ("USD", "EUR", "GBP", "JPY", "CNY", "INR")

UNITS = {
    "duration": ("second", "minute", "hour", "day", "week", "month", "year"),
    "length": ("centimeter", "meter", "kilometer", "foot", "mile"),
    "mass": ("gram", "kilogram", "pound"),
    "speed": ("kilometer-per-hour", "mile-per-hour"),
    "temperature": ("celsius", "fahrenheit"),
    "volume": ("milliliter", "liter"),
    "digital": ("megabyte", "gigabyte"),
}
UNIT_FORMS = [
    (f"{measure}-{unit}", length) for measure in UNITS for unit in UNITS[measure] for length in ("long", "short")
]
UNIT_FORMS.remove(("duration-day", "short"))  # "5 days" in English, as the long form is, but not so in other languages


@cache
def locale_of(language: str) -> Locale:
    """CLDR's data for a language, as a copy: up to 2.18 Babel's locales overwrite each other's (python-babel#1234)."""
    try:
        locale = Locale.parse(language)
    except (UnknownLocaleError, ValueError) as error:
        raise UserError(f"languages has {language!r}, no CLDR locale; use one such as 'de' or 'pt_BR'") from error
    _ = locale._data  # Babel reads it on first use, which must come before the copy
    return deepcopy(locale)


def write_date(form: str, day: date, language: str) -> str:
    """The day in one of `DATE_FORMS`."""
    if form in ("full", "long"):
        return format_date(day, form, locale_of(language))
    return format_skeleton(form, datetime.combine(day, time()), fuzzy=False, locale=locale_of(language))


def write_time(form: str, moment: datetime, language: str) -> str:
    """The time of day in one of `TIME_FORMS`, the last of which has the date too."""
    if form == "datetime":
        return format_datetime(moment, "medium", locale=locale_of(language))
    return format_time(moment, form, locale=locale_of(language))


def write_number(form: str, number: Decimal, currency: str, language: str) -> str:
    """The number, percentage or amount of money in one of `NUMBER_FORMS`."""
    locale = locale_of(language)
    if form == "decimal":
        return format_decimal(number, locale=locale)
    if form == "percent":
        return format_percent(number.scaleb(-2), locale=locale, decimal_quantization=False)
    amount = round(number, get_currency_precision(currency))  # 1.00 is a plural in English, where 1 is not
    return format_currency(amount, currency, locale=locale, format_type="name" if form == "name" else "standard")


def write_unit(unit: str, length: str, number: Decimal, language: str) -> str:
    """So much of a unit, its name "long" or "short", in the plural form that goes with the number."""
    locale = locale_of(language)
    pattern = _unit_pattern(unit, length, locale.plural_form(number), language)
    return pattern.format(format_decimal(number, locale=locale))


@cache
def _unit_pattern(unit: str, length: str, plural: str, language: str) -> str:
    # What CLDR leaves out is inherited, from the plural form "other" and then from the short name. Up to 2.18 Babel's
    # format_unit does not know this (python-babel#1217) and writes "1 horas" or "5 length-kilometer".
    lengths = locale_of(language)._data["unit_patterns"][unit]
    candidates = [lengths.get(name, {}).get(form) for name in (length, "short") for form in (plural, "other")]
    return next(pattern for pattern in candidates if pattern)
