"""Source + precision + weights (checkpoint or random) -> LoadedModel."""

from __future__ import annotations

import contextlib
import json
import logging
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from profiler.catalog import Source
from profiler.errors import DeviceError, ModelError, RequestError
from profiler.memory import available_bytes

Weights = Literal["auto", "checkpoint", "random"]
Quant = Literal["none", "int8", "nf4", "fp4"]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
QUANTS: tuple[Quant, ...] = get_args(Quant)

# A device that is filled to the last byte cannot run a step; accelerate's own maps keep about as much back.
_FILL_LIMIT = 0.9


@dataclass(frozen=True)
class ModelRequest:
    """What to load, already resolved: everything that decides which tensors will exist."""

    source: Source
    device: torch.device
    dtype: torch.dtype
    quant: Quant = "none"
    weights: Literal["checkpoint", "random"] = "random"
    attn: str | None = None
    """Attention implementation asked for (`sdpa`, `eager`, ...); None takes transformers' own choice."""
    trust_remote_code: bool = False
    allow_pickle: bool = False


@dataclass(frozen=True)
class LoadedModel:
    """A real model, ready to step."""

    module: nn.Module
    request: ModelRequest
    params: int
    """Parameters of the architecture (a packed 4-bit tensor counts its weights, a tied one counts once)."""
    load_s: float
    revision: str | None = None
    device_map: dict[str, str] | None = None
    """Where accelerate put each part, when the model did not fit on one device."""

    @property
    def offloaded(self) -> bool:
        """True when some weights stay on the host and cross the link to the device at every step."""
        return self.device_map is not None and "cpu" in self.device_map.values()

    @property
    def config(self) -> Any:
        return self.module.config


def resolve_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` as a device that is really there. Raises DeviceError."""
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise DeviceError(f"--device {name!r} is unknown; use auto, cpu, cuda or cuda:N.")
    if not torch.cuda.is_available():
        build = "this torch is a CPU build" if torch.version.cuda is None else "no CUDA device answers"
        raise DeviceError(f"--device {name}: {build}; use --device cpu.")
    count = torch.cuda.device_count()
    if index and int(index) >= count:
        raise DeviceError(f"--device {name}: there are {count} CUDA devices, numbered from 0.")
    return torch.device("cuda", int(index) if index else torch.cuda.current_device())


def resolve_dtype(name: str, quant: Quant, device: torch.device, config: Any) -> torch.dtype:
    """The dtype to compute in.

    `auto` is the checkpoint's own dtype on CUDA (float16 where the card has no bfloat16 units) and float32 on a CPU,
    whose matrix kernels are made for it; quantised models compute in bfloat16 unless told otherwise.
    """
    if name != "auto" and name not in DTYPES:
        raise RequestError(f"--dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}.")
    if quant != "none" and name == "float32":
        raise RequestError(
            f"--quant {quant} with --dtype float32 would undo its point: every product would run in float32."
            " Use --dtype bfloat16, float16 or auto."
        )
    if name != "auto":
        return DTYPES[name]
    no_bfloat16 = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    if quant != "none":
        return torch.float16 if no_bfloat16 else torch.bfloat16
    if device.type == "cpu":
        return torch.float32
    own = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.bfloat16
    own = DTYPES.get(own, torch.bfloat16) if isinstance(own, str) else own
    return torch.float16 if own is torch.bfloat16 and no_bfloat16 else own


def resolve_weights(source: Source, weights: Weights) -> Literal["checkpoint", "random"]:
    """`auto` takes the checkpoint where one is named (hub id, folder with weights, GGUF) and random for a card."""
    if weights not in get_args(Weights):
        raise RequestError(f"--weights {weights!r} is unknown; use {', '.join(get_args(Weights))}.")
    if weights != "auto":
        return weights
    if source.kind == "card":
        return "random"
    if source.kind == "folder" and source.path is not None and not _weight_files(source.path):
        return "random"
    return "checkpoint"


def load_config(source: Source, trust_remote_code: bool = False) -> Any:
    """The model's transformers config. Raises ModelError when it cannot be had."""
    from transformers import AutoConfig

    with quiet_libraries():
        try:
            if source.kind == "card" and source.card is not None:
                return AutoConfig.for_model(**source.card.config)
            where, extra = _pretrained_location(source)
            return AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code, **extra)
        except Exception as error:
            raise _config_error(source, error) from error


def check_context(config: Any, longest_context: int) -> None:
    """Raises RequestError when the grid asks for more context than the model has positions for."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and longest_context > limit:
        raise RequestError(
            f"the longest prompt plus its new tokens is {longest_context} tokens, but this model's limit is {limit};"
            " use a shorter --prompt-lens or fewer --new-tokens."
        )


def check_weights(request: ModelRequest) -> None:
    """Raises ModelError for a checkpoint that cannot be loaded, before anything slow: missing, pickled, corrupt."""
    source = request.source
    if request.weights == "random" or source.path is None:
        return
    if source.kind == "gguf":
        if request.quant != "none":
            raise ModelError(
                "a GGUF file is dequantised while it loads, and transformers cannot quantise it again;"
                " use --quant none, or give the original checkpoint."
            )
        return _check_gguf(source.path)
    files = _weight_files(source.path)
    if not files:
        raise ModelError(f"the folder {str(source.path)!r} has a config.json but no weights; use --weights random.")
    pickles = [file for file in files if file.suffix != ".safetensors"]
    if pickles and not request.allow_pickle:
        raise ModelError(
            f"{pickles[0].name} is a pickle, which can run code when it is loaded; give a safetensors checkpoint,"
            " or --allow-pickle if you trust its source."
        )
    for file in files:
        if file.suffix == ".safetensors":
            _check_safetensors(file)
    return None


def load(request: ModelRequest, config: Any) -> LoadedModel:
    """The model of `request`, loaded once, in evaluation mode, on its device (or placed by accelerate if too large).

    Random weights are made tensor by tensor in their final dtype and format, so that no full-precision copy of the
    model ever exists. Raises ModelError when the checkpoint or the combination does not load.
    """
    start = time.perf_counter()
    with quiet_libraries():
        try:
            if request.weights == "random":
                module, device_map = _build_random(request, config)
            else:
                module, device_map = _load_checkpoint(request, config)
        except (RequestError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ModelError(f"{request.source.name} does not load: {_first_line(error)}.") from error
    module.eval()
    module.requires_grad_(False)
    return LoadedModel(
        module=module,
        request=request,
        params=count_params(module),
        load_s=time.perf_counter() - start,
        revision=getattr(module.config, "_commit_hash", None),
        device_map=device_map,
    )


def build_on_meta(config: Any, dtype: torch.dtype, quant: Quant = "none", attn: str | None = None) -> nn.Module:
    """The model of `config` on the meta device: every module and shape, no bytes."""
    with quiet_libraries(), torch.device("meta"):
        module = _from_config(config, dtype, attn)
        return _quantise_modules(module, config, quant, dtype)


def count_params(module: nn.Module) -> int:
    """Parameters of the architecture: shared ones once, a packed 4-bit matrix as the weights it stands for."""
    total = 0
    seen: set[int] = set()
    for owner in module.modules():
        for name, param in owner.named_parameters(recurse=False):
            if id(param) in seen:
                continue
            seen.add(id(param))
            packed = name == "weight" and param.__class__.__name__ == "Params4bit"
            total += owner.in_features * owner.out_features if packed else param.numel()
    return total


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep warnings and progress bars of transformers, accelerate and bitsandbytes off the screen."""
    import transformers
    from transformers.utils import logging as transformers_logging

    level = transformers.logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    loggers = [logging.getLogger(name) for name in ("accelerate", "bitsandbytes", "torch", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), _quiet_tqdm():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()
        for logger, old in zip(loggers, levels, strict=True):
            logger.setLevel(old)


@contextlib.contextmanager
def _quiet_tqdm() -> Iterator[None]:
    """transformers' GGUF reader takes tqdm directly, so that its own switch for progress bars misses it."""
    try:
        import transformers.modeling_gguf_pytorch_utils as gguf_utils
    except ImportError:
        yield
        return
    original = getattr(gguf_utils, "tqdm", None)
    if original is None:
        yield
        return
    gguf_utils.tqdm = lambda iterable, *_args, **_kwargs: iterable
    try:
        yield
    finally:
        gguf_utils.tqdm = original


def _from_config(config: Any, dtype: torch.dtype, attn: str | None) -> nn.Module:
    from transformers import AutoModelForCausalLM

    extra = {"attn_implementation": attn} if attn else {}
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **extra)
    except (ValueError, ImportError) as error:
        raise ModelError(f"transformers cannot build this model: {_first_line(error)}.") from error


def _build_random(request: ModelRequest, config: Any) -> tuple[nn.Module, dict[str, str] | None]:
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False), _skip_init():
        module = _from_config(config, request.dtype, request.attn)
    module = _quantise_modules(module, config, request.quant, request.dtype)
    module.tie_weights()
    device_map = _auto_device_map(module, request.device)
    torch.manual_seed(0)
    _materialise(module, request.device, device_map)
    module.tie_weights()
    if device_map is not None:
        from accelerate import dispatch_model

        dispatch_model(module, device_map, main_device=request.device, force_hooks=True)
    return module, _as_text(device_map)


def _materialise(module: nn.Module, device: torch.device, device_map: dict[str, Any] | None) -> None:
    """Give every meta parameter its random values on its own device, a tied one once, a quantised one quantised."""
    made: dict[int, nn.Parameter] = {}
    for name, owner in module.named_modules():
        target = device if device_map is None else _mapped_device(name, device_map)
        fresh = False
        for key, param in list(owner.named_parameters(recurse=False)):
            if id(param) not in made:
                values = torch.empty(_dense_shape(owner, key, param), dtype=_dense_dtype(owner, param), device=target)
                made[id(param)] = nn.Parameter(values, requires_grad=False)
                fresh = True
            owner._parameters[key] = made[id(param)]
            if fresh and key == "weight" and param.__class__.__name__ in _QUANTISERS:
                nn.init.normal_(owner._parameters[key], std=0.02)
                owner._parameters[key] = _QUANTISERS[param.__class__.__name__](owner, param, target)
        if fresh:
            _init_values(module, owner)
        for key, buffer in owner.named_buffers(recurse=False):
            owner._buffers[key] = buffer.to(target)


def _init_values(module: Any, owner: nn.Module) -> None:
    """Start values as transformers draws them; what it leaves alone is drawn here, so that nothing stays unset."""
    for param in owner._parameters.values():
        if param is not None and param.is_floating_point() and not hasattr(param, "quant_state"):
            nn.init.normal_(param, std=0.02) if param.dim() > 1 else nn.init.zeros_(param)
    if not any(param.__class__.__name__ in _QUANTISERS for param in owner._parameters.values()):
        with torch.no_grad():
            module._init_weights(owner)


def _dense_shape(owner: nn.Module, key: str, param: nn.Parameter) -> tuple[int, ...]:
    if key == "weight" and param.__class__.__name__ in _QUANTISERS:
        return (owner.out_features, owner.in_features)
    return tuple(param.shape)


def _dense_dtype(owner: nn.Module, param: nn.Parameter) -> torch.dtype:
    if param.is_floating_point():
        return param.dtype
    return getattr(owner, "compute_dtype", None) or torch.float16


def _quantised_4bit(owner: nn.Module, template: Any, device: torch.device) -> nn.Parameter:
    from bitsandbytes.nn import Params4bit

    return Params4bit(owner.weight.data, requires_grad=False, **template.__dict__).to(device)


def _quantised_int8(owner: nn.Module, template: Any, device: torch.device) -> nn.Parameter:
    from bitsandbytes.nn import Int8Params

    # Int8Params quantises on the way from the host to the device, and only there.
    return Int8Params(owner.weight.data.cpu(), requires_grad=False, has_fp16_weights=template.has_fp16_weights).to(
        device
    )


_QUANTISERS = {"Params4bit": _quantised_4bit, "Int8Params": _quantised_int8}


@contextlib.contextmanager
def _skip_init() -> Iterator[None]:
    """Leave new parameters unset: they are on their way to the meta device, so drawing values would be lost time."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        from transformers.modeling_utils import no_init_weights
    with no_init_weights():
        yield


def _quantise_modules(module: nn.Module, config: Any, quant: Quant, dtype: torch.dtype) -> nn.Module:
    """Swap linear layers for bitsandbytes' own, as `from_pretrained` would (the head stays as it is)."""
    if quant == "none":
        return module
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(quantization_config(quant, dtype), pre_quantized=False)
    quantizer.preprocess_model(model=module, device_map=None, keep_in_fp32_modules=None)
    return module


def quantization_config(quant: Quant, dtype: torch.dtype) -> Any:
    """bitsandbytes' configuration: blocks of 64 without double quantisation for 4-bit, LLM.int8() for int8."""
    from transformers import BitsAndBytesConfig

    if quant == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=quant, bnb_4bit_compute_dtype=dtype)


def _load_checkpoint(request: ModelRequest, config: Any) -> tuple[nn.Module, dict[str, str] | None]:
    from transformers import AutoModelForCausalLM

    where, extra = _pretrained_location(request.source)
    if request.attn:
        extra["attn_implementation"] = request.attn
    if request.quant != "none":
        extra["quantization_config"] = quantization_config(request.quant, request.dtype)
    planned = build_on_meta(config, request.dtype, request.quant, request.attn)
    too_large = _auto_device_map(planned, request.device) is not None
    del planned
    module = AutoModelForCausalLM.from_pretrained(
        where,
        dtype=request.dtype,
        device_map="auto" if too_large else {"": request.device},
        trust_remote_code=request.trust_remote_code,
        use_safetensors=None if request.allow_pickle else True,
        **extra,
    )
    return module, _as_text(getattr(module, "hf_device_map", None)) if too_large else None


def _auto_device_map(module: nn.Module, device: torch.device) -> dict[str, Any] | None:
    """accelerate's placement over this device and the host when the weights do not fit on the device, else None."""
    room = int(available_bytes(device) * _FILL_LIMIT)
    if _weight_bytes(module) <= room:
        return None
    if device.type == "cpu":
        raise ModelError(
            f"the weights need {_weight_bytes(module) / 1e9:.1f} GB, but {available_bytes(device) / 1e9:.1f} GB of"
            " memory is free; use a 16-bit --dtype, --quant nf4, or a smaller model."
        )
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_max_memory

    no_split = list(getattr(module, "_no_split_modules", None) or [])
    device_map: dict[str, Any] = infer_auto_device_map(module, get_max_memory(), no_split)
    if "disk" in device_map.values():
        raise ModelError(
            f"the weights need {_weight_bytes(module) / 1e9:.1f} GB, more than this device and the host have together;"
            " use a 16-bit --dtype, --quant nf4, or a smaller model."
        )
    return device_map


def _weight_bytes(module: nn.Module) -> int:
    total = 0
    seen: set[int] = set()
    for owner in module.modules():
        for key, param in owner.named_parameters(recurse=False):
            if id(param) in seen:
                continue
            seen.add(id(param))
            kind = param.__class__.__name__
            size = param.numel() * param.element_size()
            if key == "weight" and kind == "Params4bit":
                size = owner.in_features * owner.out_features * 9 // 16  # 4.5 bits a weight: 4 + 32/64 of absmax
            elif key == "weight" and kind == "Int8Params":
                size = owner.in_features * owner.out_features
            total += size
    return total


def _mapped_device(name: str, device_map: dict[str, Any]) -> torch.device:
    parts = name.split(".")
    for end in range(len(parts), -1, -1):
        placed = device_map.get(".".join(parts[:end]))
        if placed is not None:
            return torch.device("cuda", placed) if isinstance(placed, int) else torch.device(placed)
    return torch.device("cpu")


def _as_text(device_map: dict[str, Any] | None) -> dict[str, str] | None:
    return None if device_map is None else {name: str(device) for name, device in device_map.items()}


def _pretrained_location(source: Source) -> tuple[str, dict[str, Any]]:
    if source.kind == "gguf" and source.path is not None:
        return str(source.path.parent), {"gguf_file": source.path.name}
    return (source.hub_id or str(source.path)), {}


def _weight_files(folder: Path) -> list[Path]:
    """The checkpoint's files: safetensors if there are any, else pickles; those an index names, else all."""
    for pattern, index_name in (
        ("*.safetensors", "model.safetensors.index.json"),
        ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
    ):
        files = sorted(folder.glob(pattern))
        index = folder / index_name
        if index.is_file():
            try:
                named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (ValueError, KeyError, AttributeError):
                raise ModelError(f"{index.name} is not valid; download the checkpoint again.") from None
            missing = sorted(name for name in named if not (folder / name).is_file())
            if missing:
                raise ModelError(f"the checkpoint lacks {missing[0]}, which its index names; download it again.")
            files = sorted(folder / name for name in named)
        if files:
            return files
    return []


def _check_safetensors(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            opened.keys()
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{file.name} is no readable safetensors file: {_first_line(error)}.") from None


def _check_gguf(file: Path) -> None:
    from gguf import GGUFReader

    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ModelError(f"{file.name} is no GGUF file: it does not begin with its mark.")
    try:
        GGUFReader(file)
    except Exception as error:
        raise ModelError(f"{file.name} is a damaged GGUF file: {_first_line(error)}.") from None


def _config_error(source: Source, error: Exception) -> ModelError:
    if source.kind == "gguf" and source.path is not None:
        _check_gguf(source.path)
    if source.kind == "hub":
        hint = (
            f" Its card is known: --weights random, or the name {source.card.hub_id!r}'s card from `roofscope models`."
            if source.card is not None
            else ""
        )
        return ModelError(
            f"{source.name} is neither in the local cache nor to be had from the hub"
            f" (offline, gated, or no such model).{hint}"
        )
    return ModelError(f"{source.name}: its configuration cannot be read: {_first_line(error)}.")


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(". ")[:300]
