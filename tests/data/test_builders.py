"""Data sets of TensorFlow Datasets without TensorFlow: names, splits, features, Multi30k, and what is refused (B44)."""

import contextlib
import dataclasses
import gzip
import hashlib
import json
import re
import shutil
import sys
import types

import numpy as np
import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download import downloader

from tfm_jax.data import builders
from tfm_jax.data.builders import Multi30k, read_tfds

COUNTS = {  # split of ours: (name of its files, lines)
    "train": ("train", 7),
    "validation": ("val", 5),
    "test_2016_flickr": ("test_2016_flickr", 3),
    "test_2017_flickr": ("test_2017_flickr", 2),
    "test_2017_mscoco": ("test_2017_mscoco", 1),
    "test_2018_flickr": ("test_2018_flickr", 11),
}
REPOSITORY = (
    "https://raw.githubusercontent.com/multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/raw/"
)
TEXTS = ["", "two\nlines ", "Gr\N{LATIN SMALL LETTER U WITH DIAERESIS}\N{LATIN SMALL LETTER SHARP S}e", "x", "\t"]
TfdsText, Classes, Scalar = tfds.features.Text, tfds.features.ClassLabel, tfds.features.Scalar


class Tiny(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A builder of a few examples; `url_infos` spares TFDS the search for a file of checksums."""

    VERSION = tfds.core.Version("1.0.0")
    url_infos = None
    features: dict = {}

    def _info(self):
        features = tfds.features.FeaturesDict(self.features)
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(0), "test": self._generate_examples(2)}

    def _generate_examples(self, first):
        for i, text in list(enumerate(TEXTS))[first:]:
            yield i, self.example(i, text)


class TinyGlue(Tiny):
    """As glue: sentences, a class that the test set hides, and features of every kind."""

    features = {
        "sentence": TfdsText(),
        "label": Classes(names=["no", "yes"]),
        "score": Scalar(dtype=np.float64),
        "flag": Scalar(dtype=np.bool_),
        "big": Scalar(dtype=np.int64),
        "words": tfds.features.Sequence(TfdsText()),
        "latin": TfdsText(),
        "note": TfdsText(optional=True),
        "rank": Scalar(dtype=np.int32, optional=True),
    }

    def example(self, i, text):
        hidden = {"latin": b"a\xfc" if i == 3 else "a", "note": None if i == 2 else "n", "rank": None if i == 1 else i}
        numbers = {"label": i % 2 if i < 4 else -1, "score": i / 4, "flag": i > 1, "big": 2**31 - 4 + i}
        return {"sentence": text, "words": text.split()} | numbers | hidden


class TinyTranslate(Tiny):
    """As the translation sets: languages below a feature of their own, here two deep."""

    features = {
        "pair": tfds.features.FeaturesDict({"translation": tfds.features.Translation(["de", "en"]), "id": TfdsText()})
    }

    def example(self, i, text):
        return {"pair": {"translation": {"de": text, "en": text.upper()}, "id": str(i)}}


def lines_of(name, language):
    count = dict(COUNTS.values())[name]
    return [f"{name} {language}  {i} " for i in range(count)]


def compressed(name, language):
    return gzip.compress("".join(f"{line}\n" for line in lines_of(name, language)).encode(), mtime=0)


UPSTREAM = {
    f"{REPOSITORY}{name}.{language}.gz": compressed(name, language)
    for name, _ in COUNTS.values()
    for language in ("en", "de", "fr")
}


@contextlib.contextmanager
def serving(files):
    """TFDS's downloader on a network that has these files only; gives the list of what it asks for."""
    asked = []

    @contextlib.contextmanager
    def open_url(url, **kwargs):
        asked.append(url)
        if url not in files:
            raise ConnectionError(f"no route to {url}")
        yield types.SimpleNamespace(url=url, headers={}), iter([files[url][:5], files[url][5:]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(downloader, "_open_url", open_url)
        yield asked


@contextlib.contextmanager
def checksums_of(files):
    """What Multi30k holds its downloads against, made for these files."""
    infos = {
        url: dataclasses.replace(info, size=len(files[url]), checksum=hashlib.sha256(files[url]).hexdigest())
        for url, info in Multi30k.url_infos.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Multi30k, "url_infos", infos)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """TFDS's data_dir with the three data sets, each prepared by reading it for the first time."""
    folder = tmp_path_factory.mktemp("tfds")
    tfds.disable_progress_bar()
    with serving(UPSTREAM) as asked, checksums_of(UPSTREAM):
        read_tfds("multi30k", "train", ("en",), "", str(folder))
    assert sorted(asked) == sorted(UPSTREAM)
    with serving({}):
        read_tfds("tiny_glue", "train", ("sentence",), "", str(folder))
        read_tfds("tiny_translate", "train", ("pair.id",), "", str(folder))
        yield str(folder)


@pytest.mark.parametrize("split", COUNTS)
def test_multi30k_is_its_files_line_by_line(folder, split):
    """B44: all six splits with all languages, in the order of the files, their spaces kept."""
    name, count = COUNTS[split]
    text = read_tfds("multi30k", split, ("de", "fr"), "", folder)
    assert text.columns == (lines_of(name, "de"), lines_of(name, "fr")) and len(text.columns[0]) == count
    assert text.names == (f"multi30k:{split} de", f"multi30k:{split} fr") and text.labels is None
    assert read_tfds("multi30k", split, ("en",), "", folder).columns == (lines_of(name, "en"),)


def test_every_download_has_a_checksum():
    """The fixture saw that just the URLs of UPSTREAM are asked for; sizes are those of the files as published."""
    assert Multi30k.url_infos.keys() == UPSTREAM.keys()
    assert all(re.fullmatch("[0-9a-f]{64}", info.checksum) for info in Multi30k.url_infos.values())
    assert sum(info.size for info in Multi30k.url_infos.values()) == 2_110_988
    assert len({info.checksum for info in Multi30k.url_infos.values()}) == 18


def test_files_at_hand_are_not_downloaded(tmp_path):
    (tmp_path / "downloads" / "manual").mkdir(parents=True)
    for url, data in UPSTREAM.items():
        (tmp_path / "downloads" / "manual" / url.rpartition("/")[2]).write_bytes(data)
    with serving({}) as asked, checksums_of(UPSTREAM):
        assert len(read_tfds("multi30k", "validation", ("fr",), "", str(tmp_path)).columns[0]) == 5
    assert not asked


def test_a_changed_download_is_refused(tmp_path):
    with serving(UPSTREAM), pytest.raises(ValueError, match="NonMatchingChecksumError: Artifact .* has wrong checksum"):
        read_tfds("multi30k", "train", ("en",), "", str(tmp_path))
    assert not list(tmp_path.glob("multi30k/*"))


def test_languages_of_unequal_length_are_refused(tmp_path):
    files = UPSTREAM | {f"{REPOSITORY}val.de.gz": gzip.compress(b"a\n" * 4)}
    with serving(files), checksums_of(files), pytest.raises(ValueError, match="'en': 5, 'de': 4, 'fr': 5} lines"):
        read_tfds("multi30k", "train", ("en",), "", str(tmp_path))
    assert not list(tmp_path.glob("multi30k/*"))


def test_text_classes_and_values(folder):
    """B44: as glue. Booleans are classes, -1 stays, and nothing is done to the text."""
    text = read_tfds("tiny_glue", "train", ("sentence",), "label", folder)
    assert text.columns == (TEXTS,) and text.names == ("tiny_glue:train sentence",)
    assert text.labels.dtype == np.int32 and text.labels.tolist() == [0, 1, 0, 1, -1]
    values = read_tfds("tiny_glue", "test", ("sentence", "sentence"), "score", folder)
    assert values.columns == (TEXTS[2:], TEXTS[2:])
    assert values.labels.dtype == np.float32 and values.labels.tolist() == [0.5, 0.75, 1.0]
    flags = read_tfds("tiny_glue", "train", ("sentence",), "flag", folder).labels
    assert flags.dtype == np.int32 and flags.tolist() == [0, 0, 1, 1, 1]


def test_features_inside_features_and_parts_of_splits(folder):
    """B44: as translation sets, with the splits that TFDS can cut."""
    names = ("pair.translation.de", "pair.translation.en")
    text = read_tfds("tiny_translate", "train[1:3]+test[:34%]", names, "", folder)
    source = [*TEXTS[1:3], TEXTS[2]]
    assert text.columns == (source, [x.upper() for x in source])
    assert text.names[1] == "tiny_translate:train[1:3]+test[:34%] pair.translation.en"


def test_a_prepared_folder_by_its_path(folder, tmp_path):
    """Moved, without its builder's code, absolute or relative to data.dir."""
    shutil.copytree(f"{folder}/tiny_translate/1.0.0", tmp_path / "moved")
    absolute = read_tfds(f"{tmp_path}/moved", "test", ("pair.id",), "", "")
    assert absolute.columns == read_tfds("moved", "test", ("pair.id",), "", str(tmp_path)).columns == (["2", "3", "4"],)
    assert absolute.names == (f"{tmp_path}/moved:test pair.id",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny_glu", "train", ("x",), ""), r"'tiny_glu': TFDS can open no .*nor is .*/tiny_glu a .*names: tiny_glue"),
        (("glue/sst", "train", ("x",), ""), r"'glue/sst': .*The closest names: glue/sst2, glue/stsb"),
        (("glue/zzzzzzzzzzzzzzzz", "train", ("x",), ""), r"The closest names: glue/"),
        (("wmt14_translate/en-de", "train", ("x",), ""), "names: .*wmt14_translate/de-en"),
        (("no/where", "train", ("x",), ""), "No name is close to it; all are in https://www.tensorflow.org/datasets"),
        (("tiny_glue:9.9.9", "train", ("x",), ""), "TFDS says: .* cannot be loaded at version 9.9.9, only: 1.0.0"),
        (("tiny_glue", "dev", ("sentence",), ""), r"'dev': it has train \(5 examples\), test \(3 examples\); .*'dev'"),
        (
            ("tiny_glue", "test+train[3:2]", ("sentence",), ""),
            r"'test\+train\[3:2\]': it has .* train from 3 to 2 is no part",
        ),
        (("tiny_glue", "train[5:]", ("sentence",), ""), r"split 'train\[5:\]': .*What is wrong: "),
        (("tiny_glue", "train[:9%]", ("sentence",), ""), r"split 'train\[:9%\]': .*at least one example"),
        (("tiny_glue", "train[:0]", ("sentence",), ""), r"at least one example\. What is wrong: "),
        (("tiny_glue", "train[::2]", ("sentence",), ""), r"a part is written as train\[:90%\]"),
        (("tiny_glue", "train", ("text",), ""), r"no feature 'text', .*sentence: Text\(shape.*label: ClassLabel"),
        (("tiny_glue", "train", ("sentence",), "target"), "tiny_glue:train has no feature 'target'"),
        (("tiny_translate", "train", ("pair",), ""), "no feature 'pair', .*pair.translation.de: Text.*; pair.id: Text"),
        (("tiny_glue", "train", ("score",), ""), r"train score is Scalar\(.*float64\), but text is needed"),
        (("tiny_glue", "train", ("words",), ""), r"train words is Sequence\(Text.*, but text is needed"),
        (("tiny_glue", "train", ("sentence",), "words"), "words is Sequence.*, but an integer or a float is needed"),
        (("tiny_glue", "train", ("sentence",), "latin"), "latin is Text.*, but an integer or a float is needed"),
        (("tiny_glue", "train", ("sentence",), "big"), r"train big, example 4 \(from 0\) is 2147483648: classes of 32"),
        (("tiny_glue", "train", ("sentence",), "rank"), r"train rank, example 1 \(from 0\) has no label"),
        (("tiny_glue", "train", ("note",), ""), r"train note, example 2 \(from 0\) has no text"),
        (
            ("tiny_glue", "train", ("latin",), ""),
            r"latin, example 3 \(from 0\): byte 2, 0xfc, .*train\[:3\]\+train\[4:\]",
        ),
    ],
)
def test_errors_say_what_was_found(folder, arguments, message):
    with pytest.raises(ValueError) as error:
        read_tfds(*arguments, folder)
    assert re.search(message, str(error.value), re.DOTALL)


def test_the_advice_for_bad_utf8_works(folder):
    assert read_tfds("tiny_glue", "train[:3]+train[4:]", ("latin",), "", folder).columns == (["a"] * 4,)


def commands(error):
    """The Python code of the commands in an error, as a shell would hand it on."""
    return re.findall(r'python -c "([^"]+)"', str(error.value))


def test_data_that_cannot_be_downloaded_says_how_to_get_it(tmp_path):
    """B44: the message has the command to run elsewhere, which is run here once there is a network."""
    with serving({}), pytest.raises(ValueError, match="ConnectionError: no route to https://raw.git") as error:
        read_tfds("multi30k", "train", ("en", "de"), "", str(tmp_path))
    assert f"copy what it makes, {tmp_path}/multi30k/1.0.0, to the same place here" in str(error.value)
    assert not list(tmp_path.glob("multi30k/*"))  # nothing half made
    with serving(UPSTREAM), checksums_of(UPSTREAM):
        (command,) = commands(error)
        exec(command, {})
    with serving({}):
        assert len(read_tfds("multi30k", "train", ("en", "de"), "", str(tmp_path)).columns[0]) == 7


def test_the_command_names_the_configuration(tmp_path):
    with serving({}), pytest.raises(ValueError) as error:
        read_tfds("glue/sst2", "train", ("sentence",), "label", str(tmp_path))
    (command,) = commands(error)
    assert f"tfds.builder('glue/sst2', data_dir='{tmp_path}')" in command


def test_what_another_process_has_prepared_meanwhile_is_taken(folder, tmp_path, monkeypatch):
    def slower(self, **kwargs):
        shutil.copytree(f"{folder}/tiny_glue", tmp_path / "tiny_glue")
        raise OSError("Directory not empty")

    monkeypatch.setattr(TinyGlue, "download_and_prepare", slower)
    assert read_tfds("tiny_glue", "train", ("sentence",), "", str(tmp_path)).columns == (TEXTS,)


@pytest.mark.parametrize("dataset", ["tiny_glue", "tiny_glue/1.0.0"])
def test_data_for_tensorflow_alone_says_how_to_prepare_it_again(folder, tmp_path, dataset):
    """B44: by name and by folder; the command works once the folder is moved away, as the message says."""
    shutil.copytree(f"{folder}/tiny_glue/1.0.0", tmp_path / "tiny_glue" / "1.0.0")
    info = tmp_path / "tiny_glue" / "1.0.0" / "dataset_info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"fileFormat": "tfrecord"}))
    with pytest.raises(ValueError, match="as tfrecord, which only TensorFlow reads") as error:
        read_tfds(dataset, "train", ("sentence",), "", str(tmp_path))
    assert f"tfds convert_format --dataset_version_dir={tmp_path}/tiny_glue/1.0.0 --out_file_format" in str(error.value)
    (tmp_path / "tiny_glue").rename(tmp_path / "away")
    (command,) = commands(error)
    exec(command, {})
    assert read_tfds(dataset, "train", ("sentence",), "", str(tmp_path)).columns == (TEXTS,)


def test_folders_copied_in_part_are_refused(folder, tmp_path):
    copied = tmp_path / "tiny_glue" / "1.0.0"
    shutil.copytree(f"{folder}/tiny_glue/1.0.0", copied)
    (records,) = copied.glob("*train*")
    records.unlink()
    with pytest.raises(ValueError, match="tiny_glue:train cannot be read from .*1.0.0: a file is missing or damaged"):
        read_tfds("tiny_glue", "train", ("sentence",), "", str(tmp_path))
    (copied / "dataset_info.json").unlink()
    with pytest.raises(ValueError, match="1.0.0 exists but has no dataset_info.json.*delete it and start again"):
        read_tfds("tiny_glue", "train", ("sentence",), "", str(tmp_path))


def test_no_directory_is_the_default_of_tfds(folder, monkeypatch):
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", folder)
    assert read_tfds("tiny_glue", "train", ("sentence",), "", "").columns == (TEXTS,)
    builder = tfds.builder("tiny_glue")
    assert builder.data_dir.startswith(folder) and "data_dir" not in builders._command(builder, "")


def test_tensorflow_is_not_imported(folder):
    """B44: reading and preparing have run; TensorFlow, where it is installed, takes no GPU if it is not imported."""
    read_tfds("tiny_translate", "test", ("pair.id",), "", folder)
    assert "tensorflow" not in sys.modules and "tensorflow_datasets.translate.wmt" in sys.modules
