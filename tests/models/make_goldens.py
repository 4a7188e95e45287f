"""Makes tests/models/goldens: what transformers, in float32, answers for the test models.

Not a test, and the only file here that needs torch and transformers (5.24 was used). Run
`python tests/models/make_goldens.py` for the tiny families, and with `--real smollm2:135m=FILE` or
`--real gemma3:270m=FILE` (a GGUF file) for a real model: its weights are then dequantised and
renamed by transformers itself, so neither headrace's readers nor its block decoders take part.
Prompts are cut from a text (`--text`; the tiny Shakespeare corpus, public domain, was used).
For real models a digest is kept: logsumexp and the 50 largest logits of a few positions, and every
97th logit of the last.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "src")]

import tiny_models  # noqa: E402

TOP = 50
STRIDE = 97
LENGTHS = (5, 9, 17, 33, 64, 100, 150, 257, 400, 600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", metavar="NAME=FILE", help="a real model instead of tiny ones")
    parser.add_argument("--text", type=Path, help="a long text to cut the real prompts from")
    options = parser.parse_args()
    (HERE / "goldens").mkdir(exist_ok=True)
    if options.real:
        name, _, path = options.real.partition("=")
        save_real(name, Path(path), options.text.read_text(encoding="utf-8"))
    else:
        save_tiny()


def save(path: Path, arrays: dict[str, Any]) -> None:
    np.savez_compressed(path, **arrays)


# ---- tiny families


def save_tiny() -> None:
    """Logits of every position, and config.json as transformers itself would save it."""
    arrays: dict[str, NDArray[Any]] = {}
    configs: dict[str, Any] = {}
    for case in tiny_models.CASES:
        model = tiny_model(case)
        for i, tokens in enumerate(tiny_models.prompts(case)):
            arrays[f"{case}.{i}"] = all_logits(model, tokens)
        configs[case] = json.loads(model.config.to_json_string(use_diff=False))
    save(HERE / "goldens" / "tiny.npz", arrays)
    text = json.dumps(configs, indent=0, sort_keys=True)
    (HERE / "goldens" / "saved_configs.json").write_text(text + "\n", encoding="utf-8")


def tiny_model(case: str) -> Any:
    """The case as a transformers model."""
    config = dict(tiny_models.CASES[case])
    config["dtype"] = config.pop("torch_dtype")
    made = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    state = {name: torch.from_numpy(x) for name, x in tiny_models.weights(case).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not missing or config["tie_word_embeddings"], missing
    return model.float().eval()


def all_logits(model: Any, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]
    array: NDArray[np.float32] = logits.float().numpy()
    return array


# ---- real models


def save_real(name: str, path: Path, text: str) -> None:
    """The digest of ten prompts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokens = np.array(tokenizer(text[:40000])["input_ids"], np.int32)
    arrays: dict[str, NDArray[Any]] = {}
    for i, length in enumerate(LENGTHS):
        prompt = tokens[i * 700 : i * 700 + length].copy()
        if tokenizer.bos_token_id is not None and "gemma" in name:
            prompt[0] = tokenizer.bos_token_id
        arrays |= {f"{i}.{key}": x for key, x in digest(model, prompt).items()}
    save(HERE / "goldens" / f"{name.replace(':', '-')}.npz", arrays)


def digest(model: Any, tokens: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
    """**Shapes** rows [r], top_ids and top_logits [r, TOP], logsumexp [r], strided [vocab / 97]."""
    n = len(tokens)
    rows = np.unique([0, n // 2, n - 3, n - 2, n - 1])
    logits = all_logits(model, tokens)[rows]
    top_ids = np.argsort(-logits, axis=-1)[:, :TOP].astype(np.int32)
    return {
        "tokens": tokens,
        "rows": rows.astype(np.int32),
        "top_ids": top_ids,
        "top_logits": np.take_along_axis(logits, top_ids, axis=-1),
        "logsumexp": np.logaddexp.reduce(logits.astype(np.float64), axis=-1),
        "max_abs": np.abs(logits).max(axis=-1),
        "strided": logits[-1, ::STRIDE],
    }


if __name__ == "__main__":
    main()
