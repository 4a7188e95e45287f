"""Text to token ids and back: tokenizers, the incremental detokenizer, stop strings, templates.

`tokenizer.load_tokenizer` is the door; `detokenizer` turns a stream of ids into text that can no
longer change; `chat` renders messages. Everything read from a model file is untrusted here.
"""
