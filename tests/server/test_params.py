"""Ranges and refusals: every number at its edges, with the parameter named."""

from __future__ import annotations

import msgspec
import pytest

from jaxserve.config import ServerConfig
from jaxserve.engine.request import MAX_SEED, Limits, SamplingParams
from jaxserve.errors import ContextLengthExceeded, InvalidRequest
from jaxserve.server import params
from jaxserve.server.wire import ChatRequest, CompletionRequest, GenerateRequest, Message, SamplingFields, StreamOptions

LIMITS = Limits(
    vocab_size=100,
    max_length=64,
    max_input_tokens=48,
    max_output_tokens=32,
    max_logit_bias=4,
    max_stop_token_ids=2,
    max_logprobs=5,
)
CONFIG = ServerConfig()
TURN = [Message("user", "x")]


def wanted(**fields) -> CompletionRequest:
    return CompletionRequest(prompt="x", **fields)


def refused(call, *args, **kwargs) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequest) as caught:
        call(*args, **kwargs)
    assert len(caught.value.message) < 200
    return caught.value.param, caught.value.code


def sampled(request: SamplingFields) -> SamplingParams:
    return params.sampling_params(request, LIMITS, SamplingParams())


@pytest.mark.parametrize(
    ("name", "least", "most", "step"),
    [
        ("temperature", 0.0, 2.0, 0.001),
        ("top_p", 0.0, 1.0, 0.001),
        ("min_p", 0.0, 1.0, 0.001),
        ("repetition_penalty", 0.01, 10.0, 0.001),
        ("presence_penalty", -2.0, 2.0, 0.001),
        ("frequency_penalty", -2.0, 2.0, 0.001),
        ("top_k", -1, 100, 1),
        ("seed", -(2**63), 2**63 - 1, 1),
        ("logprobs", 0, 5, 1),
    ],
)
def test_edges(name, least, most, step):
    sampled(wanted(**{name: least}))
    sampled(wanted(**{name: most}))
    kind = "integer" if step == 1 else "decimal"
    assert refused(sampled, wanted(**{name: least - step})) == (name, f"{kind}_below_min_value")
    assert refused(sampled, wanted(**{name: most + step})) == (name, f"{kind}_above_max_value")


@pytest.mark.parametrize("name", ["top_k", "seed", "logprobs", "n", "max_tokens", "min_tokens"])
@pytest.mark.parametrize("value", [-(10**400), 2**63, 2**64, 10**400])
def test_huge_integers_are_refused_without_being_repeated(name, value):
    def everything(request):
        params.choices_per_prompt(request, CONFIG)
        params.fit_output(request, sampled(request), 5, LIMITS, default=8)

    assert refused(everything, wanted(**{name: value}))[0] == name


def test_values_arrive():
    asked = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 1.0, "frequency_penalty": -1.0}
    found = sampled(wanted(**asked, repetition_penalty=1.1, top_k=7, seed=3, ignore_eos=True, stop_token_ids=[4, 5]))
    assert {name: getattr(found, name) for name in asked} == asked
    assert (found.repetition_penalty, found.top_k, found.seed, found.ignore_eos) == (1.1, 7, 3, True)
    assert found.stop_token_ids == (4, 5)


def test_what_is_not_said_comes_from_the_model():
    defaults = SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    found = params.sampling_params(wanted(top_p=1.0), LIMITS, defaults)
    assert (found.temperature, found.top_k, found.top_p) == (0.6, 20, 1.0)


@pytest.mark.parametrize(("given", "seed"), [(0, 0), (-1, MAX_SEED), (MAX_SEED, MAX_SEED), (-(2**63), 0)])
def test_seeds_become_the_engines(given, seed):
    assert sampled(wanted(seed=given)).seed == seed


def test_a_top_p_of_zero_keeps_one_token():
    assert 0 < sampled(wanted(top_p=0.0)).top_p < 1e-6
    assert sampled(wanted(top_p=0.5)).top_p == 0.5


def test_all_of_top_k_has_two_names():
    assert sampled(wanted(top_k=-1)).top_k == sampled(wanted(top_k=0)).top_k == 0


@pytest.mark.parametrize(
    "bias",
    [
        {"100": 1.0},
        {"a": 1.0},
        {"-1": 1.0},
        {"": 1.0},
        {"1.0": 1.0},
        {"٣": 1.0},
        {" 1": 1.0},
        {"1" * 5000: 1.0},
        {"1": 100.5},
        {"1": -101.0},
        {"1": 1.0, "01": 2.0},
        {str(token): 0.0 for token in range(5)},
    ],
)
def test_wrong_logit_bias(bias):
    assert refused(sampled, wanted(logit_bias=bias))[0] == "logit_bias"


def test_right_logit_bias():
    assert sampled(wanted(logit_bias={"0": -100.0, "99": 100.0})).logit_bias == ((0, -100.0), (99, 100.0))
    assert sampled(wanted(logit_bias={})).logit_bias == ()


@pytest.mark.parametrize("ids", [[-1], [100], [2**31], [1, 2, 3]])
def test_wrong_stop_tokens(ids):
    assert refused(sampled, wanted(stop_token_ids=ids))[0] == "stop_token_ids"


@pytest.mark.parametrize("stop", [[""], "", ["a"] * 5, ["a"] * 100, "x" * 257, ["x" * 1_000_000]])
def test_wrong_stop_strings(stop):
    assert refused(params.stop_strings, stop, CONFIG)[0] == "stop"


@pytest.mark.parametrize(("stop", "found"), [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())])
def test_right_stop_strings(stop, found):
    assert params.stop_strings(stop, CONFIG) == found


@pytest.mark.parametrize("n", [0, -1, CONFIG.max_n + 1, 10**9])
def test_wrong_n(n):
    assert refused(params.choices_per_prompt, wanted(n=n), CONFIG)[0] == "n"


def test_n_and_best_of():
    assert params.choices_per_prompt(wanted(), CONFIG) == 1
    assert params.choices_per_prompt(wanted(n=3, best_of=3), CONFIG) == 3
    assert params.choices_to_try(wanted(n=3), 3, CONFIG) == 3
    assert params.choices_to_try(wanted(n=3, best_of=5), 3, CONFIG) == 5
    assert params.choices_to_try(wanted(n=3, best_of=3, stream=True), 3, CONFIG) == 3
    assert refused(params.choices_to_try, wanted(n=3, best_of=2), 3, CONFIG)[0] == "best_of"
    assert refused(params.choices_to_try, wanted(best_of=CONFIG.max_n + 1), 1, CONFIG)[0] == "best_of"
    assert refused(params.choices_to_try, wanted(best_of=2, stream=True), 1, CONFIG)[0] == "best_of"
    assert refused(params.choices_per_prompt, GenerateRequest(prompt="x", n=2), CONFIG)[0] == "n"


def test_logprobs_of_chat():
    def of(**fields):
        return sampled(ChatRequest(messages=TURN, **fields)).logprobs

    assert of() is None
    assert of(logprobs=False) is None
    assert of(logprobs=True) == 0
    assert of(logprobs=True, top_logprobs=5) == 5
    for wrong in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 6}, {"logprobs": True, "top_logprobs": -1}):
        assert refused(of, **wrong)[0] == "top_logprobs"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"json": ""}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("chat_template", "{{ messages }}"),
        ("web_search_options", {}),
        ("guided_json", {}),
        ("structured_outputs", {"regex": "a"}),
        ("use_beam_search", 0),
        ("prompt_logprobs", 1),
        ("truncate_prompt_tokens", 5),
    ],
)
def test_what_is_not_served_is_named(name, value):
    request = ChatRequest(messages=TURN, **{name: value})
    assert refused(params.refuse_unserved, request) == (name, "unsupported_parameter")


def test_echo_and_suffix_are_not_served():
    assert refused(params.refuse_unserved, wanted(echo=True))[0] == "echo"
    assert refused(params.refuse_unserved, wanted(suffix="end"))[0] == "suffix"


def test_asking_for_nothing_is_fine():
    params.refuse_unserved(wanted(echo=False, suffix="", use_beam_search=False))
    params.refuse_unserved(
        ChatRequest(
            messages=TURN,
            tools=[],
            tool_choice="auto",
            response_format={"type": "text"},
            modalities=["text"],
        )
    )


def test_stream_options_need_a_stream():
    options = StreamOptions(include_usage=True)
    assert refused(params.check_streaming, wanted(stream_options=options))[0] == "stream_options"
    params.check_streaming(wanted(stream_options=options, stream=True))


# --- how much output fits ---------------------------------------------------------------------------------------------


def fitted(request: SamplingFields, prompt_tokens: int, default: int = 16) -> int:
    return params.fit_output(request, SamplingParams(), prompt_tokens, LIMITS, default=default).max_tokens


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "found"),
    [(10, None, 16), (10, 5, 5), (10, 0, 0), (32, 32, 32), (48, 16, 16), (48, 0, 0), (48, None, 16)],
)
def test_what_fits(prompt_tokens, asked, found):
    assert fitted(wanted(max_tokens=asked), prompt_tokens) == found


def test_chat_takes_all_there_is():
    chat = ChatRequest(messages=TURN)
    assert fitted(chat, 10, default=LIMITS.max_output_tokens) == 32
    assert fitted(chat, 40, default=LIMITS.max_output_tokens) == 24


@pytest.mark.parametrize(("prompt_tokens", "asked"), [(49, None), (49, 1), (48, 17), (33, 32), (1000, 0)])
def test_what_does_not_fit_is_told_with_numbers(prompt_tokens, asked):
    with pytest.raises(ContextLengthExceeded) as caught:
        fitted(wanted(max_tokens=asked), prompt_tokens)
    assert caught.value.param == "prompt"
    assert caught.value.code == "context_length_exceeded"
    for number in (64, 48, prompt_tokens, asked):
        assert number is None or str(number) in caught.value.message


@pytest.mark.parametrize("asked", [-1, 33, 2**63])
def test_wrong_max_tokens(asked):
    assert refused(fitted, wanted(max_tokens=asked), 5)[0] == "max_tokens"
    chat = ChatRequest(messages=TURN, max_completion_tokens=asked)
    assert refused(fitted, chat, 5)[0] == "max_completion_tokens"


def test_zero_tokens_are_for_completions():
    assert fitted(wanted(max_tokens=0), 5) == 0
    assert refused(fitted, ChatRequest(messages=TURN, max_tokens=0), 5) == ("max_tokens", "integer_below_min_value")


def test_the_newer_name_wins():
    assert fitted(ChatRequest(messages=TURN, max_tokens=5, max_completion_tokens=6), 5) == 6


@pytest.mark.parametrize(("most", "least"), [(4, 5), (None, 17), (4, -1)])
def test_wrong_min_tokens(most, least):
    assert refused(fitted, wanted(max_tokens=most, min_tokens=least), 5)[0] == "min_tokens"


def test_every_unserved_name_is_a_field():
    """A name that no wire type has would be refused by nobody."""
    fields = {field.name for kind in (ChatRequest, CompletionRequest) for field in msgspec.structs.fields(kind)}
    assert set(params.UNSERVED) <= fields
