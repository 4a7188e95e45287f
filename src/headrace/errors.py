"""One exception tree: every error a user can cause or must act on.

Each error carries a stable `code` (machine readable), an HTTP `status`, and a message that says
what was given, what is
allowed and what to do. Bugs of ours are assertions, never these.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of all typed errors."""

    code = "internal_error"
    status = 500

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(HeadraceError):
    """A parameter is unknown, of the wrong type, or out of range; `param` names it."""

    code = "invalid_request"
    status = 400


class ContextTooLong(InvalidRequest):
    """The prompt (and the tokens asked for) can never fit the context or the KV pool."""

    code = "context_length_exceeded"


class ModelNotFound(HeadraceError):
    """No such model in the catalogue, the store or on disk."""

    code = "model_not_found"
    status = 404


class FormatError(HeadraceError):
    """A model file is malformed, hostile, or of a format or type that is refused."""

    code = "invalid_model_file"
    status = 400


class UnsupportedModel(HeadraceError):
    """The architecture, tokenizer or an architecture flag is not known; the message lists what
    is."""

    code = "unsupported_model"
    status = 400


class TemplateError(InvalidRequest):
    """The chat template is missing, refused the messages, or broke its limits."""

    code = "chat_template_error"


class Overloaded(HeadraceError):
    """A queue is full; retry later."""

    code = "overloaded"
    status = 503


class DownloadError(HeadraceError):
    """A model could not be fetched or its checksum does not agree."""

    code = "download_failed"
    status = 502


class OutOfMemory(HeadraceError):
    """The machine has not enough memory for the model and the smallest useful KV pool."""

    code = "out_of_memory"
    status = 507


class EngineFailure(HeadraceError):
    """The engine stopped or a step failed; the request may be retried."""

    code = "engine_failure"
    status = 500


class Unsupported(InvalidRequest):
    """A known parameter or value of a dialect that this version does not serve."""

    code = "unsupported_parameter"


class UnknownParameter(InvalidRequest):
    """A parameter no dialect of ours has; the message suggests the nearest."""

    code = "unknown_parameter"


class BodyTooLarge(HeadraceError):
    """A request body is longer than the limit."""

    code = "request_too_large"
    status = 413


class ModelLoading(HeadraceError):
    """The model is not ready yet; retry later."""

    code = "model_loading"
    status = 503


class ReaderTooSlow(HeadraceError):
    """The reader of a stream fell further behind than its buffer; its request was ended."""

    code = "reader_too_slow"
    status = 408


class DeadlineExceeded(HeadraceError):
    """A request took longer than the server's limit; it was ended."""

    code = "deadline_exceeded"
    status = 504
