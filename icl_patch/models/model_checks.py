"""Whether a model is one that can be attached to at all, and why not; the refusals name what to do
instead.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    Cache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from icl_patch import metrics
from icl_patch._version import __version__
from icl_patch.errors import NonFiniteError, UnsupportedModelError
from icl_patch.layers.device_hooks import device_of, input_device, offloaded
from icl_patch.models.block_spec import Block
from icl_patch.models.forward import cache_in, drafts_for_another, takes_cache
from icl_patch.models.kv_cache import new_cache
from icl_patch.models.language_model import layers_of, vocabulary
from icl_patch.models.pipeline import is_elsewhere, is_last
from icl_patch.models.ranks import ranks_of
from icl_patch.models.recurrent_state import is_recurrent
from icl_patch.models.trace import first_tensor
from icl_patch.models.trial_tokens import trial_tokens
from icl_patch.tolerances import rounding_limit

# The oldest and the newest version of transformers that the tests run with.
TESTED = "5.17", "5.24"
_NO_HEAD = "expected a causal language model with a head over its vocabulary"
_ANOTHER = ": load it with AutoModelForCausalLM, or choose another model"


def check_eval(modules: Iterable[nn.Module]) -> None:
    """Raises ValueError if one of the modules is training, which may change its outputs."""
    if any(module.training for module in modules):
        raise ValueError(
            "expected a model in eval mode, got one that is training: call model.eval()"
        )


def untested_version() -> str:
    """A note for a refusal where transformers is newer than the tests know, else empty: the model
    may be fine, and its class may have changed.
    """
    installed = transformers.__version__
    if _numbers(installed) <= _numbers(TESTED[1]):
        return ""
    return (
        f". transformers {installed} is installed, and icl-patch {__version__} was tested with"
        f" {TESTED[0]} to {TESTED[1]}: if the model should work, install transformers {TESTED[1]},"
        " or a newer icl-patch"
    )


def _numbers(version: str) -> tuple[int, ...]:
    """(major, minor) of a version."""
    return tuple(int(part) for part in version.split(".")[:2])


def check_config(config: Any, name: object) -> None:
    """Raises UnsupportedModelError unless a configuration, that of the model ``name``, is a causal
    language model's. Its weights need not be loaded for this.
    """
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(_not_decoder_only(name, config.model_type))


def _not_decoder_only(name: object, kind: str | None) -> str:
    return (
        f"expected a causal language model (decoder only, as Llama or Gemma), got {name} of type"
        f" {kind!r}: choose another model"
    )


def check_language_model(model: object) -> None:
    """Raises UnsupportedModelError unless the model is one of transformers that ends in logits over
    its vocabulary.
    """
    check_unwrapped(model)
    name, kind = type(model).__name__, getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"{_NO_HEAD}; got {name} of type {kind!r}{_ANOTHER}")
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(_not_decoder_only(name, kind))
    _check_head(model)
    if not model.config.return_dict:
        raise UnsupportedModelError(
            f"expected {name} with config.return_dict = True, got False: set it"
        )
    _check_in_memory(model)
    _check_kept_weights(model)
    if not takes_cache(model):
        raise UnsupportedModelError(
            f"expected a model with a cache, {name} has none: a replay starts from a cache of the"
            " tokens that stay. Choose a causal language model with a cache (encoders, such as"
            f" DistilBERT, have none){untested_version()}"
        )
    if drafts_for_another(model):
        raise UnsupportedModelError(
            f"{name} drafts tokens for another model. It reads the hidden states and the cache of"
            " that model, and no token ids: attach to that model"
        )


def check_unwrapped(model: object) -> None:
    """Raises UnsupportedModelError for a wrapper around a model, or one that is compiled as a whole
    or in parts.
    """
    name, cure = type(model).__name__, None
    steps = ". Decode steps are compiled by generate(compile=True)"
    if hasattr(model, "_orig_mod"):
        cure = f"the model that torch.compile was given, model._orig_mod; got {name}{steps}"
    elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        cure = _without_peft(model)
    elif not isinstance(model, PreTrainedModel):
        parts = ("module", "model")  # of DataParallel and its relatives, and of pipelines
        held = [x for x in parts if isinstance(getattr(model, x, None), PreTrainedModel)]
        cure = f"the model within {name}, its attribute {held[0]}" if held else None
    elif compiled := [path for path, part in model.named_modules() if _is_compiled(part)]:
        part = f"with {compiled[0]} compiled" if compiled[0] else "after model.compile()"
        cure = f"a model that is not compiled, loaded again; got {name} {part}{steps}"
    if cure is not None:
        raise UnsupportedModelError(f"expected {cure}")


def _is_compiled(part: nn.Module) -> bool:
    return part._compiled_call_impl is not None or "_orig_mod" in part._modules


def _without_peft(model: Any) -> str:
    """What to attach to in place of a model of PEFT's."""
    name = type(model).__name__
    kinds = [x for x in model.peft_config.values() if getattr(x, "is_prompt_learning", False)]
    if kinds:
        return (
            f"a model without a learned prompt, got {name} with {kinds[0].peft_type.value}: virtual"
            " tokens are no weights of the model. model.get_base_model() is the model without them"
        )
    merged = getattr(getattr(model, "base_model", model), "merge_and_unload", None)
    other = "" if merged is None else ", or model.merge_and_unload()"
    return f"model.get_base_model(), in which adapters stay in effect{other}; got {name}"


def _check_in_memory(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError if weights, or new tensors, are on the device meta."""
    named = model.named_parameters()
    away = [name for name, x in named if x.is_meta and offloaded(model, name) is None]
    if away:
        raise UnsupportedModelError(
            f"expected all weights of {type(model).__name__} in memory, or offloaded by accelerate;"
            f" {len(away)} have none, such as {away[0]}: they were never loaded. Load the model"
            " with from_pretrained"
        )
    if torch.get_default_device().type == "meta":
        raise UnsupportedModelError(
            "expected a default device with memory, got meta: call torch.set_default_device('cpu')"
        )


def _check_kept_weights(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError for 4-bit weights of bitsandbytes on a CPU with bf16 products:
    their first call packs them anew, and ``state_dict()``, which a fingerprint takes, then spoils
    them (seen in 0.50.2).
    """
    for path, module in model.named_modules():
        packs = getattr(module, "support_avx512bf16_for_cpu", False)
        if packs and next(module.parameters()).device.type == "cpu":
            raise UnsupportedModelError(
                f"expected weights that state_dict() leaves as they are, got those of {path}"
                f" ({type(module).__name__}), which bitsandbytes packs anew on this CPU: load the"
                " model in 8 bits or with torchao (docs/models.md, Quantised models)"
            )


def _check_head(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError unless the model ends in logits over its vocabulary."""
    head, size = model.get_output_embeddings(), vocabulary(model)
    width = getattr(head, "out_features", None)
    if head is not None and (is_elsewhere(head) or width == size):
        return
    cure = f" and {width} logits, not {size}: set config.vocab_size" if width else _ANOTHER
    raise UnsupportedModelError(
        f"{_NO_HEAD}; got {type(model).__name__} of type {model.config.model_type!r}{cure}"
    )


def check_split(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError for a model that is split over processes in a way that is not
    supported.
    """
    config, name = model.config.distributed_config, type(model).__name__
    if config.tp_size > 1 and config.pp_size > 1:
        raise UnsupportedModelError(
            f"expected {name} split by pp_size or by tp_size, got both: choose one of them"
        )
    # transformers 5.17 has neither of these two names
    sizes = getattr(config, "dp_size", config.fsdp_size), getattr(config, "ep_size", 1)
    for kind, size in zip(("FSDP", "expert"), sizes, strict=True):
        if size > 1:
            raise UnsupportedModelError(
                f"expected {name} split by pp_size or tp_size, got {kind} parallelism over {size}"
                " processes: load it with DistributedConfig(pp_size=...)"
            )
    if config.pp_size == 1:
        return
    others = [] if is_last(model) else _parts_between_blocks(model)
    if others:
        raise UnsupportedModelError(
            f"expected a pipeline that computes what {name} does on one device, got {others[0]} on"
            " every rank, which belongs behind the last block: transformers' pipelines do not cover"
            " this class. Spread it with device_map"
        )
    if is_recurrent(model):
        raise UnsupportedModelError(
            f"expected attention in all blocks of a pipeline, {name} has recurrent layers, whose"
            " states a pipeline does not size"
        )


def _parts_between_blocks(model: PreTrainedModel) -> list[str]:
    """The parts of this rank that run before the next rank's, without blocks and embeddings."""
    return [
        name
        for name, child in model.base_model.named_children()
        if name not in ("layers", "embed_tokens") and any(True for _ in child.parameters())
    ]


def check_block_devices(layers: dict[str, nn.Module]) -> None:
    """Raises UnsupportedModelError if a block runs on more than one device."""
    for path, layer in layers.items():
        own = [module for module in layer.modules() if [*module.parameters(recurse=False)]]
        devices = sorted({str(device_of(module)) for module in own})
        if len(devices) > 1:
            raise UnsupportedModelError(
                f"expected each block on one device, {path} is on {', '.join(devices)}: give it"
                f" one in the device_map, {{..., {path!r}: {devices[0]!r}}}"
            )


def check_not_shared(layers: dict[str, nn.Module]) -> None:
    """Raises UnsupportedModelError if two blocks have a module with parameters in common."""
    seen: dict[int, str] = {}
    for path, layer in layers.items():
        for name, module in layer.named_modules():
            own = [*module.parameters(recurse=False)]
            place = f"{path}.{name}" if name else path
            other = seen.setdefault(id(module), place) if own else place
            if other != place:
                raise UnsupportedModelError(
                    f"{place} is the same module as {other}: a patch of one would change the other"
                )


def check_distinct(model: nn.Module, block: Block) -> None:
    """Raises UnsupportedModelError if two parts of a block that a patch changes are one module."""
    places = [*map(block.path_of, block.spec.patched)]
    modules = [*map(model.get_submodule, places)]
    for place, module in zip(places, modules, strict=True):
        if modules.count(module) > 1:
            raise UnsupportedModelError(
                f"{place} is one module in two places of its block, of which each needs a patch of"
                " its own: put a copy in one of them"
            )


def above_range(model: nn.Module, path: str, output: Tensor) -> str | None:
    """The refusal of a module that computes infinities or NaNs; None if all outputs are finite."""
    if output.isfinite().all():
        return None
    for name, weight in model.named_parameters():
        # others, such as quantised ones, do not have all of torch's functions
        plain = type(weight.data) is Tensor and weight.is_floating_point() and not weight.is_meta
        if plain and not weight.isfinite().all():
            return (
                f"{name} holds NaN or infinity, in {weight.dtype}: load a checkpoint with finite"
                " weights, in the dtype that it was saved in"
            )
    cure = "Load the model in a dtype of a wider range, torch.bfloat16 or torch.float32"
    if output.dtype != torch.float16:
        cure = "Check that its weights were loaded whole, and that no number is far too large"
    limits = torch.finfo(output.dtype)
    return (
        f"{path} has outputs that {limits.dtype} cannot hold: above its largest number"
        f" {limits.max:.1e}. {cure}"
    )


def require_finite(
    model: PreTrainedModel,
    logits: Tensor,
    again: Callable[[], object],
    valid: Tensor | None = None,
) -> None:
    """Check the logits (B, T, V) of the valid (B, T) tokens, by default of all; one wait for the
    device.

    again: runs the model as it ran; called only if logits are not finite, to find the block in
        which the first number was not.

    Raises:
        NonFiniteError: NaN or infinity in logits of a valid token.
    """
    if metrics.all_finite(logits):
        return
    wrong = ~logits.isfinite().all(-1)
    if valid is not None:
        wrong &= valid
    if wrong.any():
        row, reasons = int(wrong.nonzero()[0, 0]), _blocks_above_range(model, again)
        reasons += filter(None, [above_range(model, "the head", logits)])
        raise NonFiniteError(
            f"expected finite logits, got NaN or infinity in row {row}: {reasons[0]}"
        )


def _blocks_above_range(model: PreTrainedModel, run: Callable[[], object]) -> list[str]:
    """:func:`above_range` of every block that computes infinities or NaNs, in the order of a run;
    of a split model of all ranks.
    """
    found: list[str] = []

    def look(path: str, _module: nn.Module, _args: Any, outputs: Any) -> None:
        output = first_tensor(outputs)
        if output is not None and (reason := above_range(model, path, output)):
            found.append(reason)

    with ExitStack() as hooks:
        for path, layer in layers_of(model).items():
            hooks.enter_context(layer.register_forward_hook(partial(look, path)))
        run()
    return [reason for part in ranks_of(model).exchange(found) for reason in part]


@torch.no_grad()
def explain_failure(
    model: PreTrainedModel, error: Exception, tokenizer: PreTrainedTokenizerBase | None
) -> str:
    """Why attaching failed with ``error``, for a user: a property of the model's class that rules
    it out, the refusal as it was, or the model's own words.

    Runs the model on a few trial tokens. Only a failure calls for this.
    """
    return _reason(model, error, tokenizer) + untested_version()


def _reason(
    model: PreTrainedModel, error: Exception, tokenizer: PreTrainedTokenizerBase | None
) -> str:
    name = type(model).__name__
    refusal = str(error) if isinstance(error, UnsupportedModelError) else None
    raw = (
        f"{name} fails on the tokens that attaching tries, two rows in several calls over a"
        f" {type(new_cache(model)).__name__}: {' '.join(str(error).split())}"
    )
    if torch.is_autocast_enabled(input_device(model).type):
        raw += ". It was tried without autocast: give all parameters one dtype"
    ids = trial_tokens(model, 6, 2, tokenizer)
    try:
        output = model(ids, use_cache=True)
        other = model(torch.cat([ids[:, :-1], ids[:, :1]], 1)).logits  # another last token
    except Exception:  # the first error says more
        return refusal or f"{raw} (it fails on token ids alone: choose a model that needs no more)"
    logits, cache = output.logits, cache_in(output)
    training = [path for path, module in model.named_modules() if module.training]
    if training and not torch.equal(logits, model(ids).logits):
        return (
            f"expected a model in eval mode, got {name} with {training[0]} in training, which gives"
            " other logits at every call: call model.eval()"
        )
    changed = (other - logits)[:, :-1].abs().max()
    if changed > rounding_limit(logits.dtype) * logits.abs().max():
        return (
            f"expected a causal language model, but in {name} a token's logits depend on the tokens"
            " after it: it reads in both directions. Choose another model; one that was trained as"
            " a decoder needs is_decoder=True in its configuration (BERT and its relatives)"
        )
    if refusal is None and cache is not None and not isinstance(cache, Cache):
        return (
            f"expected a model with a cache of transformers, but {name} keeps its state in a class"
            f" of its own, {type(cache).__name__}, which cannot be masked or joined with another:"
            " choose a model of another class"
        )
    return refusal or raw
