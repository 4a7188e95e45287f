"""Numbers of the GGUF format: value types, tensor types, limits. Tables only.

Tensor types we cannot read are listed by name, so that a refusal can say what the file holds and
what to do about it. Sources: ggml `gguf.h` and `ggml.h`; type ids of the fork ik_llama.cpp from
its own `ggml.h` (it re-uses 36, retired in ggml, for I2_S).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import numpy as np

from headrace.formats.blocks import KINDS

MAGIC = b"GGUF"
VERSION = 3
READABLE_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT, MAX_ALIGNMENT = 8, 65536

MAX_KEY_BYTES = 65535  # the specification's own limit
MAX_NAME_BYTES = 63  # ggml: GGML_MAX_NAME less the closing zero
MAX_DIMS = 4
# Each count is first held against the bytes left in the file; these are the second fence, against
# files that are large and hostile. The largest known vocabulary has 0.26 M tokens and 0.5 M
# merges; models with one tensor per expert reach 50 thousand tensors.
MAX_STRINGS = 1 << 22
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_METADATA_BYTES = 1 << 27


class ValueType(IntEnum):
    """Types of metadata values."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


# Scalars of fixed width; a bool is one byte that must be 0 or 1.
SCALAR_DTYPES: Mapping[int, np.dtype[np.generic]] = {
    ValueType.U8: np.dtype("<u1"),
    ValueType.I8: np.dtype("<i1"),
    ValueType.U16: np.dtype("<u2"),
    ValueType.I16: np.dtype("<i2"),
    ValueType.U32: np.dtype("<u4"),
    ValueType.I32: np.dtype("<i4"),
    ValueType.F32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("<u1"),
    ValueType.U64: np.dtype("<u8"),
    ValueType.I64: np.dtype("<i8"),
    ValueType.F64: np.dtype("<f8"),
}

KIND_OF_TYPE: Mapping[int, str] = {kind.type_id: kind.name for kind in KINDS.values()}

UNSUPPORTED: Mapping[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
    42: "Q2_0",
}

RETIRED: Mapping[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

FORK = "ik_llama.cpp"
FORK_RANGES = (range(97, 100), range(133, 159), range(202, 400))
FORK_NAMES: Mapping[int, str] = {
    133: "Q6_0",
    134: "IQ1_BN",
    135: "IQ2_BN",
    137: "IQ2_K",
    138: "IQ3_K",
    139: "IQ4_K",
    140: "IQ5_K",
    141: "IQ6_K",
    144: "IQ4_KS",
    145: "IQ2_KS",
    146: "IQ4_KSS",
    148: "Q8_K32",
    151: "Q8_KV",
    152: "IQ5_KS",
    153: "IQ2_KT",
    154: "IQ3_KT",
    155: "IQ4_KT",
    156: "IQ3_KS",
    157: "IQ2_KL",
    158: "IQ1_KT",
    202: "Q4_0_R8",
    206: "Q5_0_R4",
    208: "Q8_0_R8",
    210: "Q2_K_R4",
    211: "Q3_K_R4",
    212: "Q4_K_R4",
    213: "Q5_K_R4",
    214: "Q6_K_R4",
    216: "IQ2_XXS_R4",
    217: "IQ2_XS_R4",
    218: "IQ3_XXS_R4",
    219: "IQ1_S_R4",
    220: "IQ4_NL_R4",
    221: "IQ3_S_R4",
    222: "IQ2_S_R4",
    223: "IQ4_XS_R8",
    229: "IQ1_M_R4",
    230: "BF16_R16",
    233: "Q6_0_R4",
    335: "IQ2_BN_R4",
    337: "IQ2_K_R4",
    338: "IQ3_K_R4",
    339: "IQ4_K_R4",
    340: "IQ5_K_R4",
    344: "IQ4_KS_R4",
    352: "IQ5_KS_R4",
    353: "MXFP4_R8",
    397: "Q8_K_R16",
    398: "Q8_KV_R8",
    399: "Q8_K_R8",
}


def why_unsupported(type_id: int) -> str:
    """What to say about a tensor type that is not in `KIND_OF_TYPE`."""
    advice = f"supported: {', '.join(KINDS)}"
    if type_id in UNSUPPORTED:
        return f"type {UNSUPPORTED[type_id]} (id {type_id}) is not supported; {advice}"
    if type_id in RETIRED:
        also = f" (or I2_S of the fork {FORK}, which re-uses the id)" if type_id == 36 else ""
        return (
            f"type {RETIRED[type_id]} (id {type_id}) was retired from the format{also}; "
            f"re-quantise the model from its original weights; {advice}"
        )
    if any(type_id in ids for ids in FORK_RANGES):
        name = FORK_NAMES.get(type_id, "a private type")
        return (
            f"type id {type_id} is {name} of the fork {FORK}, which only that fork reads; "
            f"re-quantise the model to a common type; {advice}"
        )
    return f"type id {type_id} is not known; {advice}"
