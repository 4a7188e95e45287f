"""Benchmarks that ship with headrace: `headrace bench kernels` and `headrace bench offline`.

Each speed stands beside the machine's roof, measured in the same run (machine.py). Kernels run as
they do in a model, through a recorded program; `offline` runs the engine with its own scheduler and
sampling, without text or HTTP. Figures are medians with the least and the greatest. Comparisons
with other engines are not here but in the repository's `bench/peers`.
"""
