"""Model files: bytes on disk to `Checkpoint` values; nothing here computes with weights.

`checkpoint.open_checkpoint` is the door; `gguf` and `safetensors` read the two containers,
`blocks` knows how quantised weights lie, `fields` reads metadata with types and limits.
Every file is hostile until checked: whatever is wrong with one ends in a `FormatError`.
"""
