"""The JSON that clients send and get: OpenAI's shapes, and vLLM's for tokenisation.

Knows names, types and defaults. Knows no ranges (``params.py``), no engine and no HTTP. Types are strict: ``true`` is
not 1, "3" is not 3. Unknown fields are ignored, because clients send new ones every month; fields that would change the
answer but are not served yet are typed ``Any`` and refused by name in ``params.py``.
"""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import UNSET, Struct, UnsetType

from jaxserve.server.extensions import Parallel, ParallelDetails

# --- requests ---------------------------------------------------------------------------------------------------------


class StreamOptions(Struct, frozen=True):
    """``include_usage`` adds a last chunk with the usage, ``continuous_usage_stats`` adds it to every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(Struct, frozen=True):
    """A piece of a message's content; only parts of the type ``text`` are served."""

    type: str
    text: str | None = None


class Prediction(Struct, frozen=True):
    """What the caller guesses the output to be, as OpenAI has it; the type is ``content``."""

    type: str
    content: str | list[ContentPart]


class SamplingFields(Struct, frozen=True, kw_only=True):
    """What every generating request may say; ``null`` means the default."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    parallel: Parallel | None = None
    prediction: Prediction | None = None
    # Not served: present and not null is refused, because dropping it would silently answer another question.
    allowed_token_ids: Any = None
    bad_words: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None


class GenerateRequest(SamplingFields, frozen=True, kw_only=True):
    """``POST /generate``: one prompt, one answer."""

    prompt: str | list[int]
    logprobs: int | None = None
    n: int | None = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """``POST /v1/completions``. A prompt is text or token ids, one or several."""

    prompt: str | list[str | int | list[int]]
    n: int | None = None
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Any = None


class Message(Struct, frozen=True, omit_defaults=True):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatFields(Protocol):
    """What makes a conversation a prompt, in a chat request and when its tokens are only counted."""

    @property
    def messages(self) -> list[Message] | None:
        """The conversation."""

    @property
    def add_generation_prompt(self) -> bool | None:
        """Whether the assistant's turn is opened."""

    @property
    def continue_final_message(self) -> bool | None:
        """Whether the last message is left open, to be continued."""

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None:
        """More for the template, such as ``enable_thinking``."""


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    audio: Any = None
    chat_template: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    tools: Any = None
    tool_choice: Any = None
    web_search_options: Any = None


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """``POST /tokenize``: either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    tools: Any = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


# --- answers ----------------------------------------------------------------------------------------------------------


class CompletionTokensDetails(Struct, frozen=True):
    """What became of a ``prediction``: OpenAI's names. Rejected tokens are no part of ``completion_tokens`` here."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct, frozen=True):
    """Tokens read and tokens generated; the stop token counts as generated. Details are there if they were asked for,
    or if tokens were decided in parallel.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    parallel_details: ParallelDetails | UnsetType = UNSET


class GenerateResponse(Struct, frozen=True, kw_only=True):
    """The answer of ``/generate``, and each event of its stream (where ``usage`` comes with the last one)."""

    text: str
    finish_reason: str | None
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET


class CompletionLogprobs(Struct, frozen=True):
    """Four lists of equal length, one entry a token; ``text_offset`` counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True):
    """One answer, or in a stream what was added to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class CompletionResponse(Struct, frozen=True, kw_only=True):
    """The answer of ``/v1/completions`` and each chunk of its stream: OpenAI gives them the same shape."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(Struct, frozen=True):
    """A likely token; ``bytes`` is ``null`` for tokens that stand for no text."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct, frozen=True):
    """A generated token with the likeliest ones at its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """One entry a generated token."""

    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(Struct, frozen=True, kw_only=True):
    """What the model said."""

    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatResponse(Struct, frozen=True, kw_only=True):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Struct, frozen=True):
    """What a chunk adds to the message: the role in the first chunk, text in the others."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """What a chunk adds to one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(Struct, frozen=True, kw_only=True):
    """One event of a chat stream; the usage chunk has no choices."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class Model(Struct, frozen=True, kw_only=True):
    """An entry of ``/v1/models``; ``max_model_len`` is vLLM's name for the longest context, in tokens."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "jaxserve"
    max_model_len: int


class ModelList(Struct, frozen=True, kw_only=True):
    """The answer of ``/v1/models``."""

    object: str = "list"
    data: list[Model]


class TokenizeResponse(Struct, frozen=True, kw_only=True):
    """The answer of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Struct, frozen=True):
    """The answer of ``/detokenize``."""

    prompt: str


class ErrorObject(Struct, frozen=True):
    """What went wrong: ``message`` for people, ``type`` and ``code`` for programs, ``param`` for the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct, frozen=True):
    """The body of every answer that is an error."""

    error: ErrorObject
