"""Text that is made, not downloaded: dates as people write them, to be translated to ISO 8601."""

import functools
from datetime import date

import numpy as np

from tfm_jax.data.sources import Text, parallel

FIRST_DATE, LAST_DATE = date(1969, 1, 1), date(2068, 12, 31)
"""A hundred years, so that two digits name one exactly: 69-99 are 19xx, 00-68 are 20xx (pivot of POSIX strptime)."""

FORMATS = {
    "en": (
        "{MMMM} {ordinal}, {y}",
        "{EEEE}, {MMMM} {d}, {y}",
        "{E}, {MMM} {d}, {y}",
        "{d} {MMM} {y}",
        "the {ordinal} of {MMMM} {y}",
        "{MM}/{dd}/{y}",
        "{M}/{d}/{yy}",
    ),
    "de": (
        "{d}. {MMMM} {y}",
        "{EEEE}, {d}. {MMMM} {y}",
        "{EEEE}, den {d}. {MMMM} {y}",
        "{E}, {d}. {MMM} {y}",
        "{d}. {MMM} {yy}",
        "{dd}.{MM}.{y}",
        "{d}.{M}.{yy}",
    ),
    "fr": (
        "{ordinal} {MMMM} {y}",
        "{EEEE} {ordinal} {MMMM} {y}",
        "le {ordinal} {MMMM} {y}",
        "{E} {ordinal} {MMM} {y}",
        "{ordinal} {MMM} {yy}",
        "{dd}/{MM}/{y}",
        "{d}/{M}/{yy}",
    ),
    "es": (
        "{d} de {MMMM} de {y}",
        "{EEEE}, {d} de {MMMM} de {y}",
        "{d} de {MMMM} del {y}",
        "{E}, {d} {MMM} {y}",
        "{d}-{MMM}-{yy}",
        "{dd}/{MM}/{y}",
        "{d}/{M}/{yy}",
    ),
    "it": (
        "{ordinal} {MMMM} {y}",
        "{EEEE} {ordinal} {MMMM} {y}",
        "{E} {d} {MMM} {y}",
        "{d} {MMM} {yy}",
        "{d}-{M}-{y}",
        "{dd}/{MM}/{y}",
        "{d}/{M}/{yy}",
    ),
    "pt": (
        "{ordinal} de {MMMM} de {y}",
        "{EEEE}, {ordinal} de {MMMM} de {y}",
        "{E}, {d} de {MMM} de {y}",
        "{d} {MMM} {y}",
        "{dd}-{MM}-{y}",
        "{dd}/{MM}/{y}",
        "{d}/{M}/{yy}",
    ),
    "nl": (
        "{d} {MMMM} {y}",
        "{EEEE} {d} {MMMM} {y}",
        "{E} {d} {MMM} {y}",
        "{d} {MMM} {yy}",
        "{dd}-{MM}-{y}",
        "{d}-{M}-{yy}",
        "{d}/{M}/{y}",
    ),
    "sv": (
        "{d} {MMMM} {y}",
        "{EEEE} {d} {MMMM} {y}",
        "{EEEE}en den {d} {MMMM} {y}",
        "{E} {d} {MMM} {y}",
        "{d}/{M} {y}",
        "{y}-{MM}-{dd}",
        "{yy}-{MM}-{dd}",
    ),
    "ru": (
        "{d} {MMMM} {y} г.",
        "{EEEE}, {d} {MMMM} {y} года",
        "{d} {MMMM} {y}",
        "{E}, {d} {MMM} {y}",
        "{d} {MMM} {yy}",
        "{dd}.{MM}.{y}",
        "{d}.{M}.{yy}",
    ),
    "ja": (
        "{y}年{M}月{d}日",
        "{y}年{M}月{d}日({E})",
        "{y}年{M}月{d}日{EEEE}",
        "{yy}年{M}月{d}日",
        "{y}/{MM}/{dd}",
        "{yy}/{M}/{d}",
        "{y}.{M}.{d}",
    ),
}
"""By language, what to fill in: the fields of CLDR's date patterns (M and MM in digits, MMM short and MMMM full month,
E short and EEEE full weekday, y four and yy two digits of the year) and `ordinal`. All languages have equally many, so
that a uniform draw of formats is one of languages too. No two formats of a language write the same, lower case or not.
"""

LANGUAGES = tuple(FORMATS)
_FORMATS = tuple((language, pattern) for language, patterns in FORMATS.items() for pattern in patterns)
_FIRST_OF_MONTH = {"fr": "1er", "it": "1º", "pt": "1º"}
_LOWERCASED = 0.25
_SPLITS = {"train": 0.8, "validation": 0.1, "test": 0.1}


def dates(*, train: int, validation: int, test: int, seed: int) -> dict[str, Text]:
    """Pairs such as `de: 3. April 2021` -> `2021-04-03`; the arguments are the number of pairs in each split.

    A source starts with its language, as 4/3/21 alone could be April or March. A quarter of them is in lower case.
    The dates run from 1969-01-01 to 2068-12-31, so that a year of two digits is exact (FIRST_DATE); each belongs to one
    split (80, 10 and 10 percent of the dates). In a split dates and formats are drawn uniformly and no source occurs
    twice. A split depends on the seed and its own size alone, and a smaller one is the beginning of a larger one. The
    names of months and days are those of the installed version of babel (Unicode CLDR).

    Raises ImportError without babel, ValueError if a size is negative or exceeds the number of sources there are.
    """
    days = 1 + LAST_DATE.toordinal() - FIRST_DATE.toordinal()
    shuffled = FIRST_DATE.toordinal() + np.random.default_rng([seed, 0]).permutation(days)
    bounds = np.round(np.cumsum(list(_SPLITS.values()))[:-1] * days).astype(int)
    splits = zip(_SPLITS, (train, validation, test), np.split(shuffled, bounds), strict=True)
    return {
        name: _split(name, size, ordinals, np.random.default_rng([seed, number]))
        for number, (name, size, ordinals) in enumerate(splits, start=1)
    }


def _split(name: str, size: int, ordinals: np.ndarray, rng: np.random.Generator) -> Text:
    most = len(ordinals) * len(_FORMATS)
    if not 0 <= size <= most:
        raise ValueError(f"dates: {name} is {size}: between 0 and {most} different sources can be made from its dates")
    pairs, lowercased = rng.permutation(most)[:size].tolist(), rng.random(most) < _LOWERCASED
    days = [date.fromordinal(int(ordinals[pair // len(_FORMATS)])) for pair in pairs]
    source = [write_date(day, *_FORMATS[pair % len(_FORMATS)]) for day, pair in zip(days, pairs, strict=True)]
    return parallel(
        [text.lower() if lower else text for text, lower in zip(source, lowercased[:size], strict=True)],
        [day.isoformat() for day in days],
        f"dates/{name} source",
        f"dates/{name} target",
    )


def write_date(day: date, language: str, pattern: str) -> str:
    """The day in one of FORMATS[language], after its tag: `en: April 3rd, 2021`. ImportError without babel."""
    short_months, months, short_weekdays, weekdays = _names(language)
    fields = {
        "d": day.day,
        "dd": f"{day.day:02}",
        "ordinal": _ordinal(day.day, language),
        "M": day.month,
        "MM": f"{day.month:02}",
        "MMM": short_months[day.month],
        "MMMM": months[day.month],
        "E": short_weekdays[day.weekday()],
        "EEEE": weekdays[day.weekday()],
        "y": day.year,
        "yy": f"{day.year % 100:02}",
    }
    return f"{language}: {pattern.format_map(fields)}"


def language_of(source: str) -> str:
    """The language whose tag starts the source (`de: 3. April 2021` -> `de`). ValueError if it is none of LANGUAGES."""
    language, colon, _ = source.partition(": ")
    if not colon or language not in LANGUAGES:
        raise ValueError(f"{source!r} starts with no language tag: write one of {', '.join(LANGUAGES)} and `: `")
    return language


def _ordinal(day: int, language: str) -> str:
    if language == "en":
        return f"{day}{'th' if 11 <= day <= 13 else {1: 'st', 2: 'nd', 3: 'rd'}.get(day % 10, 'th')}"
    return _FIRST_OF_MONTH.get(language, "1") if day == 1 else str(day)


@functools.cache
def _names(language: str) -> tuple:
    try:
        from babel import Locale
    except ImportError as error:
        raise ImportError("dates: the names of months and days come from babel: pip install 'tfm_jax[demo]'") from error
    locale = Locale.parse(language)
    kinds = (locale.months["format"], locale.days["format"])
    return tuple(kind[width] for kind in kinds for width in ("abbreviated", "wide"))
