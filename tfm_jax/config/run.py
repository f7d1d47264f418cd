"""A run: its devices, optimizer, limits and decoding, and all of it together."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from tfm_jax.config.checks import require
from tfm_jax.config.data import Data

ModelConfig = TypeVar("ModelConfig")


@dataclass(frozen=True)
class Mesh:
    """How many devices each axis spans; their product is the number of devices the run uses."""

    data: int = 1
    """Copies of the model that share a batch (data parallelism). Unit: devices."""
    fsdp: int = 1
    """Shards of parameters and optimizer state, which also share the batch (fully sharded). Unit: devices."""
    model: int = 1
    """Shards of heads, feed-forward width and vocabulary (tensor parallelism). Unit: devices."""
    sequence: int = 1
    """Shards of the length of every text, for long ones: each device has its own part of the tokens and of the queries
    and gathers the keys. Unit: devices."""

    def __post_init__(self):
        for name, size in dataclasses.asdict(self).items():
            require(size >= 1, f"mesh.{name} is {size}: an axis spans at least one device")

    @property
    def axes(self) -> dict[str, int]:
        """Devices by axis, those that send each other most last: neighbours are closest along the last axis."""
        return {name: getattr(self, name) for name in ("data", "fsdp", "sequence", "model")}

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.axes.items())

    @property
    def batch_shards(self) -> int:
        """How many devices share the rows of a batch."""
        return self.data * self.fsdp


@dataclass(frozen=True)
class Precision:
    """The dtypes of training. Softmax, norms and the loss are float32 whatever they say."""

    params: Literal["float32", "bfloat16"] = "float32"
    """Of the parameters between updates, and so of those that a run ends with."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Of activations and matrix products, for which parameters are rounded; bfloat16 halves memory and traffic and is
    what accelerators are fast in."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Of the sums of gradients over micro-batches, their norm and clipping, and of the optimizer's state and update.
    The sum over devices of a matrix's gradient is made in the dtype of the product, compute."""

    def __post_init__(self):
        require(
            self.params == "float32" or self.compute == "bfloat16",
            f"precision.params is {self.params!r}, precision.compute {self.compute!r}: no product is more exact than "
            "what it is of, set both to bfloat16",
        )


@dataclass(frozen=True)
class Optimizer:
    """The update rule and its learning rate.

    Patterns are those of a file name (*, ?), against dotted names such as embedding.table or
    encoder.layers.3.attention.query_bias, where a stack's layers are counted from 0.
    """

    name: Literal["adam", "adamw", "adafactor", "lion", "muon", "sgd"] = "adam"
    """The update rule: Adam (Kingma and Ba 2015), or with weight decay beside it (Loshchilov and Hutter 2019);
    adafactor (Shazeer and Stern 2018: factored second moments, updates clipped at 1 and taken times the root mean
    square of the parameter, no momentum); lion (Chen et al. 2023); muon (Jordan et al. 2024) for the matrices of
    attention and feed-forward networks, with updates as large as adamw's, and adamw for the rest; sgd."""
    schedule: Literal["inverse_sqrt", "constant", "linear", "cosine", "warmup_stable_decay"] = "inverse_sqrt"
    """After the linear warm-up: inverse_sqrt falls as 1/sqrt(update) (Vaswani et al. 2017, eq. 3); constant stays;
    linear and cosine (Loshchilov and Hutter 2017, half a period) fall to final_learning_rate at update decay_steps;
    warmup_stable_decay (Hu et al. 2024) stays until update stable_steps, and then falls there as a line."""
    learning_rate: float = 5e-4
    """Peak, reached at the last warm-up update. The paper's peak is (d_model * warmup_steps) ** -0.5."""
    warmup_steps: int = 4000
    """Length of the linear warm-up. Unit: updates."""
    stable_steps: int = 0
    """The last update at the peak of warmup_stable_decay, warm-up included. Unit: updates."""
    decay_steps: int = 0
    """The update at which a falling schedule has reached final_learning_rate, where it stays. Unit: updates."""
    final_learning_rate: float = 0.0
    """Where linear, cosine and warmup_stable_decay end."""
    b1: float = 0.9
    """Decay of the mean of gradients: adam, adamw, muon's adamw. For lion its share in the sum whose sign is taken."""
    b2: float = 0.98
    """Decay of the mean of squared gradients: adam, adamw, muon's adamw. For lion, decay of the mean of gradients."""
    eps: float = 1e-9
    """Added to the root of the mean of squared gradients: adam, adamw, muon's adamw."""
    momentum: float = 0.0
    """Decay of the sum of gradients, for sgd (0: none), and of the mean of gradients of muon's matrices, which its
    authors set to 0.95."""
    clip_norm: float | None = None
    """Gradients with a larger global norm are scaled down to it; None: no clipping."""
    weight_decay: float = 0.0
    """This share of a parameter, times the learning rate, is taken off at each update, whatever the rule but adam."""
    no_decay: tuple[str, ...] = (
        "*bias",
        "*scale",
        "*position_embedding.table",
        "*position_bias.table",
        "*relative_key",
        "*relative_value",
    )
    """Patterns of parameters without weight decay: by default biases, the scales of norms and what is looked up by
    position or distance. Token embeddings decay, as BERT's and GPT-2's do."""
    layer_decay: float = 1.0
    """The learning rate of each layer is that of the layer above it times this (Clark et al. 2020, ELECTRA): 1 at the
    head and the norm below it, layer_decay at the last layer, the smallest at the embeddings."""
    frozen: tuple[str, ...] = ()
    """Patterns of parameters that stay as they are."""

    def __post_init__(self):
        for name in ("learning_rate", "eps"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"optimizer.{name} is {value}: it must be positive and finite")
        for name in ("b1", "b2", "momentum"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optimizer.{name} is {value}: it lies in [0, 1)")
        require(
            self.clip_norm is None or 0 < self.clip_norm < math.inf,
            f"optimizer.clip_norm is {self.clip_norm}: give > 0 or None",
        )
        require(0 < self.layer_decay <= 1, f"optimizer.layer_decay is {self.layer_decay}: it lies in (0, 1]")
        for name in ("no_decay", "frozen"):
            patterns = getattr(self, name)
            known = type(patterns) is tuple and all(type(pattern) is str for pattern in patterns)
            require(known, f"optimizer.{name} is {patterns!r}: a tuple of patterns is expected")
        self._check_schedule()
        self._check_rule()

    def _check_schedule(self):
        warmup, stable, decay = self.warmup_steps, self.stable_steps, self.decay_steps
        require(warmup >= 0, f"optimizer.warmup_steps is {warmup}: it must not be negative")
        stays = self.schedule == "warmup_stable_decay"
        unused = f"optimizer.stable_steps is {stable}: it is for warmup_stable_decay, not {self.schedule!r}"
        require(stays or stable == 0, unused)
        order = f"optimizer.warmup_steps, stable_steps, decay_steps are {warmup}, {stable}, {decay}: they come in this"
        require(not stays or warmup <= stable < decay, f"{order} order, the last two apart")
        falls = stays or self.schedule in ("linear", "cosine")
        steps = f"optimizer.decay_steps is {decay}, warmup_steps {warmup}"
        require(not falls or decay > warmup, f"{steps}: {self.schedule} ends after the warm-up")
        falling = "linear, cosine and warmup_stable_decay"
        unused = f"optimizer.decay_steps, final_learning_rate are for {falling}, not {self.schedule!r}"
        require(falls or (decay, self.final_learning_rate) == (0, 0.0), unused)
        end, peak = self.final_learning_rate, self.learning_rate
        require(0 <= end <= peak, f"optimizer.final_learning_rate is {end}: it lies between 0 and the peak, {peak}")

    def _check_rule(self):
        adam = ("b1", "b2", "eps")
        own = {"adafactor": (), "lion": ("b1", "b2"), "muon": (*adam, "momentum"), "sgd": ("momentum",)}
        for name in (*adam, "momentum"):
            value, default = getattr(self, name), getattr(Optimizer, name)
            used = name in own.get(self.name, adam) or value == default
            require(used, f"optimizer.{name} is {value}: {self.name!r} has none, leave it at {default}")
        require(
            self.name != "muon" or self.momentum > 0,
            f"optimizer.momentum is {self.momentum}: muon needs one, its authors' is 0.95",
        )
        decay = self.weight_decay
        require(0 <= decay < math.inf, f"optimizer.weight_decay is {decay}: it must not be negative")
        require(decay == 0 or self.name != "adam", f"optimizer.weight_decay is {decay}: 'adam' has none, adamw has")
        own = sorted({*self.no_decay} - {*Optimizer.no_decay})
        require(decay > 0 or not own, f"optimizer.no_decay has {own}, weight_decay is {decay}: nothing would decay")


@dataclass(frozen=True)
class Train:
    """How long to train, and when to look and save. The first limit reached ends the run; one must be given."""

    steps: int | None = None
    """Limit of updates. None: no such limit."""
    epochs: int | None = None
    """Limit of passes over the training data. None: no such limit."""
    max_minutes: float | None = None
    """Limit of time in the training loop (validation and saving included), summed over resumed parts. Unit: minutes."""
    micro_batches: int = 1
    """Parts of a batch that go through the model one after another before the update, which is that of the whole batch:
    more take less memory."""
    label_smoothing: float = 0.1
    """Share of the target probability spread evenly over the vocabulary (Szegedy et al. 2016)."""
    z_loss: float = 0.0
    """Times log(sum of exp of the logits) ** 2, added to the loss of each target (Chowdhery et al. 2022; theirs is
    1e-4)."""
    init_from: str = ""
    """Directory of a run or of a Hugging Face model whose parameters and vocabulary the run begins with. Empty: random
    parameters, a vocabulary as data says."""
    init_partial: bool = False
    """Whether parameters that init_from lacks may be random, and those that only it has left out; both are named when
    training begins. Else either is an error."""
    checkpoint_every: int = 500
    """Every so many checkpoint_units the validation loss is measured and the state saved."""
    checkpoint_unit: Literal["steps", "epochs"] = "steps"
    """Unit of checkpoint_every and of patience's rounds."""
    patience: int | None = None
    """Stop after so many rounds (one per checkpoint) without a better validation loss. None: never."""
    keep_last: int = 5
    """How many of the newest checkpoints are kept; the best one is kept besides."""
    final: Literal["last", "best", "average"] = "last"
    """Which parameters the run ends with: the newest, those of the best validation loss, or the mean of the keep_last
    newest checkpoints."""
    log_every: int = 50
    """A line of metrics.jsonl every so many updates."""
    seed: int = 0
    """Initial parameters and dropout depend on it alone."""

    def __post_init__(self):
        limits = {"steps": self.steps, "epochs": self.epochs, "max_minutes": self.max_minutes}
        require(any(v is not None for v in limits.values()), "train: give steps, epochs or max_minutes as the limit")
        for name, value in limits.items() | {"patience": self.patience}.items():
            require(value is None or 0 < value < math.inf, f"train.{name} is {value}: give a positive number or None")
        for name in ("micro_batches", "checkpoint_every", "keep_last", "log_every"):
            require(getattr(self, name) >= 1, f"train.{name} is {getattr(self, name)}: at least 1 is needed")
        require(0 <= self.label_smoothing < 1, f"train.label_smoothing is {self.label_smoothing}: it lies in [0, 1)")
        require(0 <= self.z_loss < math.inf, f"train.z_loss is {self.z_loss}: it must not be negative")
        require(self.init_from != "" or not self.init_partial, "train.init_partial is True, but there is no init_from")


@dataclass(frozen=True)
class Decode:
    """How text is generated and scored."""

    beams: int = 5
    """Hypotheses kept at each step; 1 is greedy search."""
    nbest: int = 1
    """How many of them are given back, best first; at most beams."""
    length_penalty: float = 1.0
    """alpha in score = log p / penalty ** alpha; 0 compares plain log p."""
    normalization: Literal["fairseq", "transformers", "gnmt", "t2t"] = "fairseq"
    """The penalty: the length, end of text included (fairseq, transformers), or (5 + length) / 6 (gnmt, t2t)."""
    early_stopping: bool | Literal["heuristic"] = True
    """True: a sentence is done once `beams` hypotheses have ended. False: once no live hypothesis can beat them.
    heuristic: once they have ended and none would beat them if it ended here, the default of transformers."""
    max_new_tokens: int = 200
    """Longest output, end-of-text included. Unit: tokens."""
    min_new_tokens: int = 0
    """Shortest output, end-of-text not counted. Unit: tokens."""
    repetition_penalty: float = 1.0
    """Scores of tokens that occurred already (what is continued included, a source not) are divided by it where
    positive, else multiplied (Keskar et al. 2019); 1 changes nothing."""
    no_repeat_ngram: int = 0
    """No sequence of so many tokens is written twice; 0: any may be. Unit: tokens."""
    eos_ids: tuple[int, ...] = ()
    """Ids of the tokens that end an output; none: the tokenizer's end of text."""
    forced_ids: tuple[int, ...] = ()
    """Ids that every output begins with. They count for its length, and in beam search their log p is 0."""
    suppressed_ids: tuple[int, ...] = ()
    """Ids that are never written."""
    tokens_per_batch: int = 4096
    """Budget of a decoding batch: beams x rows x padded length of what is read. Unit: tokens."""
    bleu_tokenizer: Literal["13a", "none", "intl", "char", "zh"] = "13a"
    """sacreBLEU's tokenisation of hypotheses and references; none where the text is tokenised already."""
    lowercase: bool = False
    """Score without regard to case."""

    def __post_init__(self):
        least = {"beams": 1, "nbest": 1, "max_new_tokens": 1, "tokens_per_batch": 1}
        for name, low in (least | {"min_new_tokens": 0, "no_repeat_ngram": 0}).items():
            value = getattr(self, name)
            require(value >= low, f"decode.{name} is {value}: at least {low} is needed")
        for small, large in (("nbest", "beams"), ("min_new_tokens", "max_new_tokens")):
            one, other = getattr(self, small), getattr(self, large)
            require(one <= other, f"decode.{small} is {one}, more than decode.{large}, {other}: give at most as much")
        for name in ("eos_ids", "forced_ids", "suppressed_ids"):
            ids = getattr(self, name)
            require(all(i >= 0 for i in ids), f"decode.{name} is {ids}: ids of tokens are at least 0")
        forced, room = self.forced_ids, self.max_new_tokens
        require(len(forced) <= room, f"decode.forced_ids are {len(forced)}, decode.max_new_tokens is {room}: raise it")
        both = sorted(set(forced) & set(self.suppressed_ids))
        require(not both, f"decode.forced_ids and decode.suppressed_ids both hold {both}: they cannot be written")
        penalty = self.repetition_penalty
        require(0 < penalty < math.inf, f"decode.repetition_penalty is {penalty}: a positive finite number is needed")
        alpha = self.length_penalty
        require(math.isfinite(alpha), f"decode.length_penalty is {alpha}: a finite number is expected")


@dataclass(frozen=True)
class Run(Generic[ModelConfig]):
    """Everything that decides the outcome of a run; written to run_dir/config.json."""

    model: ModelConfig
    """Architecture and sizes."""
    train: Train
    """How long to train, and when to look and save."""
    run_dir: str
    """Directory of the run: config, metrics, result, tokenizer, checkpoints, plots. Started again, it continues."""
    data: Data = field(default_factory=Data)
    """Where the text comes from and how it becomes batches."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """Update rule and learning rate."""
    decode: Decode = field(default_factory=Decode)
    """How text is generated and scored."""
    mesh: Mesh = field(default_factory=Mesh)
    """Devices by axis."""
    precision: Precision = field(default_factory=Precision)
    """Dtypes of training."""

    def __post_init__(self):
        require(
            self.data.max_length <= self.model.max_length,
            f"data.max_length ({self.data.max_length}) exceeds model.max_length ({self.model.max_length})",
        )
        shared = self.data.batching != "buckets" and getattr(self.model, "implementation", "auto") == "splash"
        require(
            not shared,
            f"model.implementation is 'splash', data.batching {self.data.batching!r}: the kernel takes no positions, "
            "which rows of several texts have; use auto or blockwise",
        )
        file = self.data.tokenizer_file
        both = f"train.init_from is {self.train.init_from!r}, data.tokenizer_file {file!r}"
        require(
            not (self.train.init_from and file), f"{both}: init_from brings its own vocabulary, leave the other out"
        )
        shards, parts, multiple = self.mesh.batch_shards, self.train.micro_batches, self.data.rows_multiple
        require(
            multiple % (shards * parts) == 0,
            f"mesh.data x mesh.fsdp is {shards}, train.micro_batches {parts}: their product must divide "
            f"data.rows_multiple, {multiple}, to share every batch; change one of them",
        )
        parts, multiple = self.mesh.sequence, self.data.lengths_multiple
        require(
            multiple % parts == 0,
            f"mesh.sequence is {parts}: it must divide data.lengths_multiple, {multiple}, to share every row",
        )
        require(
            self.decode.max_new_tokens <= self.model.max_length,
            f"decode.max_new_tokens ({self.decode.max_new_tokens}) exceeds model.max_length ({self.model.max_length})",
        )
