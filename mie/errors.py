"""Every way in which the engine says no, one class each.

Invariant: a refusal names the values that disagree, and knows the HTTP status that it means.
Asserts elsewhere state what the engine promises itself; these classes are for what comes from
outside: files, settings, requests.
"""

from __future__ import annotations


class MieError(Exception):
    """The base of every refusal. ``http_status`` is what a server answers when it reaches one."""

    http_status = 500


# -- models and their files ---------------------------------------------------------------------


class ModelNotFoundError(MieError):
    """No model of that name: not built in, not a local path, not to be had from the hub."""

    http_status = 404


class DownloadError(MieError):
    """A model is known but could not be fetched, or what came is not what was expected."""


class CheckpointError(MieError):
    """A weight file breaks its own format. The message names the file and the numbers."""


class WeightMismatchError(CheckpointError):
    """The file is sound, but its tensors are not the ones that the model needs."""


class UnsupportedModelError(MieError):
    """The model asks for something the decoder does not do; the message names it."""


# -- settings -----------------------------------------------------------------------------------


class ConfigError(MieError):
    """A setting contradicts another, or the machine."""


class UnknownPartError(ConfigError):
    """``parts=`` names a part that the engine does not have."""


class PartError(MieError):
    """A replaced part broke its protocol while the engine ran on it."""


# -- requests -----------------------------------------------------------------------------------


class RequestError(MieError):
    """The request cannot be served as it was asked; nothing else is affected."""

    http_status = 400


class EmptyPromptError(RequestError):
    """A prompt without a single token: there is nothing to compute a next token from."""


class ContextLengthError(RequestError):
    """The prompt, or the prompt with its answer, does not fit the model's context or memory."""


class ChatTemplateError(RequestError):
    """The chat template is missing or refuses these messages; the message is the template's own."""


# -- the engine at work -------------------------------------------------------------------------


class OutOfBlocksError(MieError):
    """The next step needs more blocks of K/V memory than are free: other sequences hold them."""

    http_status = 503
