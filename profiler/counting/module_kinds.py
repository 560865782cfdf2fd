"""Classify modules by their class, parameters and config, and count the towers that read pictures."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from profiler.errors import ModelError
from profiler.loading.cache_argument import has_cache
from profiler.quant import storage as formats

_ATTENTION = re.compile(r"((attention|attn)(sdpa|eager)?|MLA)$", re.IGNORECASE)
_LINEAR_ATTENTION = re.compile(r"Lightning|DeltaNet|DeltaAttention|LSTMLayer$")
_ROUTES_IN_16_BITS = re.compile(
    r"Aria|Cohere2Moe|DeepseekV4|Ernie|FlexOlmo|Granite|GptOss|Inkling|Jamba|Laguna|Lfm2|Mellum|Olmoe|Phimoe|Qwen|Zaya"
)
_ROUTER = re.compile(r"router|gate$|topk", re.IGNORECASE)
_OTHER_MODALITY = re.compile(
    r"vision|visual|image|audio|speech|video|multi_?modal|^mm_|embed_tokens_extend|^connector$|^aligner$|^q_?former$|^vq",
    re.IGNORECASE,
)


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is softmax attention: by its class name, with linears but no other attention inside."""
    if not _ATTENTION.search(type(module).__name__) or is_recurrent(module):
        return False
    inner = [part for part in module.modules() if part is not module]
    has_linear = any(formats.is_linear(part) for part in inner)
    return has_linear and not any(_ATTENTION.search(type(part).__name__) for part in inner)


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a mixer has a state of fixed size: by its class name, or its decay and convolution."""
    parts = (module, *module.children())
    decays = any(isinstance(getattr(part, "A_log", None), torch.Tensor) for part in parts)
    convolves = any(isinstance(part, nn.Conv1d) for part in parts)
    by_name = bool(_LINEAR_ATTENTION.search(type(module).__name__))
    return (decays and convolves) or by_name or recurrent_channels(module) is not None


def recurrent_channels(module: nn.Module) -> torch.Tensor | None:
    """Return the decay per channel of RWKV or RG-LRU, whose state has no heads; None for other modules."""
    decay = first_of(module, "time_decay", "recurrent_param")
    return decay if isinstance(decay, torch.Tensor) else None


def has_state(module: nn.Module) -> bool:
    """Return whether a module keeps a state of fixed size: a recurrent one, or the inputs of its own convolution."""
    return is_recurrent(module) or any(isinstance(part, nn.Conv1d) for part in (module, *module.children()))


def is_indexer(module: nn.Module) -> bool:
    """Return whether a module chooses the keys of sparse attention: by its class name, its heads and its choice."""
    sizes = (INDEX_HEADS, INDEX_WIDTH, ("index_topk", "token_budget", "topk_blocks"))
    return type(module).__name__.endswith("Indexer") and all(first_of(module, *names) for names in sizes)


def compresses(module: nn.Module) -> bool:
    """Return whether a module makes one key of several tokens: by its rate and its projection."""
    return all(hasattr(module, name) for name in ("compress_rate", "kv_proj", "head_dim"))


def computes_in_float32(module: nn.Module) -> bool:
    """Return whether transformers (5.23) casts a module's inputs to float32, and keeps them so, in any model."""
    return re.search(r"^Inkling\w*ShortConvolution$|^Dots3\w*Indexer$", type(module).__name__) is not None


def is_sparse_without_rule(module: nn.Module) -> bool:
    """Return whether a class name says that a module attends to a choice of keys by another rule than an indexer's."""
    known = is_indexer(module) or compresses(module) or hasattr(module, "weights_proj")
    chooses = re.search(r"Indexer|Compressor|Sparse.*Attention|BlockSparse|LSH", type(module).__name__)
    return chooses is not None and not known


def keys_per_query(indexer: Any) -> int:
    """Return the most tokens that an indexer chooses for a query."""
    blocks = first_of(indexer, "topk_blocks")
    return int(blocks * indexer.block_size if blocks else first_of(indexer, "index_topk", "token_budget"))


def own_top_k(moe: nn.Module, config: Any, experts: Any) -> int:
    """Return the experts per token: the router's own number, or the config's. Raises ModelError if neither says it."""
    routers = (part for part in moe.children() if is_router(part) or _ROUTER.search(type(part).__name__))
    for owner in (*routers, moe, experts):
        if isinstance(own := first_of(owner, *_TOP_K), int):
            return own
    index = first_of(moe, "layer_idx") or 0
    for value in (first_of(part, *_TOP_K) for part in (config, first_of(config, "ffn_config"))):
        if value is not None:
            return int(value[min(index, len(value) - 1)] if isinstance(value, list | tuple) else value)
    raise ModelError(
        f"{type(moe).__name__} has experts, but neither its router nor the configuration says how many a token uses;"
        " add num_experts_per_tok to its config.json."
    )


INDEX_HEADS, INDEX_WIDTH = ("index_n_heads", "n_heads", "num_heads"), ("index_head_dim", "head_dim")
_TOP_K = (
    "top_k", "topk", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k",
    "num_selected_experts",
)  # fmt: skip


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm: by its class name and its weights, [width] or [heads, width] (Cohere)."""
    params = dict(module.named_parameters(recurse=False))
    return "weight" in params and params["weight"].dim() <= 2 and "norm" in type(module).__name__.lower()


def is_router(module: nn.Module) -> bool:
    """Return whether a module routes tokens to experts: by its class name and a weight matrix [experts, hidden]."""
    weight = getattr(module, "weight", None)
    is_matrix = isinstance(weight, torch.Tensor) and weight.dim() == 2
    return is_matrix and bool(_ROUTER.search(type(module).__name__)) and not formats.is_linear(module)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is routed experts: one bank of 3-D weights, or a list of MLPs (`PackedExpert`)."""
    if isinstance(module, nn.ModuleList):
        first = next(iter(module), nn.Identity())
        return "expert" in type(first).__name__.lower() and any(map(formats.is_linear, first.modules()))
    has_bank = bool(expert_banks(module)) or formats.triton_mxfp4_matrices(module) is not None
    return "expert" in type(module).__name__.lower() and has_bank


def expert_banks(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a layer's expert weights by name: [experts, a, b], or MXFP4 blocks [experts, out, groups, 16]."""
    params = dict(module.named_parameters(recurse=False))
    if experts := first_of(module, "moe_num_experts"):  # DBRX stacks its experts' rows
        params = {name: param.view(experts, -1, param.shape[-1]) for name, param in params.items() if param.dim() == 2}
    blocks: dict[str, torch.Tensor] = {name: param for name, param in params.items() if name.endswith("_blocks")}
    return blocks or {name: param for name, param in params.items() if param.dim() == 3 and not formats.is_scale(name)}


def bank_features(name: str, bank: torch.Tensor, hidden_size: int) -> tuple[int, int]:
    """Return (in_features, out_features) of one expert's matrix; models store either order."""
    if bank.dim() == 4:  # blocks of 16 bytes, of two weights each (OCP Microscaling Formats, v1.0)
        return int(bank.shape[2] * bank.shape[3] * 2), int(bank.shape[1])
    first, second = int(bank.shape[1]), int(bank.shape[2])
    out_comes_first = first == hidden_size if "down" in name else second == hidden_size
    return (second, first) if out_comes_first else (first, second)


def row_elements(experts: nn.Module, matrices: Sequence[tuple[int, int]], dtype: torch.dtype) -> int:
    """Return the elements that experts have in memory at their peak, per token and expert that runs on it.

    transformers (5.23, integrations/moe.py, `grouped_mm_experts_forward`) keeps the input while it makes the first
    result, its gate and the gated result; biases and clamps add copies. Later it keeps the input, the output, and
    the weighted output in two orders: in float32 if the router's weights are. MXFP4's kernel gates its own result.
    """
    hidden, outputs = matrices[0][0], sum(outs for _, outs in matrices)
    inner = outputs - hidden if len(matrices) > 1 else outputs
    if formats.triton_mxfp4_matrices(experts) or any(bank.dim() == 4 for bank in expert_banks(experts).values()):
        return inner // 2 + hidden
    gate = getattr(type(experts), "_apply_gate", None)
    is_plain = gate is None or gate.__qualname__ in ("_default_apply_gate", "FP8Experts._apply_gate")
    clamps = not is_plain or first_of(experts, "limit", "swiglu_limit") is not None
    copies = (5 if clamps else 2) + (2 if hasattr(experts, "gate_up_proj_bias") else 0)
    weighted = 1 if dtype.itemsize == 4 or _ROUTES_IN_16_BITS.search(type(experts).__name__) else 2
    return max(hidden + inner + copies * inner // 2, 2 * (1 + weighted) * hidden)


def gathers(experts: nn.Module) -> bool:
    """Return whether transformers' `batched_mm` copies weights of these experts; those in blocks have own kernels."""
    return hasattr(type(experts), "_apply_gate") and type(experts).__name__ != "FP8Experts"


def not_run_for_text(name: str, module: nn.Module) -> bool:
    """Return whether a text-only step skips the module: other modalities, or cross-attention without an encoder."""
    crosses = re.search(r"(^|\.)(encoder_attn|cross_?attn|cross_?attention)$", name, re.IGNORECASE)
    return is_tower(name) or crosses is not None or "CrossAttention" in type(module).__name__


def is_tower(name: str) -> bool:
    """Return whether a module, by its name, reads another modality or fits it to the decoder."""
    return bool(_OTHER_MODALITY.search(name.rpartition(".")[2]))


def run_by_text(model: Any) -> tuple[str, ...]:
    """Return the names of what a step of text runs: the decoder, embeddings and head; "" is all of the model."""
    if model.config.get_text_config() is model.config:
        return ("",)
    decoder, embeddings, head = model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()
    if not any(part is embeddings for part in decoder.modules()):
        return ("",)  # its encoder reads text, too
    return tuple(name for name, module in model.named_modules() if module is decoder or module is head)


def is_within(name: str, whole: str) -> bool:
    """Return whether a module's name is that of `whole` or of one of its parts."""
    return not whole or f"{name}.".startswith(f"{whole}.")


def runs_only_last(model: Any, name: str) -> bool:
    """Return whether only a prompt's last position runs a module, as in Gemma 4 (`_maybe_slice_kv_shared_inputs`)."""
    prefix, _, rest = name.partition(".layers.")
    index = rest.partition(".")[0]
    decoder = model.get_submodule(prefix) if index.isdecimal() else None
    first = getattr(decoder, "first_kv_shared_layer_idx", None)
    return first is not None and hasattr(decoder, "_maybe_slice_kv_shared_inputs") and int(index) >= first


def runs_per_step(model: Any, name: str) -> int:
    """Return how often a step runs a module: several times in the two stacks of HRM (transformers 5.23, hrm_text)."""
    high, low = (int(first_of(model.config, key) or 1) for key in ("H_cycles", "L_cycles"))
    parts = name.split(".")
    return high * low if "L_module" in parts else high if "H_module" in parts else 1


def window_of(config: Any, module: Any) -> int | None:
    """Return the keys that a query may see, from its layer's type, the layer or the config; None: no limit."""
    kind = layer_type(config, module)
    if kind == "full_attention" or getattr(module, "is_sliding", None) is False:
        return None
    if kind == "chunked_attention":
        window = getattr(config, "attention_chunk_size", None)
    elif is_local(module):
        window = config.window_size
    elif hasattr(module, "sliding_window"):
        window = module.sliding_window
    else:
        is_used = getattr(config, "use_sliding_window", True) is not False
        window = getattr(config, "sliding_window", None) if is_used else None
    return int(window) if window else None


def layer_type(config: Any, module: Any) -> str | None:
    """Return the type of a module's layer, such as `sliding_attention`; None if the config does not say it."""
    types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    return str(types[index]) if types and isinstance(index, int) and index < len(types) else None


def is_local(module: Any) -> bool:
    """Return whether attention has GPT-Neo's window, which its mask has and its cache has not."""
    return getattr(module, "attention_type", None) == "local"


def attention_heads(module: Any, config: Any) -> tuple[int, int, int]:
    """Return (query heads, KV heads, head dim) of an attention module, from the module or else the config."""
    in_config = int(first_of(config, "num_attention_heads", "n_head", "num_heads") or 1)
    query_heads = int(first_of(module, "num_heads", "num_attention_heads", "n_heads", "num_attn_heads") or in_config)
    head_dim = int(
        first_of(module, "head_dim", "head_size", "attention_head_size")
        or first_of(config, "head_dim", "kv_channels")
        or config.hidden_size // in_config
    )
    kv_heads = first_of(module, "num_key_value_heads", "num_kv_heads")
    if kv_heads is None and (groups := first_of(module, "num_key_value_groups")):
        kv_heads = query_heads // groups
    elif kv_heads is None and formats.is_linear(keys := first_of(module, "k_proj", "key_proj")):
        kv_heads = keys.out_features // head_dim
    if first_of(module, "new_decoder_architecture"):  # Falcon-40B and 180B: cached after each is repeated for its group
        kv_heads = query_heads
    kv_heads = kv_heads or first_of(config, "num_key_value_heads", "num_kv_heads", "n_head_kv") or in_config
    return query_heads, int(kv_heads), head_dim


def of_layer(config: Any, module: Any) -> Any:
    """Return the config of a module's layer, which has that layer's values of attributes that differ."""
    index = getattr(module, "layer_idx", None)
    layers = _attribute(config, "per_layer_config")
    return layers[index] if isinstance(index, int) and layers is not None and index < len(layers) else config


def keeps_cache(model: Any, config: Any, module: Any) -> bool:
    """Return whether an attention layer keeps keys and values: not if it reads another's, or the model has no cache."""
    modes, index = _attribute(config, "kv_sharing_modes"), getattr(module, "layer_idx", None)
    reuses = modes is not None and isinstance(index, int) and str(modes[index]).startswith("reuse")
    return has_cache(model) and not reuses


def first_of(owner: Any, *names: str) -> Any:
    """Return the first attribute of `owner` that is not None, or None."""
    return next((value for name in names if (value := _attribute(owner, name)) is not None), None)


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute or None; a config whose layers differ raises for values of a single layer."""
    if owner is None:
        return None
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


def picture_flops(model: Any, towers: list[nn.Module]) -> tuple[int, int]:
    """Return the FLOPs of the towers for one square picture, and its side in pixels; (0, 0) without a patch size.

    All patches attend to each other (windows compute less); a projector with wider inputs runs once for each group.
    """
    config = first_of(model.config, "vision_config", "vision_encoder_config") or model.config
    pixels, patch = (_side(first_of(config, name)) for name in ("image_size", "patch_size"))
    if not patch:
        return 0, 0
    pixels = pixels or 448  # for towers that take any size
    patches = (pixels // patch) ** 2
    width = _side(first_of(config, "hidden_size", "embed_dim", "width"))
    parts = [part for tower in towers for part in tower.modules()]
    layers = (part for part in parts if any(map(is_attention, part.children())))
    in_layers = {id(part) for layer in layers for part in layer.modules()}  # an MLP may be as wide as joined patches
    flops = 0
    for module in parts:
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            flops += 2 * patches * module.weight.numel()
        elif formats.is_linear(module):
            weight = formats.stored(module)
            # A projector joins squares of 2 x 2 or 3 x 3 patches to one.
            joined = next((n for n in (4, 9) if weight.in_features == n * width and id(module) not in in_layers), 1)
            flops += 2 * (patches // joined) * weight.in_features * weight.out_features
        elif is_attention(module):
            flops += 4 * patches**2 * width
    return flops, pixels


def _side(size: Any) -> int:
    first = size[0] if isinstance(size, list | tuple) else size  # some configs give the side of a square twice
    return int(first) if isinstance(first, int) else 0
