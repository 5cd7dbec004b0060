"""In: the values of the config keys. Out: frozen pydantic classes, one per section, with every key.
Does not read files (load.py does) and does not check what depends on ranks, presets or corpora (build does)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from codescent.config.contradictions import contradictions
from codescent.config.keys import (
    MAX_SAMPLES,
    MAX_SEED,
    Corpus,
    Folder,
    FolderName,
    Functions,
    ModelConfig,
    OwnName,
    PathFromAnywhere,
    RewardName,
    Section,
    Text,
    Tokenizer,
    Weights,
    at_least,
    auto,
    given,
    key,
    not_given,
    one_of,
    other_than,
)
from codescent.config.mixture import MIXTURE, Mixture
from codescent.config.optimizer import Optimizer as Optimizer
from codescent.config.parallel import Parallel as Parallel
from codescent.config.survive import Survive as Survive

RECORDS = at_least("profile.active", 1)
"""Only a run that records a profile reads the key."""

Compiled = Literal["none", "blocks", "model"]
"""What torch.compile may compile."""


class Run(Section):
    """Name, folder and seed of the run."""

    name: FolderName = key("default", "name of the run")
    folder: Folder | None = auto("run folder; auto: runs/NAME")
    seed: int = key(1337, "seed of initial weights, sample order and dropout", ge=0, le=MAX_SEED)
    cluster: Text | None = auto(
        "machines, a shipped cluster such as h100-sxm or a file: the run begins with a prediction, in prediction.json, "
        "and ends with what was measured beside it; auto: none"
    )


class Model(Section):
    """The model. A size with the value auto comes from the preset."""

    kind: Literal["gpt2", "llama", "transformer", "bert", "transformers"] | OwnName | None = auto(
        "kind of model; transformers: any language model of that library, on the data axes; auto: the kind of the "
        "preset, or of the folder model.weights if it gives the sizes, else gpt2; a name: a kind of yours "
        "(codescent docs own_names)"
    )
    config: ModelConfig | None = auto(
        "config.json of the model (transformers): its path, that of its folder, a name of the hub such as "
        "hf://EleutherAI/pythia-160m, or its content; auto: that of model.weights"
    )
    preset: Text | None = auto(
        "published sizes: gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama3-8b, llama3-70b, llama3.1-8b, llama3.1-70b, "
        "llama3.1-405b, transformer-base, transformer-big, bert-base-uncased or bert-large-uncased; or llama-tiny; "
        "auto: no preset, sizes are given here",
    )
    weights: Weights | None = auto(
        "Hugging Face folder of initial weights (gpt2, llama, bert, transformers), or a name of the hub such as "
        "hf://Qwen/Qwen3-0.6B@REVISION; also of the model's kind and sizes if the sizes are not given; auto: random "
        "weights"
    )
    adapters: PathFromAnywhere | None = auto(
        "folder of adapters of peft that are merged into model.weights when these are read; auto: none",
        only=given("model.weights"),
    )
    num_layers: int | None = auto("blocks (gpt2, llama, bert)", ge=1, le=10_000)
    num_encoder_layers: int | None = auto("layers of the encoder (transformer)", ge=1, le=10_000)
    num_decoder_layers: int | None = auto("layers of the decoder (transformer)", ge=1, le=10_000)
    num_heads: int | None = auto("attention heads; must divide hidden_dim", ge=1, le=10_000)
    num_kv_heads: int | None = auto(
        "key and value heads (llama); must divide num_heads; auto without a preset: num_heads", ge=1, le=10_000
    )
    head_dim: int | None = auto("channels of a head (llama); auto: hidden_dim / num_heads", ge=1, le=1_000_000)
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
    rope_type: Literal["llama3", "linear", "yarn", "longrope"] | None = auto(
        "how rotary frequencies are scaled (llama); needs rope_factor; auto: as the preset, else llama3"
    )
    rope_factor: float | None = auto(
        "rotary frequencies are divided by it, in llama3 and yarn those of long waves (llama); auto without a preset: "
        "none is",
        gt=0,
    )
    rope_low_freq_factor: float | None = auto(
        "waves longer than rope_original_seq_len / this are divided by rope_factor (llama); auto: 1.0", gt=0
    )
    rope_high_freq_factor: float | None = auto(
        "waves shorter than rope_original_seq_len / this stay; between both the change is gradual (llama); auto: 4.0",
        gt=0,
    )
    rope_original_seq_len: int | None = auto(
        "longest sequence, in tokens, before the frequencies were scaled (llama); auto: 8192", ge=1
    )
    rope_beta_fast: float | None = auto(
        "pairs with more waves in rope_original_seq_len stay (llama with yarn); auto: 32.0", gt=0
    )
    rope_beta_slow: float | None = auto(
        "pairs with fewer waves in rope_original_seq_len are divided by rope_factor; between both the change is "
        "gradual (llama with yarn); auto: 1.0",
        gt=0,
    )
    rope_truncate: bool | None = auto(
        "the first and the last pair of the gradual change are rounded to whole pairs (llama with yarn); auto: true"
    )
    rope_attention_factor: float | None = auto(
        "queries and keys are multiplied by it (llama with yarn or longrope); auto: by the method's formula, from "
        "rope_factor",
        gt=0,
    )
    rope_mscale_all_dim: float | None = auto(
        "scores of attention are multiplied by (0.1 x this x ln(rope_factor) + 1)^2 (llama with yarn, as in DeepSeek); "
        "auto: by 1",
        gt=0,
    )
    rope_short_factors: Text | None = auto(
        "what divides the frequency of each pair, with commas between the numbers, if seq_len is at most "
        "rope_original_seq_len (llama with longrope)"
    )
    rope_long_factors: Text | None = auto("the same, if seq_len is above rope_original_seq_len (llama with longrope)")
    rope_local_theta: float | None = auto(
        "base of the rotary frequencies in layers with a window, where none is scaled (llama, as in Gemma 3); auto: as "
        "in the others",
        ge=1,
    )
    rotary_dim: int | None = auto(
        "channels of a head that rotary positions turn, the first ones (llama, as in Phi-4 mini); auto: all", ge=2
    )
    kv_latent_dim: int | None = auto(
        "channels of the latent from which keys and values are computed, in place of hidden_dim: multi-head latent "
        "attention (llama, as in DeepSeek-V3; codescent docs latents); needs rotary_dim; auto: none",
        ge=1,
        le=1_000_000,
    )
    q_latent_dim: int | None = auto(
        "channels of the latent from which queries are computed; auto: none, they are computed from hidden_dim",
        ge=1,
        le=1_000_000,
        only=given("model.kv_latent_dim"),
    )
    value_dim: int | None = auto(
        "channels of a value; auto: head_dim - rotary_dim", ge=1, le=1_000_000, only=given("model.kv_latent_dim")
    )
    window: int | None = auto("a position attends to so many positions, itself included (llama); auto: to all", ge=1)
    full_every: int | None = auto(
        "with window: every so-many-th layer attends to all positions (llama; Gemma 2: 2, Gemma 3: 6); auto: none does",
        ge=1,
    )
    score_cap: float | None = auto(
        "soft cap: a score s of attention becomes cap tanh(s / cap) (llama, as in Gemma 2); auto: none", gt=0
    )
    logit_cap: float | None = auto("the same for the logits (llama, as in Gemma 2); auto: none", gt=0)
    score_dim: int | None = auto(
        "products of queries and keys are divided by its square root (llama, as in Gemma 2); auto: head_dim", ge=1
    )
    norm_eps: float | None = auto(
        "epsilon that the norms add to the mean square (llama); auto without a preset: 1e-05", gt=0
    )
    tie_head: bool | None = auto(
        "the head shares the matrix of the token embedding (llama; gpt2 always does); auto: false"
    )
    qkv_bias: bool | None = auto("queries, keys and values have biases (llama, as in Qwen 2); auto: false")
    qk_norm: Literal["none", "head", "all"] | None = auto(
        "norms of queries and keys (llama): head: of each head (Qwen 3); all: over all heads (OLMo 2); auto: none"
    )
    norm: Literal["last", "first", "output", "both"] | None = auto(
        "norms: last: after each residual sum (transformer); first: before each sublayer (transformer, llama); output: "
        "of its output, before the sum (llama, as in OLMo 2); both: before it and of its output (llama, as in Gemma "
        "2); auto: last, in a llama first"
    )
    norm_plus_one: bool | None = auto("norms multiply by 1 + weight (llama, as in Gemma); auto: false")
    scale_embedding: bool | None = auto(
        "embeddings are multiplied by sqrt(hidden_dim) (llama, as in Gemma); auto: false"
    )
    fused: bool | None = auto(
        "a Hugging Face folder has one matrix of queries, keys and values, and one of gate and up (llama, as Phi-3); "
        "only export reads it; auto: false"
    )
    activation: Literal["relu", "gelu", "silu"] | None = auto(
        "activation of the MLP: relu or gelu (transformer), silu or gelu of the gate (llama; Gemma has gelu); auto: "
        "relu, in a llama silu"
    )
    num_experts: int | None = auto(
        "experts of a layer, in place of one MLP (llama, as in Mixtral; codescent docs experts); auto: none",
        ge=2,
        le=100_000,
    )
    experts_per_token: int | None = auto(
        "of how many experts each token is computed, those with the largest scores of the router",
        ge=1,
        only=given("model.num_experts"),
    )
    expert_dim: int | None = auto("hidden channels of an expert; auto: ffn_dim", ge=1, only=given("model.num_experts"))
    dense_layers: int | None = auto(
        "so many first layers have no experts; auto: all have", ge=1, only=given("model.num_experts")
    )
    expert_every: int | None = auto(
        "every so-many-th layer has experts; auto: every one", ge=1, only=given("model.num_experts")
    )
    route_norm: bool | None = auto(
        "the weights of a token's experts are divided by their sum (Mixtral; not OLMoE); auto: true",
        only=given("model.num_experts"),
    )
    route_scores: Literal["softmax", "sigmoid"] | None = auto(
        "scores of experts: softmax over all of them, or the sigmoid of each (DeepSeek-V3); auto: softmax",
        only=given("model.num_experts"),
    )
    route_bias: bool | None = auto(
        "each expert has a bias that is added to its score for the choice alone (DeepSeek-V3); train.balance_rate "
        "updates it; auto: false",
        only=given("model.num_experts"),
    )
    route_groups: int | None = auto(
        "groups of experts, of which a token chooses some (DeepSeek-V3); auto: one",
        ge=2,
        only=given("model.num_experts"),
    )
    groups_per_token: int | None = auto(
        "of how many groups a token may choose experts; needs route_groups", ge=1, only=given("model.route_groups")
    )
    route_scale: float | None = auto(
        "factor on the weights of a token's experts (DeepSeek-V3: 2.5); auto: 1.0",
        gt=0,
        only=given("model.num_experts"),
    )
    shared_dim: int | None = auto(
        "hidden channels of an MLP beside the experts, which computes every token (shared experts); auto: none",
        ge=1,
        only=given("model.num_experts"),
    )
    capacity_factor: float | None = auto(
        "an expert takes at most so many times its share of the choices of each sample, and drops the others; auto: it "
        "takes all",
        gt=0,
        only=given("model.num_experts"),
    )
    mtp_layers: int | None = auto(
        "modules behind the blocks, each of which predicts one more token in training (llama, as in DeepSeek-V3; "
        "codescent docs latents); auto: none",
        ge=1,
        le=16,
    )
    causal: bool | None = auto("a target position attends to no later position (transformer); auto: true")
    embedding: Literal["tied", "untied", "none"] | None = auto(
        "embedding matrices (transformer): tied: one for source, target and head; untied: three; none: source and "
        "target are vectors (data.task tensors); auto: tied",
    )
    mup_base_dim: int | None = auto(
        "hidden_dim of the smaller model whose learning rate this one takes over: mu-P scales initial values, learning "
        "rates, scores and logits by the width (codescent docs mup); auto: no mu-P",
        ge=1,
    )
    mup_base_head_dim: int | None = auto(
        "head_dim of that model; auto: that of this model, which then has more heads",
        ge=1,
        only=given("model.mup_base_dim"),
    )
    dropout: float = key(0.0, "probability of dropout in training (gpt2, transformer, bert)", ge=0, lt=1)
    bias: bool | None = auto(
        "biases in linear layers and norms (gpt2, transformer; bert always, llama never); auto: true where the model "
        "can have them",
    )


class Lora(Section):
    """Low-rank adapters: they are trained while the matrices of the model are frozen (`codescent docs lora`)."""

    rank: int | None = auto("rank of the adapters; auto: no adapters, all parameters are trained", ge=1, le=1_000_000)
    alpha: float | None = auto("the output of an adapter is multiplied by alpha / rank; auto: 2 x rank", gt=0)
    dora: bool = key(False, "lengths of the rows of adapted matrices are trained apart from directions (DoRA)")
    dropout: float = key(0.0, "probability of dropout of what an adapter reads, in training", ge=0, lt=1)
    quantize: Literal["none", "nf4"] = key(
        "none", "nf4: frozen matrices of blocks are held in 4 bits, with scales of 8 bits (QLoRA; needs bitsandbytes)"
    )
    rslora: bool = key(False, "the output of an adapter is multiplied by alpha / sqrt(rank) (rsLoRA)")
    weights: PathFromAnywhere | None = auto(
        "folder of adapters of peft, with which the run begins: its rank, alpha and layers are taken; auto: new ones"
    )
    targets: Text | None = auto(
        'layers with an adapter, such as "attn.qkv, mlp.down"; auto: every matrix of the blocks'
    )
    whole: Text | None = auto('layers trained in full, such as "norm_1, head"; auto: none, or the head of data.task qa')


class Data(Section):
    """The data and the task."""

    corpus: Corpus = key(
        "python-stdlib",
        "python-stdlib, shakespeare, openwebtext or squad; hf://datasets/OWNER/NAME/PATH of the hub; the path of a "
        "file, a folder, a glob or token shards, of the kinds in codescent docs data; for data.task tensors also "
        "synthetic:SAMPLES or synthetic:SAMPLES:SEED, random numbers of the model's sizes; module:NAME: a class of "
        "yours (codescent docs own_names)",
    )
    mixture: Mixture | None = auto(
        "several corpora in place of data.corpus (codescent docs mixtures): tables with a corpus, and perhaps a "
        "weight, a name, a validation and a text_key; auto: one corpus"
    )
    mixture_temperature: float | None = auto(
        "T of a mixture without weights: the weight of a corpus is the number of its samples, to the power of 1 / T; "
        "1: all corpora have equally many epochs; higher: more of the small ones; auto: 1",
        ge=1,
        le=1000,
        only=given(MIXTURE),
    )
    task: Text | None = auto(
        "what the model predicts: lm: each next token (gpt2, llama, transformer, transformers); sft: the tokens of a "
        "response to its prompt, or of the assistant in a conversation (gpt2, llama); dpo: which of two answers is "
        "preferred, by the loss train.preference (gpt2, llama); grpo: answers that the model writes itself, by their "
        "rewards (gpt2, llama); mlm: masked tokens (bert, "
        "transformers); qa: where the answer to a question begins and ends (bert); tensors: vectors of the target "
        "(transformer); seq2seq: a line reversed or copied, see data.pairs (transformer); module:NAME: a class of "
        "yours (codescent docs own_names); auto: the task that fits the corpus or model.kind",
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
    chosen_key: Text = key("chosen", "key of a JSONL line that holds the preferred answer (dpo)")
    rejected_key: Text = key("rejected", "key of a JSONL line that holds the other answer (dpo)")
    label_key: Text = key(
        "label",
        "key of a JSONL line that says, true or false, whether its answer is wanted (dpo with train.preference kto)",
        only=one_of("train.preference", "kto"),
    )
    answers_per_sample: int = key(
        4,
        "answers of a sample, which share an estimate of the KL term (dpo with train.preference kto)",
        ge=2,
        le=1024,
        only=one_of("train.preference", "kto"),
    )
    reward: RewardName = key(
        "exact",
        "what gives an answer its reward (grpo): exact: 1 if it is the answer in the data (data.answer_key), else 0; "
        "module:NAME: a function of yours (codescent docs grpo)",
    )
    answer_key: Text = key("answer", "key of a JSONL line that holds the right answer (grpo)")
    reward_timeout_s: float = key(60.0, "seconds that a function of rewards may take for one prompt (grpo)", gt=0)
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
        "WordPiece), hf://OWNER/NAME of the hub or the path of a tokenizer JSON",
    )
    folder: Folder = key(Path("datasets"), "folder of prepared corpora")
    verify: Literal["changed", "always"] | None = auto(
        "how the files of the data are verified: always: hashed before every run, and compared as they are read; "
        "changed: hashed if size or times are not those of an earlier reading; auto: as always, but data of more than "
        "64 MiB is hashed before the run only if that takes less than 1 % of it",
    )
    seq_len: int | None = auto(
        "tokens per sample; auto: model.seq_len, or model.source_len + target_len (transformer)", ge=1
    )
    validation_fraction: float = key(
        0.1, "share of the corpus, at its end, used for validation", gt=0, le=0.5, only=not_given("data.validation")
    )
    text_key: Text | None = auto(
        "the column of a table, or the key of a JSON line, that holds the text; auto: text, content, or the only one "
        "that holds strings"
    )
    as_text: bool = key(
        False, "true: every file is plain text, even if its content looks like JSON, CSV or another form"
    )
    documents: Literal["joined", "separate"] = key(
        "joined",
        "joined: attention, positions and losses go on from one document of a text to the next (lm), and a sample has "
        "one conversation (sft); separate: they end with each document (lm), and a sample has as many conversations "
        "as fit (sft)",
    )
    validation: Corpus | None = auto(
        "what the model is validated on: anything that data.corpus can be; the whole corpus is then for training; "
        "auto: the end of the corpus (data.validation_fraction); for data.task qa SQuAD's dev-v1.1.json"
    )
    stride: int = key(128, "tokens from the start of one window of a context to the start of the next (qa)", ge=1)
    question_len: int = key(64, "longest question in tokens; longer ones are truncated (qa)", ge=1)
    train_questions: int | None = auto("train on this many questions, the first ones (qa); auto: all", ge=1)
    validation_questions: int | None = auto("validate on this many questions, the first ones (qa); auto: all", ge=1)
    prefetch: int = key(16, "largest number of steps whose batches are read ahead; 0: read when needed", ge=0)


class Train(Section):
    """Number of steps, batch sizes, precision and device."""

    num_steps: int = key(1000, "number of weight updates", ge=1)
    num_epochs: float | None = auto(
        "passes over the training samples, such as 3 or 0.5, instead of train.num_steps", gt=0, le=1_000_000
    )
    global_batch_size: int = key(12, "samples per step, over all ranks", ge=1, le=MAX_SAMPLES)
    global_batch_tokens: int | None = auto(
        "tokens per step, over all ranks, instead of train.global_batch_size; a multiple of the tokens of a sample",
        ge=1,
        le=MAX_SAMPLES,
    )
    microbatch_size: int | None = auto(
        "samples of one forward pass of a rank; gradients are accumulated; auto: all samples of the rank", ge=1
    )
    precision: Literal["fp64", "fp32", "bf16"] = key(
        "fp32", "number format of weights and activations; bf16 has an fp32 master copy of the weights"
    )
    fp8: Literal["none", "rowwise", "tensorwise"] = key(
        "none",
        "products of the blocks' matrices in 8-bit floats, on devices that have them: rowwise: a scale for each row; "
        "tensorwise: one for each tensor (codescent docs fp8)",
    )
    fp8_emulated: bool = key(
        False,
        "round to fp8 and multiply in train.precision, on any device: to see losses, not for speed",
        only=other_than("train.fp8", "none"),
    )
    label_smoothing: float = key(
        0.0,
        "share of each target that is spread evenly over all classes in training (label smoothing); 0: none",
        ge=0,
        lt=1,
    )
    z_loss: float = key(
        0.0,
        "coefficient of the z-loss, the square of log Z, in training; Z is the sum of the exponentials of a target's "
        "logits; 0: none; PaLM: 1e-4",
        ge=0,
    )
    preference: Literal["dpo", "ipo", "kto", "orpo", "simpo"] = key(
        "dpo",
        "loss of preferred answers (data.task dpo): dpo, ipo and kto compare with the model that the run starts from; "
        "orpo and simpo need no such reference; kto reads answers that are judged one by one (codescent docs "
        "preferences)",
    )
    beta: float | None = auto(
        "how much differences of log-probabilities count in train.preference; ipo: tau; orpo: lambda; auto: 0.1, with "
        "simpo 2.0",
        gt=0,
    )
    margin: float = key(
        1.0,
        "by how much the reward of a chosen answer should be higher (gamma of simpo)",
        ge=0,
        only=one_of("train.preference", "simpo"),
    )
    chosen_weight: float = key(
        1.0, "factor of the losses of answers that are wanted (kto)", ge=0, only=one_of("train.preference", "kto")
    )
    rejected_weight: float = key(
        1.0, "factor of the losses of answers that are not wanted (kto)", ge=0, only=one_of("train.preference", "kto")
    )
    group_size: int = key(
        8, "answers that the model writes to each prompt, whose rewards are compared (data.task grpo)", ge=2, le=1024
    )
    new_tokens: int = key(128, "an answer that the model writes ends after so many tokens (grpo)", ge=1)
    temperature: float = key(1.0, "divides the logits from which the tokens of answers are drawn (grpo)", gt=0)
    top_k: int | None = auto("tokens of answers are drawn among the k likeliest (grpo); auto: among all", ge=1)
    top_p: float | None = auto(
        "tokens of answers are drawn among the likeliest that together have this probability (grpo); auto: among all",
        gt=0,
        le=1,
    )
    scale_rewards: bool = key(
        True, "divide advantages by the standard deviation of their group (grpo); false: Dr. GRPO"
    )
    answer_mean: Literal["answer", "limit"] = key(
        "answer",
        "what the loss of an answer is divided by (grpo): answer: the number of its tokens; limit: train.new_tokens "
        "(Dr. GRPO)",
    )
    kl: float = key(
        0.0,
        "coefficient of the KL divergence from the model that the run starts from (grpo); 0: none; DeepSeekMath: 0.04",
        ge=0,
    )
    kl_corrected: bool = key(
        False,
        "multiply the estimate of the KL divergence by the ratio of probabilities, so that its gradient is that of the "
        "divergence (grpo); DeepSeek-V3.2, trl: true",
        only=other_than("train.kl", 0.0),
    )
    updates_per_answer: int = key(
        1, "steps that learn from the same answers, one after the other (grpo); 1: each has new ones", ge=1, le=100
    )
    clip: float = key(
        0.2,
        "the ratio of a token's probability to that by which it was drawn counts from 1 - clip on (grpo)",
        ge=0,
        lt=1,
        only=at_least("train.updates_per_answer", 2),
    )
    clip_high: float | None = auto(
        "and up to 1 + clip_high (grpo); auto: train.clip; DAPO: 0.28",
        ge=0,
        only=at_least("train.updates_per_answer", 2),
    )
    balance_loss: float = key(
        0.0,
        "coefficient of the loss by which routers load experts equally, of each sample and layer, in training "
        "(codescent docs experts); 0: none; Mixtral: 1e-2",
        ge=0,
    )
    balance_rate: float = key(
        0.0,
        "by so much a step raises the bias of each expert with less than the mean load, and lowers that of each with "
        "more (model.route_bias); 0: biases stay; DeepSeek-V3: 1e-3",
        ge=0,
    )
    router_z_loss: float = key(
        0.0,
        "coefficient of the z-loss of routers, the square of log Z of their scores, in training; 0: none; ST-MoE: 1e-3",
        ge=0,
    )
    mtp_weight: float | None = auto(
        "weight of the mean loss of the modules that predict more tokens (lambda); auto: 0.3",
        gt=0,
        only=given("model.mtp_layers"),
    )
    device: Literal["auto", "cpu", "cuda", "xpu", "mps"] = key(
        "auto", "auto: the first of cuda (NVIDIA, and AMD by ROCm), xpu (Intel) and mps (Apple) that there is, else cpu"
    )
    compile: Compiled | None = auto(
        "what torch.compile compiles: nothing, each block by itself, or the whole model; auto: blocks on CUDA and XPU "
        "if the compiler works there, else none; none also with train.deterministic and where blocks are refused"
    )
    cuda_graphs: bool = key(
        False,
        "replay each compiled block as a CUDA graph, which saves the time of starting its kernels: for small models on "
        "CUDA with one micro-batch, whose ranks divide nothing but the batch",
        only=other_than("train.compile", "none"),
    )
    eval_every: int = key(250, "steps between validation losses; 0: never", ge=0)
    eval_samples: int | None = auto(
        "samples per validation loss; auto: the whole validation split", ge=1, only=other_than("train.eval_every", 0)
    )
    stop_after: int = key(
        0,
        "end the run after this many validations in a row without a lower validation loss; 0: never",
        ge=0,
        only=other_than("train.eval_every", 0),
    )
    ema: float = key(
        0.0,
        "decay of an exponential moving average of the weights, such as 0.999, which is validated, saved and exported "
        "beside them; 0: none",
        ge=0,
        lt=1,
    )
    ema_every: int = key(1, "steps from one update of the average to the next", ge=1, only=other_than("train.ema", 0.0))
    check_every: int = key(
        100, "steps between checks that the replicas are equal; 0: only at the start and before checkpoints", ge=0
    )
    matmul: Literal["auto", "exact", "fast"] = key(
        "auto",
        "kernels of fp32 matrix products on CPU: exact: default precision of torch; fast: medium precision of torch; "
        "auto: the faster one, measured at the start, if its error is small enough",
    )
    allocator: Literal["auto", "system"] = key(
        "auto",
        "auto: malloc reuses large blocks in the next step (Linux, glibc), and torch's allocator for CUDA grows its "
        "segments; system: their settings are not changed",
    )
    head_chunk_tokens: int | None = auto(
        "tokens whose logits are in memory at the same time; 0: all tokens of the micro-batch; auto: 1024 on a CPU, "
        "8192 on a GPU",
        ge=0,
    )
    num_threads: int | None = auto(
        "threads per rank; auto: cores / ranks on this machine, fewer if a trial shows that they are faster",
        ge=1,
        le=1024,
    )
    deterministic: bool = key(False, "stop with an error at operations whose result varies between identical runs")


class Checkpoint(Section):
    """When checkpoints are written, and which of them stay."""

    every: int = key(250, "steps between checkpoints; 0: only at the end, and the best ones", ge=0)
    last: bool = key(True, "save a checkpoint after the last step; false: for runs that are only measured")
    keep_last: int = key(2, "number of newest checkpoints to keep", ge=1)
    keep_best: bool = key(
        True,
        "save a checkpoint at each validation with the lowest loss so far, and keep the best one",
        only=other_than("train.eval_every", 0),
    )
    fall_back: bool = key(
        False,
        "resume from the checkpoint before, if the newest one is damaged; that one is kept under another name",
    )
    asynchronous: bool = key(
        False,
        "copy what a checkpoint has into host memory, and write it beside training. A run waits for its last "
        "checkpoint, and for that of a request to stop",
    )
    on_failed_save: Literal["stop", "go_on"] = key(
        "stop",
        "what a run does if a checkpoint has no room on the disk: stop; or go_on: train on without it, and try again "
        "when the next one is due",
    )


class Log(Section):
    """What is printed and logged."""

    every: int = key(10, "steps between printed lines", ge=1)
    metrics_every: int | None = auto(
        "steps between rows of metrics; auto: 1, or train.num_steps / 100,000, rounded up, in a longer run", ge=1
    )
    sample_tokens: int = key(0, "tokens that the model generates at the end of the run; 0: none", ge=0)
    sample_prompt: str = key("", "text that the generated text continues", only=other_than("log.sample_tokens", 0))
    sample_temperature: float = key(
        0.8, "0: always the most probable token; 1: as the model says", ge=0, only=other_than("log.sample_tokens", 0)
    )
    expected_minutes: float | None = auto(
        "minutes that the steps of this file should take. If the first steps take longer, the run says why. Has no "
        "effect if the command line or a later file changes the steps. auto: none",
        gt=0,
    )
    tensorboard: bool | None = auto("write TensorBoard files; auto: where tensorboard is installed")
    wandb: Text | None = auto(
        "project of Weights & Biases that also gets the metrics (`codescent docs loggers`); auto: none"
    )
    mlflow: Text | None = auto("experiment of MLflow that also gets the metrics; auto: none")
    trackio: Text | None = auto("project of Trackio that also gets the metrics; auto: none")
    to: Functions | None = auto(
        'Python functions that also get metrics and events, as "module:function", several with commas between '
        "(`codescent docs loggers`); auto: none"
    )

    @property
    def names_loggers(self) -> bool:
        """Whether rows also go elsewhere, as all ranks know it."""
        return any((self.to, self.wandb, self.mlflow, self.trackio))


class Profile(Section):
    """Which steps torch's profiler records (`codescent docs profile`). A window is wait + warmup + active steps."""

    active: int = key(0, "steps of a window that are recorded; 0: no profile", ge=0)
    wait: int = key(5, "steps of a window before the profiler starts", ge=0, only=RECORDS)
    warmup: int = key(1, "steps of a window in which the profiler runs and nothing is recorded", ge=0, only=RECORDS)
    repeat: int = key(1, "number of windows, one after the other, from the first step of the run", ge=1, only=RECORDS)
    shapes: bool = key(False, "record the shapes of the inputs of operators", only=RECORDS)
    stacks: bool = key(False, "record the calls of Python functions; the files become large", only=RECORDS)
    memory: bool = key(False, "record where operators allocate and free memory", only=RECORDS)


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
    survive: Survive = Survive()
    log: Log = Log()
    profile: Profile = Profile()

    def with_task(self, name: str) -> Self:
        """This config with another data.task."""
        return self.model_copy(update={"data": self.data.model_copy(update={"task": name})})

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
