"""Text from data sets of TensorFlow Datasets (TFDS), without TensorFlow, and our own builder for Multi30k.

Importing this module registers Multi30k with TFDS. It is imported when a data set is read, not before.
"""

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

# TFDS loads its groups of data sets one after another and stops without a word at the first that lacks a package, which
# comes before these; the names in them (glue, wmt14_translate, ...) are known only once they are imported.
import tensorflow_datasets.question_answering
import tensorflow_datasets.summarization
import tensorflow_datasets.text
import tensorflow_datasets.text_simplification
import tensorflow_datasets.translate  # noqa: F401

from tfm_jax.data.sources import Text, read_lines

_INT32 = np.iinfo(np.int32)


def read_tfds(dataset: str, split: str, features: tuple[str, ...], label: str, directory: str) -> Text:
    """The text of a data set, one column a feature, in the order in which TFDS keeps the examples.

    `dataset` is a name of TFDS (glue/sst2, ted_hrlr_translate/ru_to_en, multi30k) or a folder that TFDS has prepared,
    the one that holds dataset_info.json. `split` is any that TFDS takes (train, train[:90%], train+validation).
    `directory` is TFDS's data_dir and where a relative folder counts from; "" is TFDS's own default. A feature inside
    another is named with dots (translation.de). `label`, unless it is "", names the feature with the classes (integers
    and booleans, int32) or values (float32); a class is passed as it is, -1 where a test set hides it.

    A data set that is not there yet is downloaded and prepared in a format that is read without TensorFlow.

    Raises `ValueError` for what is unknown (data set, split, feature), for a feature of the wrong type, for text that
    is not UTF-8, and for data that cannot be prepared or read, with the command that prepares it.
    """
    builder = _prepared(dataset, directory)
    known = dict(_flat(builder.info.features))
    where = f"{dataset}:{split}"
    for name in features:
        _require(name, known, where, kinds="O")
    if label:
        _require(label, known, where, kinds="biuf")
    columns = tuple([] for _ in features)
    values = []
    for index, example in enumerate(_examples(builder, dataset, split, directory)):
        for column, name in zip(columns, features, strict=True):
            column.append(_decoded(_inside(example, known[name][0]), index, f"{where} {name}"))
        if label:
            values.append(_inside(example, known[label][0]))
    labels = _labels(values, known[label][1].np_dtype, f"{where} {label}") if label else None
    return Text(columns, tuple(f"{where} {name}" for name in features), labels)


def _prepared(dataset: str, directory: str) -> tfds.core.DatasetBuilder:
    """The builder of data that is there, downloaded and prepared now if it was not."""
    folder = Path(directory, dataset).expanduser()
    builder = _opened(dataset, directory, folder)
    info = builder.data_path / "dataset_info.json"
    if info.exists():
        return builder
    advice = (
        f"If this machine has no network, run on one that has it\n    {_command(builder, directory)}\nand copy what it "
        f"makes, {builder.data_dir}, to the same place here (below data.dir, now {builder.data_dir_root})"
    )
    try:
        builder.download_and_prepare(file_format="array_record")
    except Exception as error:
        if not info.exists():  # else another process of this run was faster
            raise ValueError(
                f"{dataset} is not prepared in {builder.data_dir_root}, and preparing it failed "
                f"({type(error).__name__}: {_first_line(error)}). {advice}"
            ) from error
    if not info.exists():
        raise ValueError(
            f"{builder.data_dir} exists but has no dataset_info.json, so it is not a whole data set: delete it and "
            f"start again. {advice}"
        )
    return _opened(dataset, directory, folder)


def _opened(dataset: str, directory: str, folder: Path) -> tfds.core.DatasetBuilder:
    try:
        if (folder / "dataset_info.json").is_file():
            return tfds.builder_from_directory(folder)
        return tfds.builder(dataset, data_dir=directory or None)
    except Exception as error:  # TFDS raises eight kinds here, from AssertionError (version) to TypeError (argument)
        raise ValueError(
            f"data.dataset is {dataset!r}: TFDS can open no data set of that name, nor is {folder} a folder with a "
            f"dataset_info.json. {_closest(dataset)}. TFDS says: {_first_line(error)}"
        ) from error


def _closest(dataset: str) -> str:
    """Names of TFDS that look like this one: of its configurations where the data set is known, else of data sets."""
    name = dataset.partition("/")[0]
    names = tfds.list_builders(with_community_datasets=False)
    if name in names:
        names = [f"{name}/{config}" for config in tfds.builder_cls(name).builder_configs] or [name]
        close = difflib.get_close_matches(dataset, names, n=9, cutoff=0)
    else:
        close = difflib.get_close_matches(name, names)
    found = f"The closest names: {', '.join(close)}" if close else "No name is close to it"
    return f"{found}; all are in https://www.tensorflow.org/datasets/catalog"


def _command(builder: tfds.core.DatasetBuilder, directory: str) -> str:
    """What to type to prepare a data set; importing this module makes all names known that it knows."""
    config = builder.builder_config
    name = f"{builder.name}/{config.name}" if config else builder.name
    where = f", data_dir={directory!r}" if directory else ""
    return (
        'python -c "import tfm_jax.data.builders, tensorflow_datasets as tfds; '
        f"tfds.builder({name!r}{where}).download_and_prepare(file_format='array_record')\""
    )


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "no reason given")


def _examples(builder: tfds.core.DatasetBuilder, dataset: str, split: str, directory: str) -> Iterator[Mapping]:
    """The examples of a split, all features decoded: TFDS's own selection, PartialDecoding, needs TensorFlow."""
    folder = builder.data_dir
    try:
        for part in tfds.core.ReadInstruction.from_spec(split).to_absolute(builder.info.splits):
            if part.to is not None and (part.from_ or 0) > part.to:  # TFDS reads train[3:2] as train[3:]
                raise ValueError(f"{part.splitname} from {part.from_} to {part.to} is no part")
        source = builder.as_data_source(split=split)
    except NotImplementedError as error:
        raise ValueError(
            f"{folder} holds {dataset} as {builder.info.file_format.value}, which only TensorFlow reads. Move that "
            f"folder away and prepare the data again with\n    {_command(builder, directory)}\nor, with TensorFlow and "
            "apache-beam installed (the conversion needs both), add the other format to it with\n"
            f"    tfds convert_format --dataset_version_dir={folder} --out_file_format=array_record"
        ) from error
    except ValueError as error:
        splits = ", ".join(f"{name} ({info.num_examples} examples)" for name, info in builder.info.splits.items())
        raise ValueError(
            f"{dataset} cannot give the split {split!r}: it has {splits}; a part is written as train[:90%] or "
            f"train[100:200] and holds at least one example. What is wrong: {_first_line(error)}"
        ) from error
    try:
        yield from source
    except Exception as error:
        raise ValueError(
            f"{dataset}:{split} cannot be read from {folder}: a file is missing or damaged; copy the folder again, "
            f"or delete it and start again. TFDS says: {_first_line(error)}"
        ) from error


def _flat(
    features: tfds.features.FeaturesDict, keys: tuple[str, ...] = ()
) -> Iterator[tuple[str, tuple[tuple[str, ...], Any]]]:
    """Dotted name -> (keys that lead to the value, what TFDS says of it), for every feature that is no dictionary."""
    for key, feature in features.items():
        path = (*keys, key)
        if isinstance(feature, tfds.features.FeaturesDict):
            yield from _flat(feature, path)
        else:
            yield ".".join(path), (path, feature)


def _require(name: str, known: Mapping, where: str, *, kinds: str) -> None:
    """Raise `ValueError` unless `name` is a feature of one value, of one of these kinds of NumPy types (O is text)."""
    if name not in known:
        names = "; ".join(f"{key}: {_kind(feature)}" for key, (_, feature) in known.items())
        raise ValueError(f"{where} has no feature {name!r}, its features are {names}")
    feature = known[name][1]
    if feature.shape != () or np.dtype(feature.np_dtype).kind not in kinds:
        wanted = "text" if kinds == "O" else "an integer or a float"
        raise ValueError(f"{where} {name} is {_kind(feature)}, but {wanted} is needed: name another feature")


def _kind(feature: Any) -> str:
    return " ".join(repr(feature).split())


def _inside(example: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        example = example[key]
    return example


def _decoded(value: bytes | None, index: int, where: str) -> str:
    if value is None:
        raise ValueError(f"{where}, example {index} (from 0) has no text: the feature is optional, name another")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}, example {index} (from 0): byte {error.start + 1}, 0x{value[error.start]:02x}, is not UTF-8: "
            f"leave it out (train[:{index}]+train[{index + 1}:]) or prepare the data set from mended text"
        ) from error


def _labels(values: list[Any], kind: Any, where: str) -> np.ndarray:
    """int32 classes or float32 values, one an example."""
    if None in values:
        raise ValueError(f"{where}, example {values.index(None)} (from 0) has no label: the feature is optional")
    if np.dtype(kind).kind == "f":
        return np.array(values, np.float32)
    for index in (int(np.argmin(values)), int(np.argmax(values))):
        if not _INT32.min <= values[index] <= _INT32.max:
            raise ValueError(f"{where}, example {index} (from 0) is {values[index]}: classes of 32 bits are needed")
    return np.array(values, np.int32)


_COMMIT = "https://raw.githubusercontent.com/multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a/"
_LANGUAGES = ("en", "de", "fr")
_SPLITS = {"train": "train", "validation": "val"} | {
    x: x for x in ("test_2016_flickr", "test_2017_flickr", "test_2017_mscoco", "test_2018_flickr")
}
_FILES = {  # name: (bytes, sha256)
    "train.en.gz": (568_929, "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f"),
    "train.de.gz": (637_044, "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6"),
    "train.fr.gz": (604_242, "622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c"),
    "val.en.gz": (21_650, "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28"),
    "val.de.gz": (24_681, "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a"),
    "val.fr.gz": (23_001, "ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9"),
    "test_2016_flickr.en.gz": (21_077, "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9"),
    "test_2016_flickr.de.gz": (22_890, "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8"),
    "test_2016_flickr.fr.gz": (22_310, "6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90"),
    "test_2017_flickr.en.gz": (19_138, "76a444ee25172e72695cddb13ae4a3bda59430617be88e0bb46b60504f054074"),
    "test_2017_flickr.de.gz": (21_471, "a2c89666db00c495cd8513b9d708d5a3acc205d7de312ef2bf5fb7ebc1540aee"),
    "test_2017_flickr.fr.gz": (20_434, "3ba671ceb2299f3304ffafefea7a833d08632fbaf0ba18546f8a2ec2391af496"),
    "test_2017_mscoco.en.gz": (8_844, "aab300bfb4427697987e02cd0aacd44bfe8aa50456231b6474c08038bbed2b58"),
    "test_2017_mscoco.de.gz": (10_230, "799e4854c25d601cb6cb6be29eabe5667734c61ace2f495e03e429031a0bc338"),
    "test_2017_mscoco.fr.gz": (9_751, "754f3072ba9f124569ba5258b32730fc1d214bbf8e0c6dfb2b74401676220db0"),
    "test_2018_flickr.en.gz": (23_514, "ef4f4844037d4c5dea75c9a8ed5fd78905967a26f67c255e230cc9780032654d"),
    "test_2018_flickr.de.gz": (26_461, "ddd0130c7d97482dc5197a02141dae8dd79f20f03586c480d675c09a32daf608"),
    "test_2018_flickr.fr.gz": (25_321, "fb2b83fcceb937a4f7e3e93c1c51c22aba92f1e342391e6b5ba392b16a920501"),
}


def _url(name: str, language: str) -> str:
    return f"{_COMMIT}data/task1/raw/{name}.{language}.gz"


class Multi30k(tfds.core.GeneratorBasedBuilder):
    """Multi30k, task 1: captions of Flickr30K's images in English, translated into German and French, as raw text.

    Example i is line i + 1 of the files, as it stands there: some training lines have double spaces or spaces at their
    ends. Files that are at hand already (train.en.gz, ...) are taken from downloads/manual below TFDS's data_dir.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "The files of the repository as of its commit a3d2e0d."}
    # What TFDS holds downloads against. Given here it needs no file beside the code.
    url_infos = {
        f"{_COMMIT}data/task1/raw/{name}": tfds.download.checksums.UrlInfo(size=size, checksum=sha256, filename=name)
        for name, (size, sha256) in _FILES.items()
    }

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Captions of Flickr30K's images in English, translated into German and French.",
            features=tfds.features.FeaturesDict({language: tfds.features.Text() for language in _LANGUAGES}),
            supervised_keys=("en", "de"),
            homepage="https://github.com/multi30k/dataset",
            license="The repository has no licence file. Derived from Flickr30K, for research and education only.",
            citation=_CITATION,
            disable_shuffling=True,  # so that an example is known by its line
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        urls = {split: {x: _url(name, x) for x in _LANGUAGES} for split, name in _SPLITS.items()}
        return {split: self._generate_examples(paths) for split, paths in dl_manager.download(urls).items()}

    def _generate_examples(self, paths: Mapping) -> Iterator[tuple[int, dict[str, str]]]:
        columns = {language: read_lines(path) for language, path in paths.items()}
        counts = {language: len(lines) for language, lines in columns.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(f"the languages have {counts} lines: line i of one must translate line i of the others")
        for index, lines in enumerate(zip(*columns.values(), strict=True)):
            yield index, dict(zip(columns, lines, strict=True))


_CITATION = """@inproceedings{elliott-etal-2016-multi30k,
  title = {{Multi30K}: Multilingual {English-German} Image Descriptions},
  author = {Elliott, Desmond and Frank, Stella and Sima'an, Khalil and Specia, Lucia},
  booktitle = {Proceedings of the 5th Workshop on Vision and Language},
  year = {2016}, pages = {70--74}, doi = {10.18653/v1/W16-3210}
}"""
