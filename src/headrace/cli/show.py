"""`headrace show` and `headrace ls`: what a model is and needs, read from its file without loading.

One description (plain values) is printed as text or as JSON, so both always agree.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from headrace.cli.output import size, table
from headrace.cli.sampling import choose_params, describe
from headrace.config import StoreConfig
from headrace.errors import HeadraceError
from headrace.formats.store import ResolvedModel, StoredModel, model_path
from headrace.types import Checkpoint

KV_BYTES = {"f16": 2, "f32": 4}


@dataclass(frozen=True, slots=True)
class TypeCount:
    """Tensors of one kind."""

    kind: str
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Need:
    """What the engine will hold; absent when the architecture is not supported."""

    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_full_context: int


@dataclass(frozen=True, slots=True)
class Description:
    """Everything `show` tells. Sizes None: the architecture is not known here."""

    id: str
    path: str
    source: str
    licence: str | None
    format: str
    architecture: str
    num_parameters: int
    num_bytes: int
    types: tuple[TypeCount, ...]
    context: int | None
    vocabulary: int | None
    layers: int | None
    hidden_size: int | None
    heads: str | None
    template_sha256: str | None
    sampling: str
    memory: Need | None
    problem: str | None


def describe_model(model: ResolvedModel, checkpoint: Checkpoint, kv_dtype: str) -> Description:
    """**Raises** nothing for an unsupported architecture: `problem` says why it will not load."""
    from headrace.models import read_spec  # numpy: not for `ls`

    problem = spec = None
    try:
        spec = read_spec(checkpoint)
    except HeadraceError as error:
        problem = error.message
    types = count_types(checkpoint)
    num_bytes = sum(item.num_bytes for item in types)
    memory = None
    if spec is not None:
        per_token = spec.num_layers * 2 * spec.kv_size * KV_BYTES[kv_dtype]
        memory = Need(num_bytes, per_token, per_token * spec.context_length)
    return Description(
        id=model.id,
        path=str(model.path),
        source=model.source,
        licence=model.licence or _licence(checkpoint),
        format="GGUF" if checkpoint.dialect == "gguf" else "Hugging Face folder",
        architecture=_architecture(checkpoint),
        num_parameters=sum(prod(tensor.shape) for tensor in checkpoint.tensors.values()),
        num_bytes=num_bytes,
        types=types,
        context=spec.context_length if spec else None,
        vocabulary=spec.vocab_size if spec else None,
        layers=spec.num_layers if spec else None,
        hidden_size=spec.hidden_size if spec else None,
        heads=f"{spec.num_heads} query, {spec.num_kv_heads} KV, {spec.head_dim} wide"
        if spec
        else None,
        template_sha256=_template_sha256(checkpoint),
        sampling=describe(choose_params({}, model.id, checkpoint.metadata)),
        memory=memory,
        problem=problem,
    )


def count_types(checkpoint: Checkpoint) -> tuple[TypeCount, ...]:
    """Kinds of the stored tensors, the largest share first."""
    tensors: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        tensors[tensor.kind] += 1
        num_bytes[tensor.kind] += tensor.data.nbytes
    return tuple(TypeCount(kind, tensors[kind], total) for kind, total in num_bytes.most_common())


def _architecture(checkpoint: Checkpoint) -> str:
    key = "general.architecture" if checkpoint.dialect == "gguf" else "model_type"
    return str(checkpoint.metadata.get(key, "unknown"))


def _licence(checkpoint: Checkpoint) -> str | None:
    found = checkpoint.metadata.get("general.license")
    return found if isinstance(found, str) else None


def _template_sha256(checkpoint: Checkpoint) -> str | None:
    key = "tokenizer.chat_template" if checkpoint.dialect == "gguf" else "chat_template"
    found = checkpoint.metadata.get(key)
    return hashlib.sha256(found.encode()).hexdigest() if isinstance(found, str) else None


def show_text(found: Description) -> str:
    """For people."""
    rows = [
        ("model", found.id),
        ("path", found.path),
        ("source", found.source),
        ("licence", found.licence or "not stated in the file"),
        ("format", found.format),
        ("architecture", found.architecture),
        ("parameters", f"{found.num_parameters / 1e6:,.1f} M"),
        ("size", size(found.num_bytes)),
    ]
    rows += [
        ("", f"{item.kind}: {item.num_tensors} tensors, {size(item.num_bytes)}")
        for item in found.types
    ]
    if found.memory is not None:
        rows += [
            ("context", f"{found.context} tokens"),
            ("vocabulary", f"{found.vocabulary} tokens"),
            ("layers", f"{found.layers}, {found.hidden_size} wide"),
            ("heads", str(found.heads)),
        ]
    template = found.template_sha256
    rows.append(("template", f"sha256 {template[:16]}" if template else "none: a base model"))
    rows.append(("sampling", found.sampling))
    if found.memory is not None:
        need = found.memory
        rows.append(
            (
                "memory",
                f"{size(need.weight_bytes)} weights + {size(need.kv_bytes_per_token)} KV per token "
                f"({size(need.kv_bytes_full_context)} for one full context)",
            )
        )
    if found.problem is not None:
        rows.append(("problem", f"it will not load: {found.problem}"))
    return table(rows)


def show_json(found: Description) -> str:
    """For programs."""
    return json.dumps(asdict(found), indent=2)


# ---- ls
#


def list_text(models: list[StoredModel], config: StoreConfig) -> str:
    """For people."""
    rows = [("NAME", "SIZE", "FORMAT", "PULLED", "PATH")]
    rows += [
        (item["id"], size(item["num_bytes"]), item["format"], item["pulled"], item["path"])
        for item in _rows(models, config)
    ]
    return table(rows)


def list_json(models: list[StoredModel], config: StoreConfig) -> str:
    """For programs."""
    return json.dumps(_rows(models, config), indent=2)


def _rows(models: list[StoredModel], config: StoreConfig) -> list[dict[str, Any]]:
    return [
        {
            "id": model.id,
            "num_bytes": model.num_bytes,
            "format": "GGUF" if model.entry.endswith(".gguf") else "folder",
            "pulled": model.pulled,
            "path": str(model_path(model, config)),
            "source": model.source,
            "licence": model.licence,
        }
        for model in models
    ]
