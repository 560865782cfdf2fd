"""Walk a module tree, loaded or on the meta device, and return its operators."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from profiler.counting import module_kinds as kinds
from profiler.counting.attention import AttentionCore, Compressor, Indexer, LatentCore
from profiler.counting.operators import (
    Convolution,
    Elementwise,
    Embedding,
    Experts,
    Linear,
    ModelWork,
    Operator,
    OperatorGroup,
    RecurrentState,
    Rows,
)
from profiler.errors import ModelError
from profiler.facts.step import FLOAT32_BYTES, StoredWeight
from profiler.loading.cache_argument import keeps_last_logits
from profiler.quant import storage as formats
from profiler.quant.checkpoints import MX_BLOCK

# Parameters that are not in a module of their own: matrices of hyper-connections (arXiv:2409.19606), of an indexer's
# gate and of RG-LRU's gates, and what is added to each key of a block.
_LOOSE_MATRICES = frozenset({"fn", "hc_fn", "index_kpool_compress_gate", "input_gate_weight", "recurrent_gate_weight"})
_ADDENDS = frozenset({"position_bias", "index_kpool_compress_ape"})
_RESIDUAL_ADDS_PER_LAYER = 2
_GATE_FLOPS_PER_ELEMENT = 5
_NORM_FLOPS_PER_ELEMENT = 4


def walk(model: Any) -> ModelWork:
    """Return the operators of a causal LM, and its `unknown` parameters. Raises ModelError for any other model."""
    visitor = _Visitor(model, _decoder_config(model))
    counts, repeats = Counter[Operator](), Counter[Operator]()
    for operator in visitor.visit():
        first = replace(operator, repeats=0)
        counts[first] += 1
        repeats[first] += operator.repeats
    tower_flops, pixels = kinds.picture_flops(model, visitor.towers)
    params = sum(visitor.counted.values())
    return ModelWork(
        operators=tuple(replace(op, count=count, repeats=repeats[op]) for op, count in counts.items()),
        params=params,
        unknown=tuple(dict.fromkeys(visitor.unknown)),
        not_run=tuple(dict.fromkeys(visitor.not_run)),
        dense_instead=tuple(dict.fromkeys(visitor.dense_instead)),
        keeps_last_logits=keeps_last_logits(model),
        layers=int(kinds.first_of(visitor.config, "num_hidden_layers") or 0),
        group_params=tuple(visitor.group_params.items()),
        tower_flops=tower_flops,
        picture_pixels=pixels,
        coverage=(params - visitor.unknown_params) / params,
    )


def _decoder_config(model: Any) -> Any:
    try:
        config = model.config.get_text_config()
        model.get_input_embeddings()
    except (ValueError, NotImplementedError):
        config = None
    if kinds.first_of(config, "hidden_size") is None:
        raise ModelError(
            f"{type(model).__name__} is not counted, since it is not one decoder of text; pass a folder whose"
            " config.json has only the configuration of its decoder."
        )
    return config


def collapse_numbers(name: str) -> str:
    """Replace numbers in a module's name: `model.layers.3.mlp` -> `model.layers.*.mlp`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


LinearKey = tuple[str, int, int]
"""(name, in_features, out_features), since layers of one name may differ in width."""


def linear_key(operator: Linear) -> LinearKey:
    return operator.name, operator.weight.in_features, operator.weight.out_features


def linear_modules(model: Any) -> dict[LinearKey, list[nn.Module]]:
    """Return the modules of each Linear operator, one per layer."""
    modules: dict[LinearKey, list[nn.Module]] = {}
    expert_prefixes: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if kinds.is_experts(module):
            expert_prefixes = (*expert_prefixes, name + ".")
        elif formats.is_linear(module) and not name.startswith(expert_prefixes):
            weight = formats.stored(module)
            key = (collapse_numbers(name), weight.in_features, weight.out_features)
            modules.setdefault(key, []).append(module)
    return modules


def called_modules(model: Any, work: ModelWork) -> dict[Operator, list[nn.Module]]:
    """Return the modules of each attention core and each bank of experts in `work`, one per layer."""
    operators = {
        replace(op, count=1, repeats=0): op for op in work.operators if isinstance(op, AttentionCore | Experts)
    }
    visitor = _Visitor(model, model.config.get_text_config())
    modules: dict[Operator, list[nn.Module]] = {}
    for name, module in model.named_modules():
        short = collapse_numbers(name)
        operator = visitor.experts(short, name, module) if kinds.is_experts(module) else visitor.core(short, module)
        if operator in operators:
            modules.setdefault(operators[operator], []).append(module)
    return modules


class _Visitor:
    def __init__(self, model: Any, config: Any) -> None:
        self.model = model
        self.config = config
        self.head = model.get_output_embeddings()
        self.tokens_table = model.get_input_embeddings()
        self.dtype: torch.dtype = model.dtype
        prefix = getattr(model, "base_model_prefix", "")
        self.base_prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""  # empty: the decoder is the model
        # Whether the cache stores MLA's latent, as in transformers 5; older ones store the expanded heads.
        self.caches_latent = any(hasattr(module, "expand_kv") for module in model.modules())
        self.unknown: list[str] = []
        self.not_run: list[str] = []
        self.towers: list[nn.Module] = []
        self.dense_instead: list[str] = []
        self.top_k: int | None = None
        self.group_params = Counter[str]()
        self.unknown_params = 0
        self.counted: dict[int, int] = {}
        self._read: set[int] = set()

    def visit(self) -> Iterator[Operator]:
        run_by_text = kinds.run_by_text(self.model)
        finished: tuple[str, ...] = ()
        for name, module in self.model.named_modules():
            if name.startswith(finished):
                continue
            short = collapse_numbers(name)
            beside = not any(kinds.is_within(name, part) or kinds.is_within(part, name) for part in run_by_text)
            if beside or kinds.not_run_for_text(name, module):
                params = sum(self._count(module, recurse=True).values())
                if params or not beside:
                    self.not_run.append(short)
                if beside or kinds.is_tower(name):
                    self.towers.append(module)
                    self.group_params["towers"] += params
            elif kinds.is_experts(module):
                yield (experts := self.experts(short, name, module))
                for part in module.modules():
                    self.group_params[experts.group] += sum(formats.own_params(part).values())
            else:
                last = kinds.runs_only_last(self.model, name)
                for operator in self._operators(short, name, module, self._count(module)):
                    yield (operator := replace(operator, only_last=True) if last else operator)
                    yield from [replace(operator, repeats=1)] * (kinds.runs_per_step(self.model, name) - 1)
                continue
            finished = (*finished, f"{name}.")
            self._count(module, recurse=True)

    def _operators(self, short: str, name: str, module: Any, params: Mapping[int, int]) -> Iterator[Operator]:
        """Yield the operators of a module without its children; `params` are those that no module before has."""
        if isinstance(module, nn.Embedding):
            yield self._embedding(short, name, module)
        elif formats.is_gguf_table(module):
            # Its weight is [rows, bytes per row].
            yield Embedding(short, self.dtype, module.weight.shape[1], 1, module is self.tokens_table)
        elif formats.is_linear(module):
            read = self._reads_again(module)
            if read and "adapter_list." in f"{name}.":
                return  # each layer that shares a block runs one of its adapters (Zamba2)
            try:
                yield (linear := replace(self._linear(short, name, module), repeats=read))
                if any(params.values()):  # those of a shared module count once
                    self.group_params[linear.group] += linear.weight.in_features * linear.weight.out_features
            except ValueError as error:  # a format without a rule
                self.unknown.append(f"{short} ({error})")
                self.unknown_params += sum(params.values())
        elif kinds.is_router(module):
            yield Linear(short, module.weight.dtype, formats.stored(module), "tokens", self.dtype, group="experts")
        elif kinds.is_norm(module):
            yield replace(self._norm(short, name, module), repeats=self._reads_again(module))
        elif isinstance(module, nn.Conv1d):
            yield replace(self._convolution(short, name, module), repeats=self._reads_again(module))
        else:
            if (core := self.core(short, module)) is not None:
                yield core
                yield self._rotary(short, core)
            if kinds.is_indexer(module):
                yield self._indexer(short, module)
            if kinds.compresses(module):
                yield self._compressor(short, name, module)
            yield from self._state(short, module)
            yield from self._other_parameters(short, module, params)
        yield from self._residuals(short, module)

    def _other_parameters(self, short: str, module: nn.Module, params: Mapping[int, int]) -> Iterator[Operator]:
        vector_bytes = 0
        unknown = []
        recurrent = kinds.is_recurrent(module)
        for key, param in module.named_parameters(recurse=False):
            if id(param) not in params:
                continue
            if key in _LOOSE_MATRICES and param.dim() > 1:
                ins = param.shape[-1]  # those of one block, if it has several: [blocks, out, in]
                name = str(param.dtype).removeprefix("torch.")
                weight = StoredWeight(name, ins, param.numel() // ins, param.nbytes, 0, param.dtype)
                yield Linear(f"{short}.{key}" if recurrent else short, param.dtype, weight, "tokens", self.dtype)
            elif key in _ADDENDS or recurrent or max(param.shape, default=1) == param.numel():
                vector_bytes += param.numel() * param.element_size()
            else:
                unknown.append(key)
                self.unknown_params += param.numel()
        if vector_bytes:
            yield Elementwise(f"{short}.vectors", self.dtype, 0, 0, vector_bytes)
        if unknown:
            self.unknown.append(f"{short} ({type(module).__name__}: {', '.join(unknown)})")

    def _convolution(self, short: str, name: str, module: nn.Conv1d) -> Convolution:
        kernel, owner = module.kernel_size[0], self.model.get_submodule(name.rpartition(".")[0])
        return Convolution(
            name=short,
            dtype=module.weight.dtype,
            channels=module.out_channels,
            inputs_per_channel=module.in_channels // module.groups,
            kernel_size=kernel,
            # transformers keeps a whole kernel of a padded convolution; others get only what they lack.
            state_inputs=kernel if module.padding[0] else (kernel - 1) * module.dilation[0],
            weight_bytes=sum(p.numel() * p.element_size() for p in module.parameters()),
            itemsize=FLOAT32_BYTES if kinds.computes_in_float32(owner) else self.dtype.itemsize,
        )

    def _state(self, short: str, module: Any) -> Iterator[RecurrentState]:
        """Yield the state of a state-space or linear-attention mixer, and none of other modules.

        transformers keeps the states of a mixer with a decay per step in float32, and those of Lightning attention and
        mLSTM in the model's dtype. FLOPs per element are those of the recurrences: h = a h + B x, y = C h has 5 (Mamba,
        arXiv:2312.00752, Mamba-2, arXiv:2405.21060, Lightning, arXiv:2401.04658, RG-LRU, arXiv:2402.19427, mLSTM,
        arXiv:2405.04517); the delta rule also reads and corrects the old value of a key: S = S (a (I - b k k^T)) +
        b v k^T, o = S q has 7 (Gated DeltaNet, arXiv:2412.06464, Kimi Delta Attention, arXiv:2510.26692).
        """
        if not kinds.is_recurrent(module):
            return
        decay, kind = getattr(module, "A_log", None), type(module).__name__
        in_model_dtype = "Lightning" in kind or "LSTM" in kind
        if decay is not None and decay.dim() > 1:  # Mamba-1's state is [intermediate, state], like A
            elements = int(decay.numel())
        elif (channels := kinds.recurrent_channels(module)) is not None:
            # RWKV-4 keeps numerator, denominator and maximum; RG-LRU one value.
            elements = channels.numel() * (3 if hasattr(module, "time_decay") else 1)
        elif "LSTM" in kind:  # a matrix, a normaliser and a maximum per head
            heads_per_layer = int(module.config.num_heads)
            elements = module.qk_dim * module.v_dim // heads_per_layer + module.qk_dim + heads_per_layer
        else:
            heads = ("num_v_heads", "num_heads", "n_heads", "num_attention_heads")
            shape = (heads, ("head_v_dim", "head_dim"), ("head_k_dim", "ssm_state_size", "head_dim"))
            sizes = [kinds.first_of(module, *names) for names in shape]
            if not all(sizes):
                self.unknown.append(f"{short} (the size of its state)")
                return
            elements = math.prod(map(int, sizes))
        decays = kinds.first_of(module, "ssm_state_size", "time_decay", "recurrent_param") is not None
        yield RecurrentState(
            name=f"{short}.state",
            dtype=self.dtype,
            state_elements=elements,
            flops_per_element=5 if decays or in_model_dtype else 7,
            itemsize=self.dtype.itemsize if in_model_dtype else FLOAT32_BYTES,
        )

    def _indexer(self, short: str, module: Any) -> Indexer:
        self.top_k = kinds.keys_per_query(module)  # also for later layers without an indexer of their own
        heads, width = (int(kinds.first_of(module, *names)) for names in (kinds.INDEX_HEADS, kinds.INDEX_WIDTH))
        key_heads = int(kinds.first_of(module, "index_kv_heads") or 1)
        pooled = kinds.first_of(module, "index_kpool")
        kept = key_heads * width if not pooled else 2 * width + 1  # a key, its gates, and whether it is valid
        return Indexer(
            name=f"{short}.scorer" if hasattr(module, "scorer") else short,
            dtype=self.dtype,
            heads=heads,
            head_dim=width,
            itemsize=FLOAT32_BYTES if kinds.computes_in_float32(module) else self.dtype.itemsize,
            rate=int(pooled or kinds.first_of(module, "compress_ratio", "compress_rate") or 1),
            weighted=hasattr(module, "weights_proj"),
            kept_elements=0 if kinds.compresses(module) else kept,
        )

    def _compressor(self, short: str, name: str, module: Any) -> Compressor:
        parent = self.model.get_submodule(name.rpartition(".")[0])
        indexer = next((part for part in module.children() if kinds.is_indexer(part)), None)
        return Compressor(
            name=f"{short}.core",
            dtype=self.dtype,
            width=module.head_dim,
            rate=module.compress_rate,
            series=formats.stored(module.kv_proj).out_features // module.head_dim,
            query_heads=int(parent.num_heads) if kinds.is_attention(parent) else 0,
            top_k=kinds.first_of(indexer, "index_topk"),
        )

    def _count(self, module: nn.Module, *, recurse: bool = False) -> dict[int, int]:
        """Count a module's parameters, shared ones once; return the numbers that were added, by identity."""
        owners = module.modules() if recurse else (module,)
        found = {identity: params for owner in owners for identity, params in formats.own_params(owner).items()}
        added = {identity: params for identity, params in found.items() if identity not in self.counted}
        self.counted |= added
        return added

    def _reads_again(self, module: nn.Module) -> int:
        """Return 1 if a module before has read the same weights, which a block of several layers shares; else 0."""
        params = formats.own_params(module).keys()
        again = bool(params) and params <= self._read
        self._read |= params
        return int(again)

    def _embedding(self, short: str, name: str, module: nn.Embedding) -> Embedding:
        # A token looks up a row per n-gram and hash.
        rows = kinds.first_of(self.model.get_submodule(name.rpartition(".")[0]), "ngram_heads") or 1
        return Embedding(
            name=short,
            dtype=module.weight.dtype,
            width=rows * module.embedding_dim,
            itemsize=module.weight.element_size(),
            per_batch=module is self.tokens_table or rows > 1,
        )

    def _linear(self, short: str, name: str, module: Any) -> Linear:
        weight = formats.stored(module)
        rows: Rows = "tokens"
        executed: Rows | None = None
        group = self._group(name)
        if module is self.head:
            rows, group = "last", "lm_head"
        elif self.base_prefix and not name.startswith(self.base_prefix):
            rows = "last"  # linears between the decoder and the head run on the head's positions
        elif name.endswith("self_attn.dt_proj") or (name.endswith("kv_b_proj") and self.caches_latent):
            executed = "context"  # for Doge's dynamic mask, and MLA's latent
        return Linear(
            name=short,
            group=group,
            dtype=weight.compute_dtype,
            weight=weight,
            rows=rows,
            activation_dtype=self.dtype,
            executed_rows=executed,
        )

    def experts(self, short: str, name: str, module: Any) -> Experts:
        mixture = self.model.get_submodule(name.rpartition(".")[0])
        per_token: float = kinds.own_top_k(mixture, self.config, module)
        banks = kinds.expert_banks(module)
        if (mxfp4_matrices := formats.triton_mxfp4_matrices(module)) is not None:
            matrices, num_experts, dtype = mxfp4_matrices, module.num_experts, self.dtype
            biases = [param for name, param in module.named_parameters() if name.endswith("_bias")]
            weights = sum(ins * outs for ins, outs in matrices)
            expert_bytes = weights // 2 + weights // MX_BLOCK  # 4 bits per weight, and a scale byte per block
            expert_bytes += sum(p.numel() * p.element_size() for p in biases) // num_experts
        elif banks:
            # LongCat's router also chooses among experts that do nothing, for which one bank has unused rows.
            num_experts, choices = (limit(bank.shape[0] for bank in banks.values()) for limit in (min, max))
            per_token = per_token * num_experts / choices if choices > num_experts else per_token
            hidden = int(self.config.hidden_size)
            matrices = tuple(kinds.bank_features(name, bank, hidden) for name, bank in banks.items())
            expert_bytes = sum(p.numel() * p.element_size() for p in module.parameters()) // num_experts
            first = next(iter(banks.values()))
            dtype = first.dtype if first.is_floating_point() else self.dtype
        else:
            num_experts = len(module)
            linears = [formats.stored(part) for part in module[0].modules() if formats.is_linear(part)]
            matrices = tuple((linear.in_features, linear.out_features) for linear in linears)
            expert_bytes = sum(linear.weight_bytes + linear.bias_bytes for linear in linears)
            dtype = linears[0].compute_dtype
        return Experts(
            name=short,
            dtype=dtype,
            num_experts=num_experts,
            # No router chooses among shared experts (Inkling).
            per_token=num_experts if "shared" in name.rpartition(".")[2] else min(per_token, num_experts),
            matrices=matrices,
            expert_bytes=expert_bytes,
            activation_dtype=self.dtype,
            row_elements=kinds.row_elements(module, matrices, self.dtype),
            # It runs every expert on every token, whatever the router chooses.
            runs_all=type(module).__name__ == "Llama4TextExperts",
            loops=isinstance(module, nn.ModuleList),
            gathers=kinds.gathers(module) and dtype == self.dtype,
        )

    def _norm(self, short: str, name: str, module: Any) -> Elementwise:
        width = module.weight.numel()
        # transformers' RMSNorm runs 8 kernels (cast up, square, mean, scale, cast down, weight); nn.LayerNorm runs 1.
        fused = isinstance(module, (nn.LayerNorm, nn.RMSNorm))
        casts = 0 if self.dtype.itemsize == 4 else 8 + 2 * self.dtype.itemsize
        per_element = 2 * self.dtype.itemsize if fused else 5 * 4 + casts + 2 * self.dtype.itemsize
        heads = self._norm_heads(name, width)
        return Elementwise(
            name=short,
            group="norm",
            dtype=module.weight.dtype,
            flops_per_token=_NORM_FLOPS_PER_ELEMENT * width * heads,
            bytes_per_token=per_element * width * heads,
            weight_bytes=sum(p.numel() * p.element_size() for p in module.parameters(recurse=False)),
        )

    def _norm_heads(self, name: str, width: int) -> int:
        """Return how often a norm runs per token: once per head for a norm of head width (Qwen3, Gemma-3, OLMo-2)."""
        parent_name, _, leaf = name.rpartition(".")
        parent = self.model.get_submodule(parent_name)
        if not kinds.is_attention(parent) or not leaf.startswith(("q_", "k_", "query", "key")):
            return 1
        query_heads, kv_heads, head_dim = kinds.attention_heads(parent, self.config)
        heads = query_heads if leaf.startswith("q") else kv_heads
        return heads if width == head_dim else 1

    def _rotary(self, short: str, core: AttentionCore) -> Elementwise:
        """Return q * cos + rotate_half(q) * sin for q and k: negate half, concatenate, two products, one sum."""
        elements = (core.query_heads + core.kv_heads) * core.qk_dim
        rotary = any("rotary" in name or "rope" in name for name, _ in self.model.named_modules())
        return Elementwise(
            name=f"{short}.rotary",
            group="attention",
            dtype=core.dtype,
            flops_per_token=3 * elements if rotary else 0,
            bytes_per_token=10 * elements * self.dtype.itemsize if rotary else 0,
        )

    def _residuals(self, short: str, module: nn.Module) -> Iterator[Elementwise]:
        children = dict(module.named_children())
        if any(kinds.is_attention(child) for child in children.values()):
            width = int(self.config.hidden_size)
            yield Elementwise(
                name=f"{short}.residual",
                dtype=self.dtype,
                flops_per_token=_RESIDUAL_ADDS_PER_LAYER * width,
                bytes_per_token=_RESIDUAL_ADDS_PER_LAYER * 3 * width * self.dtype.itemsize,
            )
        down = next((children[key] for key in ("down_proj", "c_proj", "fc2", "dense_4h_to_h") if key in children), None)
        if down is not None and not kinds.is_attention(module) and formats.is_linear(down):
            # Also for a format without a rule, whose linear is in `unknown`.
            width = getattr(down, "in_features", None) or formats.stored(down).in_features
            gated = "gate_proj" in children or "gate_up_proj" in children
            yield Elementwise(
                name=f"{short}.activation",
                group="mlp",
                dtype=self.dtype,
                flops_per_token=_GATE_FLOPS_PER_ELEMENT * width,
                bytes_per_token=(5 if gated else 2) * width * self.dtype.itemsize,
            )

    def core(self, short: str, module: Any) -> AttentionCore | None:
        if not kinds.is_attention(module):
            return None
        config = kinds.of_layer(self.config, module)
        query_heads, kv_heads, head_dim = kinds.attention_heads(module, config)
        latent = expanded = None
        qk_dim, v_dim = head_dim, int(kinds.first_of(module, "v_head_dim") or head_dim)
        if hasattr(module, "kv_b_proj"):
            nope, rope, v_dim, rank = (
                int(kinds.first_of(module, name) or kinds.first_of(config, name))
                for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
            )
            qk_dim = nope + rope
            if self.caches_latent:
                latent, expanded = rank + rope, nope + v_dim
            kv_heads = query_heads
        elif kinds.first_of(module, "compressor") is not None:
            kv_heads, latent = 1, head_dim  # the one key is also the value, in a cache of its own
        core = AttentionCore(
            name=f"{short}.core",
            dtype=self.dtype,
            query_heads=query_heads,
            kv_heads=kv_heads,
            qk_dim=qk_dim,
            v_dim=v_dim,
            window=kinds.window_of(config, module),
            chunked=kinds.layer_type(config, module) == "chunked_attention",
            caches_all=kinds.is_local(module),
            latent_dim=latent,
            top_k=self._top_k(short, module),
            keeps=kinds.keeps_cache(self.model, self.config, module),
        )
        return LatentCore(**vars(core), expanded_dim=expanded) if expanded else core

    def _top_k(self, short: str, module: Any) -> int | None:
        indexer = getattr(module, "indexer", None)
        if indexer is not None and kinds.is_indexer(indexer):
            return kinds.keys_per_query(indexer)
        if indexer is None and hasattr(module, "indexer"):
            return self.top_k
        if any(kinds.is_sparse_without_rule(part) for part in module.modules()):
            self.dense_instead.append(short)
        return None

    def _group(self, name: str) -> OperatorGroup:
        parents = name.split(".")[:-1]
        owner: Any = self.model
        for part in parents:
            owner = getattr(owner, part)
            if kinds.has_state(owner):
                return "state_proj"
            if kinds.is_attention(owner):
                return "attention_proj"
        return "experts" if any("expert" in part for part in parents) else "mlp"
