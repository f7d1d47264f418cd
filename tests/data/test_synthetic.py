"""Dates: every source has one meaning, the meaning is right by a parser of its own, and the splits share no date."""

import importlib.util
import re
import sys
from collections import Counter
from datetime import date, timedelta

import pytest

from tfm_jax.data import synthetic
from tfm_jax.data.synthetic import FIRST_DATE, FORMATS, LANGUAGES, LAST_DATE, dates, language_of, write_date

needs_babel = pytest.mark.skipif(importlib.util.find_spec("babel") is None, reason="needs babel: tfm_jax[demo]")
SIZES = {"train": 4001, "validation": 503, "test": 2003}

GOLDEN = [
    "en: April 3rd, 2021", "en: Saturday, April 3, 2021", "en: Sat, Apr 3, 2021", "en: the 3rd of April 2021",
    "en: 4/3/21", "en: 04/03/2021",
    "de: 3. April 2021", "de: Samstag, den 3. April 2021", "de: 03.04.2021", "de: 3.4.21",
    "fr: samedi 3 avril 2021", "fr: 3 avr. 21", "fr: 03/04/2021",
    "es: sábado, 3 de abril de 2021", "es: 3-abr-21", "es: 3/4/21",
    "it: sabato 3 aprile 2021", "it: sab 3 apr 2021", "it: 3-4-2021",
    "pt: sábado, 3 de abril de 2021", "pt: 3 abr. 2021", "pt: 03-04-2021",
    "nl: zaterdag 3 april 2021", "nl: za 3 apr 2021", "nl: 3-4-21",
    "sv: lördagen den 3 april 2021", "sv: 3/4 2021", "sv: 21-04-03",
    "ru: суббота, 3 апреля 2021 года", "ru: 3 апреля 2021 г.", "ru: 03.04.2021",
    "ja: 2021年4月3日(土)", "ja: 21年4月3日", "ja: 2021/04/03",
]  # fmt: skip

MONTHS = {
    "en": "jan feb mar apr may jun jul aug sep oct nov dec",
    "de": "jan feb mär apr mai jun jul aug sep okt nov dez",
    "fr": "jan fév mars avr mai juin juil août sep oct nov déc",
    "es": "ene feb mar abr may jun jul ago sep oct nov dic",
    "it": "gen feb mar apr mag giu lug ago set ott nov dic",
    "pt": "jan fev mar abr mai jun jul ago set out nov dez",
    "nl": "jan feb m(aa)?rt apr mei jun jul aug sep okt nov dec",
    "sv": "jan feb mar apr maj jun jul aug sep okt nov dec",
    "ru": "янв фев мар апр мая июн июл авг сен окт ноя дек",
}


def parse(source: str) -> str:
    """The ISO date, read from the numbers and the last word that starts as a month does (a weekday comes before it)."""
    language, text = source.lower().split(": ")
    text = text.replace("févr", "fév")
    numbers = re.findall(r"\d+", text)
    if len(numbers) == 2:
        patterns = MONTHS[language].split()
        months = [i for word in re.findall(r"[^\W\d_]+", text) for i, p in enumerate(patterns, 1) if re.match(p, word)]
        day, month, year = numbers[0], months[-1], numbers[1]
    elif language == "ja" or (language == "sv" and "-" in text):
        year, month, day = numbers
    elif language == "en":
        month, day, year = numbers
    else:
        day, month, year = numbers
    if len(year) == 2:
        year = ("20" if int(year) <= 68 else "19") + year
    return date(int(year), int(month), int(day)).isoformat()


@pytest.fixture(scope="module")
def splits():
    pytest.importorskip("babel")
    return dates(**SIZES, seed=7)


def test_sizes_and_names(splits):
    assert {name: len(text) for name, text in splits.items()} == SIZES
    assert splits["train"].names == ("dates/train source", "dates/train target")
    assert splits["test"].where(2002, 1) == "dates/test target:2003"


def test_same_seed_same_text_other_seed_other_text(splits):
    assert dates(**SIZES, seed=7) == splits
    assert dates(**SIZES, seed=8)["test"].source != splits["test"].source


def test_a_smaller_split_is_the_beginning_of_a_larger_one(splits):
    small = dates(train=11, validation=0, test=13, seed=7)
    assert small["train"].source == splits["train"].source[:11] and small["test"].target == splits["test"].target[:13]
    assert len(small["validation"]) == 0


def test_splits_share_no_date():
    pytest.importorskip("babel")
    days = [set(text.target) for text in dates(train=20011, validation=20011, test=20011, seed=7).values()]
    assert not days[0] & days[1] and not days[0] & days[2] and not days[1] & days[2]
    assert all(FIRST_DATE <= date.fromisoformat(day) <= LAST_DATE for day in set.union(*days))


def test_no_source_occurs_twice(splits):
    sources = [source for text in splits.values() for source in text.source]
    assert len(sources) == len({source.lower() for source in sources})


def test_targets_equal_an_independent_parse(splits):
    for text in splits.values():
        assert [parse(source) for source in text.source] == text.target


@needs_babel
@pytest.mark.parametrize("golden", GOLDEN)
def test_golden(golden):
    language = language_of(golden)
    assert golden in {write_date(date(2021, 4, 3), language, pattern) for pattern in FORMATS[language]}
    assert parse(golden) == "2021-04-03"


def test_goldens_cover_every_language():
    assert {language_of(golden) for golden in GOLDEN} == set(LANGUAGES)


@needs_babel
@pytest.mark.parametrize(
    ("day", "ordinal"), [(1, "1st"), (2, "2nd"), (11, "11th"), (12, "12th"), (13, "13th"), (21, "21st"), (23, "23rd")]
)
def test_english_ordinals(day, ordinal):
    assert write_date(date(1999, 5, day), "en", "{MMMM} {ordinal}, {y}") == f"en: May {ordinal}, 1999"


@needs_babel
@pytest.mark.parametrize("language", LANGUAGES)
def test_no_source_means_two_dates_or_comes_from_two_formats(language):
    """Two digits can be taken for a day or month in 2000-2031 only; the first and last year stand for the rest."""
    days = [date(year, 1, 1) + timedelta(i) for year in (1969, *range(2000, 2032), 2068) for i in range(365)]
    sources = {write_date(day, language, pattern).lower() for day in days for pattern in FORMATS[language]}
    assert len(sources) == len(days) * len(FORMATS[language])


def test_languages_and_formats_are_many_and_equally_frequent(splits):
    assert len(LANGUAGES) >= 6 and len({pattern for patterns in FORMATS.values() for pattern in patterns}) >= 20
    assert len({len(patterns) for patterns in FORMATS.values()}) == 1
    counts, expected = Counter(map(language_of, splits["train"].source)), SIZES["train"] / len(LANGUAGES)
    assert set(counts) == set(LANGUAGES) and all(abs(n - expected) < 5 * expected**0.5 for n in counts.values())


def test_some_sources_are_in_lower_case(splits):
    english = [source for source in splits["train"].source if re.match("en: .*[A-Za-z]", source)]
    assert 0.15 < sum(source == source.lower() for source in english) / len(english) < 0.35


@needs_babel
def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="test is -1"):
        dates(train=1, validation=1, test=-1, seed=0)
    with pytest.raises(ValueError, match="test is 10000000: between 0 and"):
        dates(train=1, validation=1, test=10_000_000, seed=0)


@pytest.mark.parametrize("source", ["3. April 2021", "xx: 3. April 2021", "de"])
def test_language_of_refuses_text_without_a_tag(source):
    with pytest.raises(ValueError, match="starts with no language tag"):
        language_of(source)


def test_without_babel_the_error_says_what_to_install(monkeypatch):
    synthetic._names.cache_clear()
    monkeypatch.setitem(sys.modules, "babel", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'tfm_jax[demo]'")):
        dates(train=1, validation=1, test=1, seed=0)
