"""What a model family consists of, and the parts of reading a checkpoint that all share.

A family is: a reader per dialect (`Source` -> spec), a name table, and a loader that puts weights
into a block. Sizes, windows and the keys that change nothing are read here; whatever is
particular to a family is read in its own file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from headrace.backends.ops import Activation, Rope
from headrace.errors import FormatError, InvalidRequest, UnsupportedModel
from headrace.models.decoder import BlockLoader
from headrace.models.keys import Keys
from headrace.models.rope import MAX_CONTEXT, Frequencies, RopeInputs, gguf_rope
from headrace.models.spec import DecoderSpec, LayerSpec
from headrace.models.weights import Names, decode_vector
from headrace.types import Checkpoint

# Bounds of every size: an order of magnitude past the largest published models, and small enough
# that no product of two overflows 64 bits.
MAX_LAYERS = 1024
MAX_WIDTH = 2**20
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_VOCAB = 2**22

# Keys of config.json that do not change logits: bookkeeping, token ids, training, generation.
# fmt: off
HF_HARMLESS = frozenset({
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout",
    "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "cache_implementation", "chat_template", "chunk_size_feed_forward",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "embd_pdrop", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "generation_config", "gradient_checkpointing", "hidden_dropout",
    "id2label", "ignore_index", "initializer_range", "is_llama_config", "label2id",
    "length_penalty", "max_length", "min_length", "model_type", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_scores", "pad_token_id", "prefix", "pretraining_tp",
    "problem_type", "remove_invalid_values", "repetition_penalty", "resid_pdrop", "return_dict",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params",
    "temperature", "tf_legacy_loss", "tokenizer_class", "tokenizer_config", "tokenizer_json",
    "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "typical_p", "unsloth_fixed", "unsloth_version", "use_cache",
})
# fmt: on

# GGUF keys under the architecture's prefix that do not change logits.
GGUF_HARMLESS = frozenset({"rope.scaling.finetuned", "tensor_data_layout"})


@dataclass(frozen=True)
class Source:
    """What a spec reader sees: the checkpoint, its keys, and the context asked for (None: all)."""

    checkpoint: Checkpoint
    keys: Keys
    max_context: int | None

    def rope_inputs(self, spec: DecoderSpec, interleaved: bool = False) -> RopeInputs:
        """Inputs of the rope rules for a head that turns completely."""
        asked = self.max_context or spec.context_length
        return RopeInputs(spec.head_dim, asked, spec.context_length, interleaved)


@dataclass(frozen=True)
class Family:
    """One architecture. `name` is GGUF's `general.architecture`, or config.json's `model_type`."""

    name: str
    dialect: str
    names: Mapping[str, Names]
    read: Callable[[Source], DecoderSpec]
    block: BlockLoader


# ---- GGUF


def gguf_spec(source: Source, activation: Activation) -> DecoderSpec:
    """Sizes from GGUF keys; layers still empty."""
    keys = source.keys
    hidden = keys.integer("embedding_length", 1, MAX_WIDTH)
    heads = keys.integer("attention.head_count", 1, MAX_HEADS)
    head_dim = keys.integer("attention.key_length", 1, MAX_HEAD_DIM, max(1, hidden // heads))
    keys.expect("attention.value_length", head_dim)
    for count in ("expert_count", "expert_used_count", "nextn_predict_layers", "pooling_type"):
        keys.expect(count, 0)
    keys.expect("attention.causal", True)
    keys.expect("use_parallel_residual", True)  # GPT-NeoX's flag; some converters always write it
    table = source.checkpoint.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2 or table.shape[1] != hidden:
        raise FormatError(f"{source.checkpoint.path}: token_embd.weight must be (vocab, {hidden})")
    vocab_size = keys.integer("vocab_size", 1, MAX_VOCAB, table.shape[0])
    spec = DecoderSpec(
        num_layers=keys.integer("block_count", 1, MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length", 1, MAX_WIDTH),
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", 1, heads, heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        context_length=keys.integer("context_length", 1, MAX_CONTEXT),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        attention_scale=head_dim**-0.5,
        activation=activation,
        layers=(),
        is_tied="output.weight" not in source.checkpoint.tensors,
    )
    return _checked(spec, source)


ROPE_TENSORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")


def gguf_rope_of(source: Source, inputs: RopeInputs) -> Rope:
    """The rope of a GGUF file, with its factor tensors; reads `rope.dimension_count`."""
    rotary = source.keys.integer("rope.dimension_count", 2, inputs.rotary_dim, inputs.rotary_dim)
    if rotary % 2:
        raise FormatError(
            f"{source.keys.name('rope.dimension_count')} is {rotary}; it must be even"
        )
    factors: dict[str, Frequencies] = {}
    for name in ROPE_TENSORS:
        tensor = f"{name}.weight"
        if tensor in source.checkpoint.tensors:
            factors[name] = decode_vector(source.checkpoint, tensor, rotary // 2)
    return gguf_rope(source.keys, factors, replace(inputs, rotary_dim=rotary))


# ---- Hugging Face


def hf_spec(
    source: Source, activation: Activation, default_head_dim: int | None = None
) -> DecoderSpec:
    """Sizes from config.json; layers still empty. `default_head_dim` None: hidden / heads."""
    keys = source.keys
    _check_head(keys)
    hidden = keys.integer("hidden_size", 1, MAX_WIDTH)
    heads = keys.integer("num_attention_heads", 1, MAX_HEADS)
    whole = default_head_dim or max(1, hidden // heads)
    head_dim = keys.integer("head_dim", 1, MAX_HEAD_DIM, whole)
    spec = DecoderSpec(
        num_layers=keys.integer("num_hidden_layers", 1, MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size", 1, MAX_WIDTH),
        num_heads=heads,
        num_kv_heads=keys.integer("num_key_value_heads", 1, heads, heads),
        head_dim=head_dim,
        vocab_size=keys.integer("vocab_size", 1, MAX_VOCAB),
        context_length=keys.integer("max_position_embeddings", 1, MAX_CONTEXT),
        rms_norm_eps=keys.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        attention_scale=head_dim**-0.5,
        activation=activation,
        layers=(),
        is_tied=_hf_tied(source),
    )
    return _checked(spec, source)


def _check_head(keys: Keys) -> None:
    """Refuse what would make the whole model something else."""
    if keys.has("quantization_config"):
        raise UnsupportedModel(
            f"{keys.name('quantization_config')}: quantised safetensors are not supported; "
            "use the f32, f16 or bf16 weights, or a GGUF file"
        )
    names = keys.raw("architectures") or []
    for name in names if isinstance(names, list) else [names]:
        if not str(name).endswith("ForCausalLM"):
            raise UnsupportedModel(
                f"{keys.name('architectures')} says {name!r}; only ...ForCausalLM is supported"
            )
    for off in ("is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size",
                "is_decoder", "tie_encoder_decoder", "use_bfloat16", "pruned_heads",
                "sparse_attention"):  # fmt: skip
        keys.expect(off, False, {}, None)


def _hf_tied(source: Source) -> bool:
    """What config.json says; where it is silent, whether the head is missing."""
    has_head = "lm_head.weight" in source.checkpoint.tensors
    if source.keys.flag("tie_word_embeddings", not has_head):
        return True
    if not has_head:
        raise FormatError(
            f"{source.checkpoint.path}: tensor lm_head.weight is missing and "
            "tie_word_embeddings is false"
        )
    return False


LAYER_TYPES = ("full_attention", "sliding_attention")


def hf_window(keys: Keys, default: int) -> int:
    """`sliding_window`: 0 when null, `default` when not there at all."""
    if keys.says_null("sliding_window"):
        default = 0
    return keys.integer("sliding_window", 0, MAX_CONTEXT, default)


def hf_windows(keys: Keys, window: int, default: list[bool]) -> tuple[int, ...]:
    """Window of each layer: `window` where `layer_types` (or `default`) says sliding, else 0."""
    types = keys.choices("layer_types", len(default), LAYER_TYPES)
    sliding = default if types is None else [name == "sliding_attention" for name in types]
    if any(sliding) and not window and types is not None:
        raise FormatError(f"{keys.name('sliding_window')} is missing, but layer_types needs it")
    return tuple(window if slides else 0 for slides in sliding)


# ---- both


def uniform(spec: DecoderSpec, rope: Rope, windows: tuple[int, ...] | int) -> DecoderSpec:
    """The spec with its layers filled in, one rope for all."""
    per_layer = (windows,) * spec.num_layers if isinstance(windows, int) else windows
    return replace(spec, layers=tuple(LayerSpec(rope, window) for window in per_layer))


def _checked(spec: DecoderSpec, source: Source) -> DecoderSpec:
    """Relations between sizes that every reader relies on."""
    where = source.checkpoint.path
    if spec.num_heads % spec.num_kv_heads:
        raise FormatError(
            f"{where}: {spec.num_heads} query heads do not divide over {spec.num_kv_heads} "
            "key heads"
        )
    if spec.head_dim % 2:
        raise FormatError(f"{where}: head_dim is {spec.head_dim}; rope needs an even number")
    if source.max_context is not None and not 1 <= source.max_context <= spec.context_length:
        raise InvalidRequest(
            f"max_context is {source.max_context}; this model takes 1 to {spec.context_length}",
            param="max_context",
        )
    return spec
