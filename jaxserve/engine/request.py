"""What goes into the engine and what comes out of it: token ids, never text.

Knows sampling parameters, requests, their bounds, deltas and why a request ends. Knows no device, thread or HTTP.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Iterable, Sequence

from jaxserve.errors import ContextLengthExceeded, InvalidRequest, JaxserveError

MAX_SEED = 2**63 - 1


class FinishReason(enum.StrEnum):
    """Why a request ended. ``STOP`` and ``LENGTH`` are OpenAI's words and go out as they are."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop; every field is a row of an array inside the compiled step.

    Attributes:
        max_tokens: most tokens to generate, at least 0.
        min_tokens: stop tokens are not sampled before this many tokens are there.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        min_p: keep tokens at least this many times as likely as the most likely one; 0 keeps all.
        repetition_penalty: divides (multiplies, if negative) the logit of every token of prompt and output.
        presence_penalty: subtracted from the logit of every token of the output.
        frequency_penalty: subtracted from a token's logit once per occurrence in the output.
        logit_bias: (token id, value) pairs added to the logits.
        seed: the same seed gives the same tokens, alone or in any company; ``None`` draws one.
        logprobs: ``None`` for none, else the number of alternatives to report beside the chosen token's own.
        stop_token_ids: tokens that end the output, beside the model's own.
        ignore_eos: go on past the model's own end tokens.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """What decoding a request took, pass by pass.

    Attributes:
        passes: of the model over its row.
        drafted: tokens that were proposed for a place; each is ``accepted`` or ``rejected`` in the end.
        predicted_accepted, predicted_rejected: those of them that the caller had handed in.
        edited, inserted, deleted: changes of tokens that were decided already.
        wasted: tokens that were decided behind the text's end.
        blocks: that were finished.
        post_steps: passes over a block in which nothing was open any more.
    """

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    predicted_accepted: int = 0
    predicted_rejected: int = 0
    edited: int = 0
    inserted: int = 0
    deleted: int = 0
    wasted: int = 0
    blocks: int = 0
    post_steps: int = 0

    def __add__(self, other: Account) -> Account:
        return Account(*map(operator.add, _counts(self), _counts(other)))

    @classmethod
    def of(cls, accounts: Iterable[Account]) -> Account:
        """All of them together."""
        return cls(*map(sum, zip(*map(_counts, accounts), strict=True)))

    def counts(self) -> dict[str, int]:
        """By name."""
        return dict(zip(_ACCOUNTS, _counts(self), strict=True))


_ACCOUNTS = tuple(field.name for field in dataclasses.fields(Account))
_counts = operator.attrgetter(*_ACCOUNTS)
NOTHING = Account()


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """What one pass did to a request.

    Attributes:
        tokens: that it made final.
        account: its own share.
        canvas: as in ``Delta``.
    """

    tokens: tuple[int, ...]
    account: Account
    canvas: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    Attributes:
        draft: the caller's guess at the output.
        settings: of the decoding strategy, by its own names.
        provisional: it is told of canvases, too.
        traced: it is told of each pass.
        group: requests of a tenant with the same one, if any, may use what is read of each other's prompts.
        written: so many of the prompt's last tokens are output that is gone on with; ``sampling`` counts those to come.
        deadline: when it must be done, in seconds on the engine's monotonic clock.
        tenant: on whose behalf; tenants get equal shares of a busy engine.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    deadline: float | None = None
    tenant: str = ""
    draft: tuple[int, ...] = ()
    settings: tuple[tuple[str, float], ...] = ()
    provisional: bool = False
    traced: bool = False
    group: str = ""
    written: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural, of the model's own distribution) of a token, and of the most likely ones."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """What one tick added to a request.

    Attributes:
        tokens: new token ids. When ``finish_reason`` is ``STOP`` the last one is the stop token: it counts as
            generated but is not text.
        logprobs: one entry a token if the request asked for them, else empty.
        finish_reason: set in the last delta of a request, ``None`` before.
        account: what the request took so far.
        canvas: what the tokens behind the known ones look like so far, where they are decided together and still may
            change; only for those who want to know.
        passes: of this tick, for those who want to know.
        error: set when ``finish_reason`` is ``ERROR``.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: JaxserveError | None = None
    account: Account = NOTHING
    canvas: tuple[int, ...] = ()
    passes: tuple[Pass, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for; the plan and the configuration give the numbers.

    Attributes:
        vocab_size: token ids lie in ``[0, vocab_size)``.
        max_length: positions (prompt and output) of the longest pool.
        max_input_tokens, max_output_tokens: upper bounds of each part.
        max_logit_bias, max_stop_token_ids, max_logprobs: widths of the row arrays.
    """

    vocab_size: int
    max_length: int
    max_input_tokens: int
    max_output_tokens: int
    max_logit_bias: int
    max_stop_token_ids: int
    max_logprobs: int


def check(request: Request, limits: Limits) -> None:
    """Refuses what the compiled programs would get wrong silently: JAX clamps ids and positions out of range.

    Raises:
        InvalidRequest: naming the parameter.
        ContextLengthExceeded: the prompt is too long.
    """
    sampling, prompt = request.sampling, request.prompt
    if not prompt:
        raise InvalidRequest("the prompt holds no token", param="prompt")
    if len(prompt) > limits.max_input_tokens:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens, the limit is {limits.max_input_tokens}", param="prompt"
        )
    _check_ids("prompt", prompt, limits.vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, limits.vocab_size)
    _check_ids("logit_bias", [token for token, _ in sampling.logit_bias], limits.vocab_size)
    bounds: tuple[tuple[str, float, float, float], ...] = (
        ("max_tokens", sampling.max_tokens, 0, limits.max_output_tokens),
        ("min_tokens", sampling.min_tokens, 0, sampling.max_tokens),
        ("temperature", sampling.temperature, 0, 100),
        ("top_k", sampling.top_k, 0, 2**31 - 1),
        ("top_p", sampling.top_p, 1e-9, 1),
        ("min_p", sampling.min_p, 0, 1),
        ("repetition_penalty", sampling.repetition_penalty, 1e-3, 1e3),
        ("presence_penalty", sampling.presence_penalty, -100, 100),
        ("frequency_penalty", sampling.frequency_penalty, -100, 100),
        ("seed", sampling.seed or 0, 0, MAX_SEED),
        ("written", request.written, 0, len(prompt)),
        ("logprobs", sampling.logprobs or 0, 0, limits.max_logprobs),
        ("stop_token_ids", len(sampling.stop_token_ids), 0, limits.max_stop_token_ids),
        ("logit_bias", len(sampling.logit_bias), 0, limits.max_logit_bias),
        *(("logit_bias", value, -1e4, 1e4) for _, value in sampling.logit_bias),
    )
    for name, value, low, high in bounds:
        if not low <= value <= high:  # NaN is in no interval
            raise InvalidRequest(f"{name} must be from {low:g} to {high:g}, not {value:g}", param=name)


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {vocab_size}", param=name)
