"""In: the values of the config keys. Out: frozen pydantic classes, one per section; messages for conflicting values.
Does not read files (load.py does) and does not check what depends on ranks, presets or corpora (build.py does)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from codescent.base.home import expanded, unknown_home
from codescent.base.nearest import nearest_divisors
from codescent.base.visible import visible

AUTO = "auto"  # None in a config file: codescent chooses the value. It also overrides a value of the base file

MAX_SEED = 2**63 - 1
MAX_NAME_BYTES = 200  # file systems allow 255; temporary files add a prefix and a suffix
MAX_SAMPLES = 2**31 - 1


def _expand_home(value: object) -> object:
    if not (isinstance(value, str) and value.startswith("~")):
        return value
    if problem := unknown_home(value):
        raise ValueError(problem)
    return str(expanded(value))


def _check_text(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    if visible(value) != value or any(character < " " or "\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("must be printable Unicode text")
    return value


def _to_path(value: object) -> object:
    """Convert a string to a path: strict pydantic classes refuse to. "" stays a string, because Path("") means "."."""
    return Path(str(_expand_home(value))) if isinstance(value, str) and value.strip() else value


def _check_folder_name(value: str) -> str:
    if _check_text(value) in (".", "..") or "/" in value or "\\" in value or value != value.strip():
        raise ValueError("must be usable as the name of one folder; for a folder elsewhere set run.folder")
    if len(value.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"must be at most {MAX_NAME_BYTES} bytes long: it is the name of a folder")
    return value


def _check_tokenizer(value: str) -> str:
    kind, colon, vocab_size = value.partition(":")
    if kind == "bpe" and not (colon and vocab_size.isascii() and vocab_size.isdigit()):
        raise ValueError('a BPE trained on the corpus is written with its vocabulary size, such as "bpe:4096"')
    return value


Text = Annotated[str, AfterValidator(_check_text)]
TextOrPath = Annotated[str, BeforeValidator(_expand_home), AfterValidator(_check_text)]
FolderName = Annotated[str, AfterValidator(_check_folder_name)]
Tokenizer = Annotated[str, BeforeValidator(_expand_home), AfterValidator(_check_text), AfterValidator(_check_tokenizer)]
Folder = Annotated[Path, BeforeValidator(_to_path), AfterValidator(lambda path: Path(_check_text(str(path))))]
PathFromAnywhere = Annotated[Folder, AfterValidator(Path.absolute)]
"""An absolute path, so that a resumed run finds it from any working directory."""


class Only(NamedTuple):
    """A condition under which a key has an effect: the value of another key passes a test."""

    key: str
    test: Callable[[Any], bool]
    words: str  # such as "parallel.pp >= 2"


def at_least(key: str, number: int) -> Only:
    """Another key is a number of at least `number`."""
    return Only(key, lambda value: value >= number, f"{key} >= {number}")


def one_of(key: str, *values: str) -> Only:
    """Another key has one of the values."""
    return Only(key, lambda value: value in values, f"{key} = {' or '.join(values)}")


def other_than(key: str, excluded: Any) -> Only:
    """Another key has another value than `excluded`."""
    return Only(key, lambda value: value != excluded, f"{key} other than {excluded}")


def key(default: Any, meaning: str, *, only: Only | None = None, **bounds: Any) -> Any:
    """A key with its default and description.

    Args:
        only: the condition under which a value other than the default has an effect; None: it always has, or the task
            or build.py says when.
        bounds: of numbers: ge, gt, le, lt.
    """
    extra: Any = {"only": only} if only else None
    return Field(default, description=meaning, json_schema_extra=extra, **bounds)


def only_of(field: FieldInfo) -> Only | None:
    """The condition of a key, see `key`."""
    extra: Any = field.json_schema_extra
    return extra["only"] if extra else None


def auto(meaning: str, *, only: Only | None = None, **bounds: Any) -> Any:
    """A key with the default None, written "auto" in files."""
    return key(None, meaning, only=only, **bounds)


class Section(BaseModel):
    """One `[section]` of a config: frozen and strictly typed. Unknown keys and infinite numbers are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _auto_is_none(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        optional = {name for name, field in cls.model_fields.items() if field.default is None}
        return {name: None if name in optional and value == AUTO else value for name, value in values.items()}


class Run(Section):
    """Name, folder and seed of the run."""

    name: FolderName = key("default", "name of the run")
    folder: Folder | None = auto("run folder; auto: runs/NAME")
    seed: int = key(1337, "seed of initial weights, sample order and dropout", ge=0, le=MAX_SEED)


class Model(Section):
    """The model. A size with the value auto comes from the preset."""

    kind: Literal["gpt2", "llama", "transformer", "bert"] | None = auto(
        "kind of model; auto: the kind of the preset, or gpt2 without a preset"
    )
    preset: Text | None = auto(
        "published sizes: gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama3-8b, llama3-70b, llama3.1-8b, llama3.1-70b, "
        "llama3.1-405b, transformer-base, transformer-big, bert-base-uncased or bert-large-uncased; or llama-tiny; "
        "auto: no preset, sizes are given here",
    )
    weights: PathFromAnywhere | None = auto(
        "local Hugging Face folder of initial weights (gpt2, llama, bert); auto: random weights"
    )
    num_layers: int | None = auto("blocks (gpt2, llama, bert)", ge=1, le=10_000)
    num_encoder_layers: int | None = auto("layers of the encoder (transformer)", ge=1, le=10_000)
    num_decoder_layers: int | None = auto("layers of the decoder (transformer)", ge=1, le=10_000)
    num_heads: int | None = auto("attention heads; must divide hidden_dim", ge=1, le=10_000)
    num_kv_heads: int | None = auto(
        "key and value heads (llama); must divide num_heads; auto without a preset: num_heads", ge=1, le=10_000
    )
    hidden_dim: int | None = auto("channels of the residual stream", ge=1, le=1_000_000)
    ffn_dim: int | None = auto(
        "hidden channels of the MLP; auto without a preset: 4 x hidden_dim; for a llama 8/3 x hidden_dim, rounded up "
        "to a multiple of 64",
        ge=1,
    )
    vocab_size: int | None = auto(
        "rows of the token embedding; auto without a preset: the vocabulary size of the tokenizer", ge=1
    )
    seq_len: int | None = auto(
        "longest sequence in tokens (gpt2, llama, bert); for gpt2 and bert also the rows of the position embedding",
        ge=1,
    )
    source_len: int | None = auto("tokens of a sample that the encoder reads (transformer)", ge=1)
    target_len: int | None = auto("tokens after the source, which the decoder reads and predicts (transformer)", ge=1)
    rope_theta: float | None = auto("base of the rotary frequencies (llama); auto without a preset: 10000.0", ge=1)
    norm_eps: float | None = auto(
        "epsilon that the norms add to the mean square (llama); auto without a preset: 1e-05", gt=0
    )
    tie_head: bool | None = auto(
        "the head shares the matrix of the token embedding (llama; gpt2 always does); auto: false"
    )
    norm: Literal["last", "first"] | None = auto(
        "norms (transformer): last: after each residual sum; first: before each sublayer; auto: last"
    )
    activation: Literal["relu", "gelu"] | None = auto("activation of the MLP (transformer); auto: relu")
    causal: bool | None = auto("a target position attends to no later position (transformer); auto: true")
    embedding: Literal["tied", "untied", "none"] | None = auto(
        "embedding matrices (transformer): tied: one for source, target and head; untied: three; none: source and "
        "target are vectors (data.task tensors); auto: tied",
    )
    dropout: float = key(0.0, "probability of dropout in training (gpt2, transformer, bert)", ge=0, lt=1)
    bias: bool | None = auto(
        "biases in linear layers and norms (gpt2, transformer; bert always, llama never); auto: true where the model "
        "can have them",
    )


class Lora(Section):
    """Low-rank adapters: they are trained while the matrices of the model are frozen (docs/lora.md)."""

    rank: int | None = auto("rank of the adapters; auto: no adapters, all parameters are trained", ge=1, le=1_000_000)
    alpha: float | None = auto("the output of an adapter is multiplied by alpha / rank; auto: 2 x rank", gt=0)
    targets: Text | None = auto(
        'layers with an adapter, such as "attn.qkv, mlp.down"; auto: every matrix of the blocks'
    )
    whole: Text | None = auto('layers trained in full, such as "norm_1, head"; auto: none, or the head of data.task qa')


class Data(Section):
    """The data and the task."""

    corpus: TextOrPath = key(
        "python-stdlib",
        "python-stdlib, shakespeare, openwebtext or squad; or the path of a text file, a folder, a glob, a JSONL file "
        "or a folder of token shards; for data.task qa a file in SQuAD's format; for data.task tensors a file (.h5, "
        ".pt, .safetensors), or synthetic:SAMPLES or synthetic:SAMPLES:SEED: random numbers of the model's sizes",
    )
    task: Text | None = auto(
        "what the model predicts: lm: each next token (gpt2, llama, transformer); sft: the tokens of a response to "
        "its prompt, or of the assistant in a conversation (gpt2, llama); mlm: masked tokens (bert); qa: where the "
        "answer to a question begins and ends (bert); tensors: vectors of the target (transformer); seq2seq: a line "
        "reversed or copied, see data.pairs (transformer); auto: the task that fits the corpus or model.kind",
    )
    template: Text = key(
        "{prompt}{response}", 'text of a prompt and its response (sft), such as "Question: {prompt} Answer: {response}"'
    )
    chat_template: PathFromAnywhere | None = auto(
        "path of the Jinja template that formats messages (sft): a Hugging Face folder, its tokenizer_config.json or "
        "its chat_template.jinja; auto: none, lines have a prompt and a response, formatted by data.template",
    )
    prompt_key: Text = key("prompt", "key of a JSONL line that holds the prompt (sft)")
    response_key: Text = key("response", "key of a JSONL line that holds the response (sft)")
    messages_key: Text = key("messages", "key of a JSONL line with a list of messages, each a role and a content (sft)")
    pairs: Literal["reverse", "copy"] = key(
        "reverse", "target of a line (seq2seq): reverse: the tokens of the line in reverse order; copy: its tokens"
    )
    format: Literal["memory", "hdf5", "pt", "safetensors"] | None = auto(
        "storage of tensors: the format of the file, or the format that synthetic ones are written in; memory: every "
        "rank reads the whole file, or generates synthetic ones; auto: the format of the file, memory for synthetic "
        "ones",
    )
    tokenizer: Tokenizer = key(
        "char",
        "char, byte, gpt2, bert, bert-cased, bpe:VOCAB (a BPE trained on the corpus), bert:FILE (a vocabulary of "
        "WordPiece) or the path of a tokenizer JSON",
    )
    folder: Folder = key(Path("datasets"), "folder of prepared corpora")
    seq_len: int | None = auto(
        "tokens per sample; auto: model.seq_len, or model.source_len + target_len (transformer)", ge=1
    )
    validation_fraction: float = key(0.1, "share of the corpus, at its end, used for validation", gt=0, le=0.5)
    text_key: Text = key("text", "key of a JSONL line that holds the text")
    validation: TextOrPath | None = auto(
        "file of validation questions in SQuAD's format (qa); auto: SQuAD's dev-v1.1.json"
    )
    stride: int = key(128, "tokens from the start of one window of a context to the start of the next (qa)", ge=1)
    question_len: int = key(64, "longest question in tokens; longer ones are truncated (qa)", ge=1)
    train_questions: int | None = auto("train on this many questions, the first ones (qa); auto: all", ge=1)
    validation_questions: int | None = auto("validate on this many questions, the first ones (qa); auto: all", ge=1)
    prefetch: int = key(16, "largest number of steps whose batches are read ahead; 0: read when needed", ge=0)


class Train(Section):
    """Number of steps, batch sizes, precision and device."""

    num_steps: int = key(1000, "number of weight updates", ge=1)
    global_batch_size: int = key(12, "samples per step, over all ranks", ge=1, le=MAX_SAMPLES)
    microbatch_size: int | None = auto(
        "samples of one forward pass of a rank; gradients are accumulated; auto: all samples of the rank", ge=1
    )
    precision: Literal["fp64", "fp32", "bf16"] = key(
        "fp32", "number format of weights and activations; bf16 has an fp32 master copy of the weights"
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto: cuda where there is one, else cpu")
    compile: Literal["none", "blocks", "model"] = key(
        "none", "what torch.compile compiles: nothing, each block by itself, or the whole model"
    )
    eval_every: int = key(250, "steps between validation losses; 0: never", ge=0)
    eval_samples: int | None = auto(
        "samples per validation loss; auto: the whole validation split", ge=1, only=other_than("train.eval_every", 0)
    )
    check_every: int = key(
        100, "steps between checks that the replicas are equal; 0: only at the start and before checkpoints", ge=0
    )
    matmul: Literal["auto", "exact", "fast"] = key(
        "auto",
        "kernels of fp32 matrix products on CPU: exact: default precision of torch; fast: medium precision of torch; "
        "auto: the faster one, measured at the start, if its error is small enough",
        only=one_of("train.precision", "fp32"),
    )
    allocator: Literal["auto", "system"] = key(
        "auto",
        "auto: malloc reuses large blocks in the next step (Linux, glibc); system: settings of malloc are not changed",
    )
    head_chunk_tokens: int = key(
        1024, "tokens whose logits are in memory at the same time; 0: all tokens of the micro-batch", ge=0
    )
    num_threads: int | None = auto("threads per rank; auto: cores / ranks on this machine", ge=1, le=1024)
    deterministic: bool = key(False, "stop with an error at operations whose result varies between identical runs")


class Optimizer(Section):
    """The update rule and its learning rate."""

    kind: Literal["adamw", "adam", "sgd", "adagrad", "adadelta", "rmsprop"] = key("adamw", "update rule")
    learning_rate: float = key(6e-4, "highest learning rate, reached after the warm-up", gt=0)
    min_learning_rate: float = key(
        0.0, "learning rate at the end of the decay", ge=0, only=other_than("optimizer.schedule", "constant")
    )
    weight_decay: float = key(0.1, "weight decay of matrices and embeddings; biases and norms have none", ge=0)
    beta1: float = key(
        0.9, "decay of the mean of gradients", ge=0, lt=1, only=one_of("optimizer.kind", "adamw", "adam")
    )
    beta2: float = key(
        0.95,
        "decay of the mean of squared gradients",
        ge=0,
        lt=1,
        only=one_of("optimizer.kind", "adamw", "adam", "rmsprop", "adadelta"),
    )
    eps: float = key(1e-8, "added to denominators", gt=0, only=other_than("optimizer.kind", "sgd"))
    momentum: float = key(0.9, "momentum", ge=0, lt=1, only=one_of("optimizer.kind", "sgd", "rmsprop"))
    fused: bool = key(
        True,
        "one kernel for the whole update, if torch has one for this update rule",
        only=one_of("optimizer.kind", "adamw", "adam", "sgd"),
    )
    max_grad_norm: float = key(1.0, "global gradient norm is clipped to this; 0: no clipping", ge=0)
    schedule: Literal["cosine", "linear", "constant"] = key("cosine", "decay of the learning rate after the warm-up")
    warmup_steps: int = key(0, "steps over which the learning rate rises from 0", ge=0)
    decay_steps: int | None = auto(
        "step at which min_learning_rate is reached, counted from 0; auto: train.num_steps",
        ge=1,
        only=other_than("optimizer.schedule", "constant"),
    )
    scale_learning_rate: Literal["none", "linear", "sqrt"] = key(
        "none", "multiply both learning rates by the number of data-parallel ranks, or by its square root"
    )


class Parallel(Section):
    """How the ranks divide the work. World size = pp x dp_replicate x dp_shard x cp x tp."""

    ranks: int = key(1, "ranks that `codescent train` starts on this machine, unless a launcher started it", ge=1)
    dp_replicate: int | None = auto(
        "model replicas, each with its part of the batch; auto: world size / all other axes", ge=1
    )
    pp: int = key(1, "pipeline stages", ge=1)
    schedule: Literal["naive", "gpipe", "1f1b", "interleaved", "zero-bubble"] = key(
        "1f1b",
        "pipeline schedule: the order in which a stage computes its micro-batches",
        only=at_least("parallel.pp", 2),
    )
    virtual_stages: int = key(
        1,
        "chunks of the model on each pipeline stage; at least 2",
        ge=1,
        only=one_of("parallel.schedule", "interleaved"),
    )
    cut: Literal["cost", "encoder-decoder"] = key(
        "cost",
        "where pipeline stages begin: cost: the most expensive stage is as cheap as possible; "
        "encoder-decoder: also, one stage begins at the first layer of the decoder",
    )
    dp_shard: int = key(1, "ranks that shard one replica, each with its part of the batch", ge=1)
    zero_stage: int = key(
        3,
        "what dp_shard shards: 1: optimizer state; 2: also gradients; 3: also weights",
        ge=1,
        le=3,
        only=at_least("parallel.dp_shard", 2),
    )
    cp: int = key(1, "ranks that divide each sequence (context parallelism)", ge=1)
    context: Literal["ring", "all-gather"] = key(
        "ring", "how the cp ranks exchange keys and values", only=at_least("parallel.cp", 2)
    )
    tp: int = key(1, "ranks that divide each matrix (tensor parallelism)", ge=1)
    sequence_parallel: bool = key(
        True,
        "norms, dropout and residual sums are divided along the sequence",
        only=at_least("parallel.tp", 2),
    )
    recompute: Literal["none", "selective", "full"] = key(
        "none",
        "activations that the backward pass recomputes to save memory: selective: GELU or SwiGLU, and attention "
        "probabilities; full: every block, from its input",
    )
    offload: Literal["none", "optimizer", "all"] = key(
        "none",
        "offload to host memory, for training on CUDA: optimizer: master weights and optimizer state, updated there; "
        "all: also weights (dp_shard with zero_stage 3)",
    )
    data_parallel: int = key(
        1, "CUDA devices of one process (torch.nn.DataParallel), a baseline for dp_replicate", ge=1, le=1024
    )
    bucket_bytes: int = key(16_777_216, "bytes of gradients that are reduced in one collective", ge=1)
    reduce_dtype: Literal["auto", "fp32", "bf16"] = key(
        "auto",
        "number format in which gradients are sent; auto: train.precision; with zero_stage 1 and several micro-batches "
        "of bf16: fp32",
    )
    timeout_s: float = key(600.0, "seconds that a rank waits for the others in a collective", gt=0, le=604_800)


class Checkpoint(Section):
    """When checkpoints are written, and which of them stay."""

    every: int = key(250, "steps between checkpoints; 0: only at the end", ge=0)
    keep_last: int = key(2, "number of newest checkpoints to keep", ge=1)
    keep_best: bool = key(
        True, "also keep the checkpoint with the lowest validation loss", only=other_than("train.eval_every", 0)
    )


class Log(Section):
    """What is printed and logged."""

    every: int = key(10, "steps between printed lines", ge=1)
    metrics_every: int | None = auto(
        "steps between rows of metrics; auto: 1, or train.num_steps / 100,000, rounded up, in a longer run", ge=1
    )
    sample_tokens: int = key(0, "tokens that the model generates at the end of the run; 0: none", ge=0)
    tensorboard: bool = key(True, "write TensorBoard files, where tensorboard is installed")


class Config(BaseModel):
    """The config of a run. Raises pydantic's ValidationError: wrong types, values out of range, contradictions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Run = Run()
    model: Model = Model()
    lora: Lora = Lora()
    data: Data = Data()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if problems := [f"{keys[0]}: {problem}" for keys, problem in contradictions(self)]:
            raise ValueError("; ".join(problems))
        return self


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
"""The class of each section by name, in the order of config files and docs."""


Contradiction = tuple[tuple[str, ...], str]
"""Keys whose values contradict each other, and the problem. Messages print it after the first key."""


def contradictions(config: Config) -> Iterator[Contradiction]:
    """Contradictions that do not depend on world size, preset or corpus. build.py finds the others."""
    optimizer, train = config.optimizer, config.train
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield (
            ("optimizer.min_learning_rate", "optimizer.learning_rate"),
            f"given {optimizer.min_learning_rate}, which is above optimizer.learning_rate ({optimizer.learning_rate}); "
            "the learning rate decays towards it",
        )
    if optimizer.decay_steps is not None and optimizer.warmup_steps >= optimizer.decay_steps:
        yield (
            ("optimizer.warmup_steps", "optimizer.decay_steps"),
            f"given {optimizer.warmup_steps}, but the decay that follows ends at optimizer.decay_steps "
            f"({optimizer.decay_steps}); must be a whole number from 0 to {optimizer.decay_steps - 1}",
        )
    yield from _device_contradictions(config)
    yield from _lora_contradictions(config)
    size, samples = train.microbatch_size, train.global_batch_size
    if size is not None and samples % size:
        yield (
            ("train.microbatch_size", "train.global_batch_size"),
            f"given {size}, which does not divide train.global_batch_size ({samples}); "
            f"the nearest smaller value that does is {nearest_divisors(samples, size)[0]}",
        )


def _lora_contradictions(config: Config) -> Iterator[Contradiction]:
    """Keys of [lora] without lora.rank, and other keys that exclude adapters."""
    lora = config.lora
    if lora.rank is None:
        for name in ("alpha", "targets", "whole"):
            if getattr(lora, name) is not None:
                yield (f"lora.{name}", "lora.rank"), "given, but lora.rank is not: there are no adapters"
        return
    if config.train.compile == "model":
        yield (
            ("train.compile", "lora.rank"),
            'given "model", but lora.rank is set: the compiler cannot begin gradients after the embedding, which is '
            'not trained; set train.compile to "blocks"',
        )
    if config.parallel.offload == "optimizer":
        yield (
            ("parallel.offload", "lora.rank"),
            'given "optimizer", but lora.rank is set: the optimizer has state for the adapters only, which is small; '
            'set parallel.offload to "none", or to "all" (also weights, with dp_shard and zero_stage 3)',
        )


def _device_contradictions(config: Config) -> Iterator[Contradiction]:
    """Keys that need CUDA or exclude torch.compile. With train.device = "auto" each rank checks its device later."""
    train, parallel = config.train, config.parallel
    if train.device == "cpu" and parallel.offload != "none":
        yield (
            ("parallel.offload", "train.device"),
            f'given "{parallel.offload}", but train.device is "cpu", which computes in host memory: there is '
            'nothing to offload; set it to "none"',
        )
    if train.device == "cpu" and parallel.data_parallel > 1:
        yield (
            ("parallel.data_parallel", "train.device"),
            f'given {parallel.data_parallel}, but train.device is "cpu", and torch.nn.DataParallel divides a batch '
            f"over CUDA devices; for several CPU ranks set parallel.ranks to {parallel.data_parallel}, without it",
        )
    if train.compile != "none" and parallel.pp > 1 and parallel.schedule == "zero-bubble":
        yield (
            ("parallel.schedule", "train.compile"),
            f'given "zero-bubble", but train.compile is "{train.compile}": compiled layers compute all gradients at '
            'once and cannot delay those of weights; set train.compile to "none", or parallel.schedule to "1f1b"',
        )
    if train.compile != "none" and parallel.data_parallel > 1:
        yield (
            ("parallel.data_parallel", "train.compile"),
            f'given {parallel.data_parallel}, but train.compile is "{train.compile}": torch.nn.DataParallel copies '
            'modules in every step, and compiled modules cannot be copied; set train.compile to "none", or '
            f"parallel.ranks to {parallel.data_parallel} instead of data_parallel",
        )
