"""In: the values of a run's keys. Out: the run as typed, frozen models.
Does not read files (configfile does), knows no torch, and leaves what depends on ranks or presets to build."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from codescent.config.contradictions import contradictions

AUTO = "auto"
"""How a file writes None, "let codescent decide": the only way to take back a value that a base file set."""

MAX_SEED = 2**63 - 1
MAX_NAME_BYTES = 200  # what is written beside a folder has a longer name, and file systems end at 255
MAX_SAMPLES = 2**31 - 1


def _expand_home(value: object) -> object:
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~") else value  # noqa: PTH111


def _check_text(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    if any(character < " " or "\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("must be printable Unicode text")
    return value


def _check_path(value: Path) -> Path:
    _check_text(str(value))
    return value


def _to_path(value: object) -> object:
    """A string to a path; strict models would refuse it. An empty string stays one, for Path("") means "."."""
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
Folder = Annotated[Path, BeforeValidator(_to_path), AfterValidator(_check_path)]
PathFromAnywhere = Annotated[Folder, AfterValidator(Path.absolute)]
"""Kept so that a run finds it again, wherever the next command is given."""


class Section(BaseModel):
    """One `[section]` of a run's file: frozen, strictly typed, unknown keys refused, numbers finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _auto_is_none(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        optional = {name for name, field in cls.model_fields.items() if field.default is None}
        return {name: None if name in optional and value == AUTO else value for name, value in values.items()}


class Run(Section):
    """Which run this is."""

    name: FolderName = Field("default", description="name of the run")
    folder: Folder | None = Field(None, description="run folder; auto: runs/NAME")
    seed: int = Field(
        1337, ge=0, le=MAX_SEED, description="seed of the initial weights, of the order of the samples and of dropout"
    )


class Model(Section):
    """What is trained. A size left at auto is the preset's."""

    kind: Literal["gpt2", "llama", "transformer", "bert"] | None = Field(
        None, description="family of models; auto: the preset's, without one gpt2"
    )
    preset: Text | None = Field(
        None,
        description="published sizes: gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama3-8b, llama3-70b, llama3.1-8b, "
        "llama3.1-70b, llama3.1-405b, transformer-base, transformer-big, bert-base-uncased or bert-large-uncased; or "
        "llama-tiny; auto: none, sizes are given here",
    )
    weights: PathFromAnywhere | None = Field(
        None,
        description="local Hugging Face folder whose weights training begins with (gpt2, llama, bert); auto: none, "
        "they are drawn from run.seed",
    )
    num_layers: int | None = Field(None, ge=1, le=10_000, description="blocks (gpt2, llama, bert)")
    num_encoder_layers: int | None = Field(None, ge=1, le=10_000, description="layers of the encoder (transformer)")
    num_decoder_layers: int | None = Field(None, ge=1, le=10_000, description="layers of the decoder (transformer)")
    num_heads: int | None = Field(None, ge=1, le=10_000, description="attention heads; must divide hidden_dim")
    num_kv_heads: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description="heads of keys and values (llama); must divide num_heads; auto without a preset: num_heads",
    )
    hidden_dim: int | None = Field(None, ge=1, le=1_000_000, description="channels of the residual stream")
    ffn_dim: int | None = Field(
        None,
        ge=1,
        description="channels inside the MLP; auto without a preset: 4 times hidden_dim, of a llama 8/3 of it, to the "
        "next multiple of 64",
    )
    vocab_size: int | None = Field(
        None, ge=1, description="rows of the token embedding; auto without a preset: the tokenizer's"
    )
    seq_len: int | None = Field(
        None,
        ge=1,
        description="longest sequence in tokens (gpt2, llama, bert); of gpt2 and bert the rows of the position "
        "embedding",
    )
    source_len: int | None = Field(None, ge=1, description="tokens that the encoder reads of a sample (transformer)")
    target_len: int | None = Field(
        None, ge=1, description="tokens that follow those, read and continued by the decoder (transformer)"
    )
    rope_theta: float | None = Field(
        None, ge=1, description="base of the rotary frequencies (llama); auto without a preset: 10000.0"
    )
    norm_eps: float | None = Field(
        None, gt=0, description="added to the mean square in the norms (llama); auto without a preset: 1e-05"
    )
    tie_head: bool | None = Field(
        None, description="the head reads the token embedding (llama; gpt2's always does); auto: false"
    )
    norm: Literal["last", "first"] | None = Field(
        None, description="where a layer's norms are (transformer): after each sum, or before each part; auto: last"
    )
    activation: Literal["relu", "gelu"] | None = Field(None, description="inside the MLP (transformer); auto: relu")
    causal: bool | None = Field(
        None, description="a position of the target sees earlier ones only (transformer); auto: true"
    )
    embedding: Literal["tied", "untied", "none"] | None = Field(
        None,
        description="one matrix for source, target and head, or three (transformer); none: both are vectors "
        "(data.task tensors); auto: tied",
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="share of activations dropped while training (gpt2, transformer, bert)"
    )
    bias: bool | None = Field(
        None,
        description="biases in linear layers and norms (gpt2, transformer; a bert has them, a llama has none); auto: "
        "true where there can be",
    )


class Lora(Section):
    """Adapters beside matrices that stay as they are; they are trained, and nothing else (docs/lora.md)."""

    rank: int | None = Field(
        None, ge=1, le=1_000_000, description="rank of the adapters; auto: there are none, all parameters are trained"
    )
    alpha: float | None = Field(
        None, gt=0, description="what an adapter adds is multiplied by alpha / rank; auto: twice the rank"
    )
    targets: Text | None = Field(
        None,
        description='layers that get one, with commas between, such as "attn.qkv, mlp.down"; auto: every matrix of the '
        "blocks",
    )
    whole: Text | None = Field(
        None,
        description='layers that are trained as they are, beside the adapters, such as "norm_1, head"; auto: none but '
        "the head of data.task qa",
    )


class Data(Section):
    """What it is trained on."""

    corpus: TextOrPath = Field(
        "python-stdlib",
        description="python-stdlib, shakespeare, openwebtext or squad; or the path of a text file, a folder, a glob, a "
        "JSONL file or a folder of token shards; of questions a file of SQuAD's form; of tensors a file (.h5, .pt, "
        ".safetensors), or synthetic:SAMPLES or synthetic:SAMPLES:SEED: random numbers of the model's sizes",
    )
    task: Text | None = Field(
        None,
        description="what is wanted of a sample: lm: each next token (gpt2, llama, transformer); sft: those of a "
        "response to its prompt, or of the assistant in a conversation (gpt2, llama); mlm: the tokens that were "
        "masked; qa: where the answer to a question begins and ends (bert); tensors: the target's vectors; seq2seq: "
        "of a line what data.pairs says (transformer); auto: what the corpus or model.kind is made for",
    )
    template: Text = Field(
        "{prompt}{response}",
        description='how a prompt and its response read (sft), such as "Question: {prompt} Answer: {response}"',
    )
    chat_template: PathFromAnywhere | None = Field(
        None,
        description="path of the Jinja template by which messages read (sft): a Hugging Face folder, its "
        "tokenizer_config.json or its chat_template.jinja; auto: none, lines have a prompt and a response, and "
        "data.template says how these read",
    )
    prompt_key: Text = Field("prompt", description="which key of a JSONL line holds the prompt (sft)")
    response_key: Text = Field("response", description="which key of a JSONL line holds the response (sft)")
    messages_key: Text = Field(
        "messages", description="which key of a JSONL line holds a list of messages, each a role and a content (sft)"
    )
    pairs: Literal["reverse", "copy"] = Field(
        "reverse",
        description="what is wanted of a line (seq2seq): its tokens from the last to the first, or as they are",
    )
    format: Literal["memory", "hdf5", "pt", "safetensors"] | None = Field(
        None,
        description="how tensors are kept: synthetic ones are written so, a file is so already; memory: made or read "
        "whole by every rank; auto: as the file is, synthetic ones in memory",
    )
    tokenizer: Tokenizer = Field(
        "char",
        description="char, byte, gpt2, bert, bert-cased, bpe:VOCAB (a BPE trained on the corpus), bert:FILE (a "
        "vocabulary of WordPiece) or the path of a tokenizer JSON",
    )
    folder: Folder = Field(Path("datasets"), description="folder that prepared corpora are kept in")
    seq_len: int | None = Field(
        None,
        ge=1,
        description="tokens per sample; auto: model.seq_len, of a transformer model.source_len + model.target_len",
    )
    validation_fraction: float = Field(
        0.1, gt=0, le=0.5, description="share of the corpus, at its end, kept for validation"
    )
    text_key: Text = Field("text", description="which key of a JSONL line holds the text")
    validation: TextOrPath | None = Field(
        None, description="validation questions (qa): a file of SQuAD's form; auto: SQuAD's dev-v1.1.json"
    )
    stride: int = Field(128, ge=1, description="tokens between the begins of two windows of a context (qa)")
    question_len: int = Field(64, ge=1, description="longest question in tokens; what is over is cut off (qa)")
    train_questions: int | None = Field(None, ge=1, description="the first so many to train on (qa); auto: all")
    validation_questions: int | None = Field(
        None, ge=1, description="the first so many to validate with (qa); auto: all"
    )
    prefetch: int = Field(16, ge=0, description="steps whose batches are read ahead at the most; 0: read when needed")


class Train(Section):
    """How long, in which portions, on what."""

    num_steps: int = Field(1000, ge=1, description="updates of the weights")
    global_batch_size: int = Field(12, ge=1, le=MAX_SAMPLES, description="samples per step, over all ranks")
    microbatch_size: int | None = Field(
        None,
        ge=1,
        description="samples that a rank computes at once, the rest being accumulated; auto: all of the rank's",
    )
    precision: Literal["fp64", "fp32", "bf16"] = Field(
        "fp32", description="number format of weights and activations; bf16 keeps an fp32 master copy of the weights"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one, else cpu")
    compile: Literal["none", "blocks", "model"] = Field(
        "none", description="what torch.compile is given: nothing, each block by itself, or the whole model"
    )
    eval_every: int = Field(250, ge=0, description="steps between validation losses; 0: never")
    eval_samples: int | None = Field(
        None, ge=1, description="samples of a validation loss; auto: the whole validation split"
    )
    matmul: Literal["auto", "exact", "fast"] = Field(
        "auto",
        description="kernels of fp32 matrix products on CPU; auto: tested for speed and error at the start; exact: "
        "torch's default; fast: the others",
    )
    allocator: Literal["auto", "system"] = Field(
        "auto", description="auto: malloc keeps big blocks for the next step (Linux, glibc); system: malloc as it is"
    )
    head_chunk_tokens: int = Field(
        1024, ge=0, description="tokens whose logits exist at the same time; 0: those of the whole micro-batch"
    )
    num_threads: int | None = Field(
        None, ge=1, le=1024, description="threads per rank; auto: cores / ranks on this machine"
    )
    deterministic: bool = Field(False, description="refuse operations whose result varies between identical runs")


class Optimizer(Section):
    """The update rule and its learning rate."""

    kind: Literal["adamw", "adam", "sgd", "adagrad", "adadelta", "rmsprop"] = Field("adamw", description="update rule")
    learning_rate: float = Field(6e-4, gt=0, description="highest learning rate, reached after the warm-up")
    min_learning_rate: float = Field(0.0, ge=0, description="learning rate at the end of the decay")
    weight_decay: float = Field(0.1, ge=0, description="decay of matrices and embeddings; never of biases and norms")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the mean of gradients (adamw, adam)")
    beta2: float = Field(
        0.95, ge=0, lt=1, description="decay of the mean of squared gradients (adamw, adam, rmsprop, adadelta)"
    )
    eps: float = Field(1e-8, gt=0, description="added to denominators (all but sgd)")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum (sgd, rmsprop)")
    fused: bool = Field(True, description="one kernel for the whole update, where torch has it for this rule")
    max_grad_norm: float = Field(1.0, ge=0, description="global gradient norm is clipped to this; 0: no clipping")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="course of the learning rate after the warm-up"
    )
    warmup_steps: int = Field(0, ge=0, description="steps over which the learning rate rises from 0")
    decay_steps: int | None = Field(
        None, ge=1, description="step at which min_learning_rate is reached, counted from 0; auto: train.num_steps"
    )
    scale_learning_rate: Literal["none", "linear", "sqrt"] = Field(
        "none", description="multiply both learning rates by the number of data-parallel ranks, or by its square root"
    )


class Parallel(Section):
    """How the ranks divide the work. World size = pp x dp_replicate x dp_shard x cp x tp."""

    ranks: int = Field(1, ge=1, description="ranks that `codescent train` starts here, unless a launcher started it")
    dp_replicate: int | None = Field(
        None, ge=1, description="copies of the model, each on its part of the batch; auto: what is left of the world"
    )
    pp: int = Field(1, ge=1, description="pipeline stages")
    schedule: Literal["naive", "gpipe", "1f1b", "interleaved", "zero-bubble"] = Field(
        "1f1b", description="order in which a pipeline stage does its micro-batches"
    )
    virtual_stages: int = Field(
        1, ge=1, description="chunks of the model on each pipeline stage (schedule interleaved: at least 2)"
    )
    cut: Literal["cost", "encoder-decoder"] = Field(
        "cost",
        description="where a pipeline's stages begin: where the dearest is cheapest; or so that one begins at the "
        "decoder's first layer, too",
    )
    dp_shard: int = Field(1, ge=1, description="ranks that share one copy's weights, each on its part of the batch")
    zero_stage: int = Field(
        3, ge=1, le=3, description="what dp_shard divides: 1 the optimizer's state, 2 gradients too, 3 weights too"
    )
    cp: int = Field(1, ge=1, description="ranks that share one sequence")
    context: Literal["ring", "all-gather"] = Field(
        "ring", description="how keys and values reach the ranks that share a sequence"
    )
    tp: int = Field(1, ge=1, description="ranks that share one matrix")
    sequence_parallel: bool = Field(
        True, description="ranks that share matrices divide the sequence between them where no matrix is read"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="made again in backward to save memory: selective: GELU or SwiGLU, and attention probabilities; "
        "full: every block, from its input",
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="kept in the host's memory, for training on CUDA: optimizer: master weights and optimizer state, "
        "updated there; all: weights too (dp_shard with zero_stage 3)",
    )
    data_parallel: int = Field(
        1,
        ge=1,
        le=1024,
        description="CUDA devices of one process, by torch's DataParallel: to be compared with dp_replicate",
    )
    bucket_bytes: int = Field(16_777_216, ge=1, description="bytes of gradients that are reduced together")
    reduce_dtype: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="number format in which gradients are sent; auto: train.precision, fp32 where bf16 micro-batches "
        "are added first",
    )
    timeout_s: float = Field(
        600.0, gt=0, le=604_800, description="seconds that a rank waits for the others in a collective"
    )


class Checkpoint(Section):
    """When the run is saved and what is kept."""

    every: int = Field(250, ge=0, description="steps between checkpoints; 0: only at the end")
    keep_last: int = Field(2, ge=1, description="newest checkpoints that are kept")
    keep_best: bool = Field(True, description="keep the one of the lowest validation loss, too")


class Log(Section):
    """What is shown."""

    every: int = Field(10, ge=1, description="steps between printed lines")
    sample_tokens: int = Field(0, ge=0, description="tokens that the model writes at the end of the run; 0: none")
    tensorboard: bool = Field(True, description="write TensorBoard files, where tensorboard is installed")


class Config(BaseModel):
    """A whole run. Raises pydantic's ValidationError on values of the wrong type, out of range, or contradictory."""

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
        problems = [f"{contradiction.keys[0]}: {contradiction.problem}" for contradiction in contradictions(self)]
        if problems:
            raise ValueError("; ".join(problems))
        return self


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
"""Section name to its model, in the order in which files and tables list them."""
