"""The engine: requests of tokens in, events of tokens out.

`program`, `scheduler`, `pages` and `prefix` are pure: plain values in, plain values out. `runner`
and `sampler` own the arrays of a step, `loop` owns the thread, `lifecycle` loads a model and sizes
its memory. Start reading at `loop.Engine`.
"""
