"""What a request may say about parallel generation, and what that means for the model that is served.

Knows the names, ranges and presets of the wire's ``parallel``, and the settings of each strategy that they become. What
makes no sense for the model is refused by name. Knows no prompt and no HTTP.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.models.decoding import MOST_POST_STEPS, NO_EDITS, SEQUENTIAL, Decoding
from jaxserve.server import wire
from jaxserve.server.extensions import Parallel
from jaxserve.server.params import check_count, check_range
from jaxserve.server.service import ServedModel

WORDS: dict[str, tuple[str, ...]] = {
    "mode": ("auto", "off", "draft", "block", "candidates"),
    "rescore": ("logprob", "verifier"),
    "quality": ("speed", "balanced", "quality"),
    "trace": ("none", "summary", "steps"),
    "stream": ("committed", "provisional"),
}
FRAGMENT_TOKENS = 32
MOST_DRAFTS, MOST_STEPS, MOST_CANDIDATES = 1024, 1024, 64
RANGES: dict[str, tuple[float, float]] = {
    "draft_tokens": (1, MOST_DRAFTS),
    "block_length": (1, MOST_STEPS),
    "mask_threshold": (0.0, 1.0),
    "edit_threshold": (0.0, 1.0),
    "max_post_steps": (0, MOST_POST_STEPS),
    "denoising_steps": (1, MOST_STEPS),
    "candidates": (1, MOST_CANDIDATES),
    "fragment_tokens": (1, MOST_STEPS),
}
# What LLaDA2.1's model card calls its modes (mask-to-token and token-to-token thresholds, at most 16 post steps); where
# nothing is edited, the thresholds that SDAR's engines and LLaDA2.0 recommend. "balanced" is what the model itself has.
EDITING = {
    "speed": {"threshold": 0.5, "edit_threshold": 0.0, "max_post_steps": 16},
    "quality": {"threshold": 0.7, "edit_threshold": 0.5, "max_post_steps": 16},
    "balanced": {},
}
FILLING: dict[str, dict[str, float]] = {"speed": {"threshold": 0.85}, "quality": {"threshold": 0.95}, "balanced": {}}
_SETTINGS = {
    "mask_threshold": "threshold",
    "edit_threshold": "edit_threshold",
    "max_post_steps": "max_post_steps",
    "denoising_steps": "denoising_steps",
    "draft_tokens": "drafts",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What a request wants of parallel generation, checked against the model.

    Attributes:
        settings: of the strategy, as ``engine.request.Request`` has them.
        draft: tokens of the caller's own guess.
        predicted: there is such a guess, which may be empty.
        told: the caller wants to know what it took, even if that is nothing.
        traced: each pass is told of; with ``steps`` what it left, too.
        provisional: text that may change is streamed beside the other.
        candidates, rescore: fragments to choose from, and how; ``fragment_tokens`` is how long they are at most.
    """

    settings: tuple[tuple[str, float], ...] = ()
    draft: tuple[int, ...] = ()
    predicted: bool = False
    told: bool = False
    trace: str = "none"
    provisional: bool = False
    candidates: int = 1
    rescore: str = "logprob"
    fragment_tokens: int = FRAGMENT_TOKENS

    @property
    def times(self) -> int:
        """How many times the tokens of a text are read or written at most: by candidates, one more, and a verifier."""
        if self.candidates == 1:
            return 1
        return (self.candidates + 1) * (2 if self.rescore == "verifier" else 1)


ASKED_NOTHING = Asked()


def asked(request: wire.SamplingFields, model: ServedModel) -> Asked:
    """What the request asks.

    Raises:
        InvalidRequest: out of range, or without a meaning for this model.
    """
    wanted = request.parallel or Parallel()
    _check_values(wanted)
    mode, candidates = wanted.mode or "auto", wanted.candidates or 1
    if wanted.mode == "candidates" and wanted.candidates is None:
        candidates = 2
    if candidates > 1 and mode not in ("auto", "candidates"):
        raise _senseless("candidates", f"with mode '{mode}'")
    for name in ("rescore", "fragment_tokens"):
        if getattr(wanted, name) is not None and candidates == 1:
            raise _senseless(name, "without candidates")
    if wanted.rescore == "verifier" and (model.decoding is None or model.decoding.kind != "block"):
        raise _senseless("rescore", "as 'verifier' for this model: its log-probabilities are all it could say")
    provisional = wanted.stream == "provisional"
    if provisional:
        _check_provisional(request, model, candidates)
    trace = wanted.trace or "none"
    usage = bool(request.stream_options and request.stream_options.include_usage)
    if trace != "none" and request.stream and not usage and not isinstance(request, wire.GenerateRequest):
        raise _senseless("trace", "in a stream without 'stream_options.include_usage', whose last chunk holds it")
    return Asked(
        settings=tuple(_settings(wanted, mode, model).items()),
        draft=_draft(request.prediction, model),
        predicted=request.prediction is not None,
        told=request.parallel is not None or request.prediction is not None,
        trace=trace,
        provisional=provisional,
        candidates=candidates,
        rescore=wanted.rescore or "logprob",
        fragment_tokens=wanted.fragment_tokens or FRAGMENT_TOKENS,
    )


def _check_values(wanted: Parallel) -> None:
    """Words and ranges."""
    for name, words in WORDS.items():
        value = getattr(wanted, name)
        if value is not None and value not in words:
            raise InvalidRequest(f"'parallel.{name}' must be one of: {', '.join(words)}.", param=f"parallel.{name}")
    for name, (low, high) in RANGES.items():
        value = getattr(wanted, name)
        if value is not None:
            check_range(f"parallel.{name}", value, low, high)


def _check_provisional(request: wire.SamplingFields, model: ServedModel, candidates: int) -> None:
    if model.decoding is None:
        raise _senseless("stream", "as 'provisional': this model's tokens are final as they come")
    if not request.stream:
        raise _senseless("stream", "as 'provisional' unless the request's own 'stream' is true")
    if candidates > 1:
        raise _senseless("stream", "as 'provisional' with candidates: which of them is chosen is known in the end")


def _settings(wanted: Parallel, mode: str, model: ServedModel) -> dict[str, float]:
    """By the strategy's names; what a request says itself goes before its preset."""
    said = {name: getattr(wanted, name) for name in _SETTINGS if getattr(wanted, name) is not None}
    decoding = model.decoding
    if decoding is None:
        return _of_continued_text(wanted, mode, said, model)
    if mode == "draft":
        raise _senseless("mode", "as 'draft': this model decides several tokens at once without drafts")
    if wanted.block_length is not None and wanted.block_length != decoding.block:
        message = f"'parallel.block_length' can only be {decoding.block}: this model was trained for such blocks."
        raise InvalidRequest(message, param="parallel.block_length")
    _check_known(said, decoding)
    if mode == "off":
        given = next(iter(said), "quality" if wanted.quality else None)
        if given is not None:
            raise _senseless(given, "with mode 'off'")
        if decoding.kind == "canvas":
            raise _senseless("mode", "as 'off': this model decides all of a canvas together")
        return {"rule": SEQUENTIAL, "denoising_steps": decoding.block, "max_post_steps": 0}
    if wanted.quality is not None and decoding.kind == "canvas":
        raise _senseless("quality", "for this model: set 'denoising_steps'")
    presets = EDITING if edits(decoding) else FILLING
    preset = {} if wanted.quality is None else presets[wanted.quality]
    return preset | {_SETTINGS[name]: value for name, value in said.items()}


def _of_continued_text(wanted: Parallel, mode: str, said: dict[str, Any], model: ServedModel) -> dict[str, float]:
    """Of models that continue a text token by token: drafts, where they are made."""
    named = next((name for name in said if name != "draft_tokens"), None)
    named = named or next((name for name in ("block_length", "quality") if getattr(wanted, name) is not None), None)
    if named is not None:
        raise _senseless(named, "for this model, which does not decide tokens together")
    if mode == "block":
        raise _senseless("mode", "as 'block': this model continues a text token by token")
    drafts = said.get("draft_tokens")
    if (mode == "draft" or drafts is not None) and not model.drafts:
        raise _senseless("mode" if drafts is None else "draft_tokens", "here: no drafts are made for this model")
    if mode == "off":
        if drafts is not None:
            raise _senseless("draft_tokens", "with mode 'off'")
        return {"drafts": 0} if model.drafts else {}
    if drafts is not None:
        check_range("parallel.draft_tokens", drafts, 1, model.drafts)
    return {} if drafts is None else {"drafts": drafts}


def _check_known(said: dict[str, Any], decoding: Decoding) -> None:
    """Whether the model's way to decode has what is set."""
    if "draft_tokens" in said:
        raise _senseless("draft_tokens", "for this model, which makes no drafts")
    if decoding.kind == "canvas":
        name = next((name for name in said if name != "denoising_steps"), None)
        if name is not None:
            raise _senseless(name, "for this model: it accepts tokens by their entropy")
        return
    if not edits(decoding):
        name = next((name for name in ("edit_threshold", "max_post_steps") if name in said), None)
        if name is not None:
            raise _senseless(name, "for this model, which does not edit what it has decided")
    if "denoising_steps" in said:
        check_range("parallel.denoising_steps", said["denoising_steps"], 1, decoding.block)


def edits(decoding: Decoding) -> bool:
    """Whether a block model overwrites what it has decided, by its own configuration."""
    return decoding.edit_threshold < NO_EDITS or decoding.delete_id is not None


def _draft(prediction: wire.Prediction | None, model: ServedModel) -> tuple[int, ...]:
    """The caller's guess as tokens; what is longer than any output is of no use."""
    if prediction is None:
        return ()
    if prediction.type != "content":
        raise InvalidRequest("'prediction.type' must be 'content'.", param="prediction")
    if isinstance(prediction.content, str):
        text = prediction.content
    else:
        check_count("prediction", len(prediction.content), MOST_STEPS)
        for part in prediction.content:
            if part.type != "text" or part.text is None:
                raise InvalidRequest(
                    "'prediction.content' must be text.", param="prediction", code="unsupported_content"
                )
        text = "".join(part.text or "" for part in prediction.content)
    limits = model.engine.limits
    try:
        ids = model.tokenizer.encode(text, add_special=False, parse_special=False, max_tokens=limits.max_length)
    except InvalidRequest as error:
        error.param = "prediction"
        raise
    return tuple(ids[: limits.max_output_tokens])


def _senseless(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"'parallel.{name}' makes no sense {why}.", param=f"parallel.{name}")
