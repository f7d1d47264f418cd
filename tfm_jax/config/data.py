"""Where the text comes from and how it becomes batches."""

import math
from dataclasses import dataclass, field
from typing import Literal

from tfm_jax.config.checks import require


@dataclass(frozen=True)
class Corruption:
    """What is hidden of a text, to be predicted: a function of (data.seed, epoch, example) alone."""

    name: Literal["none", "mask", "spans", "prefix"] = "none"
    """none: every token from those before it, or the target from the source. mask: tokens here and there (BERT, Devlin
    et al. 2019). spans: runs of tokens, behind sentinels (T5, Raffel et al. 2020). prefix: the rest of a text from its
    beginning, cut at a random place."""
    rate: float = 0.15
    """Share of the tokens that is hidden, for mask and spans."""
    mean_span: float = 3.0
    """Mean length of a hidden run, for spans. Unit: tokens."""
    masked: float = 0.8
    """Share of the chosen tokens that become the mask token, for mask."""
    random: float = 0.1
    """Share of the chosen tokens that become a random one, for mask; the others stay as they are, to be predicted."""
    sentinels: int = 100
    """Sentinel tokens in a vocabulary that is learned for spans; a text needs one for each of its hidden runs."""

    def __post_init__(self):
        require(0 < self.rate < 1, f"data.corruption.rate is {self.rate}: a share between 0 and 1 is needed")
        low = self.mean_span
        require(1 <= low < math.inf, f"data.corruption.mean_span is {low}: at least 1 token is needed")
        shares = (self.masked, self.random)
        require(
            min(shares) >= 0 and sum(shares) <= 1,
            f"data.corruption.masked, random are {shares}: shares, at most 1 together, are needed",
        )
        require(self.sentinels >= 1, f"data.corruption.sentinels is {self.sentinels}: at least 1 is needed")


_LEAST = {"num_buckets": 1, "rows_multiple": 1, "lengths_multiple": 1, "workers": 0, "seed": 0, "merges": 0}


@dataclass(frozen=True)
class Data:
    """Where the text comes from and how it becomes batches."""

    format: Literal["text", "tsv", "jsonl", "tfds", "dates"] = "text"
    """text: files of lines, a second one with the translations. tsv, jsonl: one file with `features` in columns or
    keys. tfds: a data set of TensorFlow Datasets by its name. dates: generated pairs of dates in ten languages."""
    dataset: str = ""
    """Name of the data set, for format = tfds (ted_hrlr_translate/ru_to_en, glue/sst2, multi30k)."""
    dir: str = ""
    """Folder from which relative names of files count, and where TFDS keeps what it has prepared (its data_dir)."""
    train_source: str = ""
    """The training text: a file (plain, .gz, .xz, or a member of a .zip as FILE.zip/MEMBER), for tfds a split
    (train[:90%]), for dates a number of pairs. With train_target, one source sentence a line."""
    train_target: str = ""
    """File with the translation of each line of train_source; empty where the text has one side."""
    validation_source: str = ""
    """As train_source, for the validation loss that guides patience and the best checkpoint. Empty: the end of the
    training text, a tenth of it and at most 1,000 examples, is held out."""
    validation_target: str = ""
    """As train_target, for validation."""
    test_source: str = ""
    """As train_source, for the scores in result.json; empty: the validation text is scored."""
    test_target: str = ""
    """As train_target, for the test."""
    features: tuple[str, ...] = ()
    """What of an example is read, one for a text, two for a pair (source, target): columns of a TSV file by the names
    in its header or by number from 1 without one, keys of JSON lines, features of a TFDS example."""
    label: str = ""
    """The feature that holds the class or the value to be predicted from the text, where there is one."""
    documents: Literal["lines", "paragraphs", "file"] = "lines"
    """What one example of a text file is: a line, what stands between blank lines, or the whole file."""
    tokenizer: Literal["bytes", "characters", "bpe", "line_bpe", "word_bpe", "wordpiece", "unigram"] = "bpe"
    """Kind of the vocabulary, learned from the training text with at most model.vocab_size entries. bytes, and
    byte-level BPE inside words (bpe) or across them (line_bpe): any Unicode text comes back exactly. word_bpe: BPE
    inside words split at spaces (Sennrich et al. 2016), for text that is tokenised already. wordpiece (BERT's), unigram
    (Kudo 2018), characters: what the training text lacks is unknown."""
    tokenizer_file: str = ""
    """A vocabulary to use instead: a tokenizer.json of Hugging Face or the folder that holds it, or with tokenizer =
    word_bpe a code file of subword-nmt."""
    merges: int | None = None
    """Merges that word_bpe learns; the vocabulary is then what they leave in the training text. None: as many as fill
    model.vocab_size."""
    max_length: int = 256
    """Longest sequence after tokenisation, end-of-text included; the length of rows for packed and blocks. Unit:
    tokens."""
    too_long: Literal["error", "drop", "split"] = "error"
    """What happens to a training or validation example with a side over max_length: error names it, drop counts it,
    split cuts a text (not a pair) into pieces."""
    batching: Literal["buckets", "packed", "blocks"] = "buckets"
    """buckets: examples of similar length share a batch. packed: several examples share a row, told apart by segments.
    blocks: all texts, each with its end, are one stream, cut every max_length tokens."""
    tokens_per_batch: int = 4096
    """Budget of a batch over all devices: rows x the longer side's padded length. Unit: tokens."""
    max_rows: int | None = None
    """Most rows of a batch, whatever their length: with a limit that all reach, short examples count as much in an
    update as long ones. None: as many as tokens_per_batch allows."""
    num_buckets: int = 8
    """How many (source length, target length) shapes batches come in: each costs one compilation, more waste less."""
    rows_multiple: int = 8
    """The rows of a batch are a multiple of it, so every number of devices that divides it sees the same batches."""
    lengths_multiple: int = 1
    """The lengths of rows are multiples of it, so every number of devices that divides it can share a row."""
    corruption: Corruption = field(default_factory=Corruption)
    """What is hidden of a text, to be predicted."""
    workers: int = 0
    """Processes that make batches; 0: threads of the training process, which is faster unless making them is slow."""
    seed: int = 0
    """Data order depends on (seed, epoch) alone."""

    def __post_init__(self):
        require(self.max_length >= 2, f"data.max_length is {self.max_length}: at least 2 tokens are needed")
        for name, low in _LEAST.items():
            value = getattr(self, name)
            require(value is None or value >= low, f"data.{name} is {value}: at least {low} is needed")
        rows = self.max_rows
        require(
            rows is None or (rows > 0 and rows % self.rows_multiple == 0),
            f"data.max_rows is {rows}: a positive multiple of data.rows_multiple, {self.rows_multiple}, is expected",
        )
        require(
            self.max_length % self.lengths_multiple == 0,
            f"data.max_length is {self.max_length}, data.lengths_multiple {self.lengths_multiple}: the longest row is "
            "a multiple of it too, change one of them",
        )
        require(
            self.max_length >= 4 or self.corruption.name != "prefix",
            f"data.max_length is {self.max_length}: for prefix at least 4 are needed, two of a text and two ends",
        )
        # rows of buckets are as long as what is in them, which is known when the text is
        rows = 1 if self.batching == "buckets" else self.rows_multiple
        require(
            self.tokens_per_batch >= self.max_length * rows,
            f"data.tokens_per_batch ({self.tokens_per_batch}) is below data.max_length ({self.max_length})"
            + (f" x data.rows_multiple ({rows})" if rows > 1 else "")
            + ": the longest rows would fit no batch",
        )
        self._check_source()
        self._check_task()

    def _check_source(self):
        for part in ("train", "validation", "test"):
            source, target = getattr(self, f"{part}_source"), getattr(self, f"{part}_target")
            given = f"data.{part}_source is {source!r}, data.{part}_target {target!r}"
            require(bool(source) or not target, f"{given}: give both files or neither")
            require(self.format == "text" or not target, f"{given}: format {self.format!r} has both sides in one")
            if self.train_source and source:
                sides = "two sides" if self.train_target else "one side"
                same = bool(target) == bool(self.train_target)
                require(same, f"{given}, but the training text has {sides}: give both files for each, or one for each")
        tables = self.format in ("tsv", "jsonl", "tfds")
        wanted = "one or two are needed" if tables else "none can be chosen"
        require(
            len(self.features) in ((1, 2) if tables else (0,)),
            f"data.features is {self.features}: {wanted} for format {self.format!r}",
        )
        require(tables or not self.label, f"data.label is {self.label!r}, but format {self.format!r} has no features")
        require(
            bool(self.dataset) == (self.format == "tfds"),
            f"data.dataset is {self.dataset!r}, data.format {self.format!r}: tfds alone needs a name",
        )
        require(self.format != "dates" or not self.dir, f"data.dir is {self.dir!r}, but dates are made, not read")
        require(
            self.documents == "lines" or (self.format == "text" and not self.train_target),
            f"data.documents is {self.documents!r}: only a text file of one side can be read so",
        )

    def _check_task(self):
        pairs, name = self.sides == 2, self.corruption.name
        require(
            name == "none" or not pairs,
            f"data.corruption.name is {name!r}: it hides a part of a text, but this data is made of pairs",
        )
        require(
            not self.label or (name == "none" and self.batching == "buckets"),
            f"data.label is {self.label!r}: with a label, corruption must be none and batching buckets",
        )
        require(
            self.batching != "blocks" or not pairs,
            "data.batching is 'blocks': pairs have no common stream, use buckets or packed",
        )
        require(
            self.too_long != "split" or (not pairs and not self.label),
            "data.too_long is 'split': a pair or a labelled text cannot be cut, use error or drop",
        )
        require(
            self.merges is None or self.tokenizer == "word_bpe",
            f"data.merges is {self.merges}: only word_bpe takes it, the tokenizer is {self.tokenizer!r}",
        )

    @property
    def sides(self) -> int:
        """How many texts an example has: 2 for a pair that is not classified."""
        pairs = len(self.features) == 2 or self.train_target or self.format == "dates"
        return 2 if pairs and not self.label else 1
