"""From deltas to text: however the engine cuts, the text, the tokens and the counts are the same."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time

import pytest

from jaxserve.engine.request import Delta, FinishReason, SamplingParams, TokenLogprob
from jaxserve.errors import DeadlineExceeded, EngineError, NumericalError, Overloaded, ShuttingDown
from jaxserve.server.generation import Generation, Job


def job(prompt: str = "hello", n: int = 1, stop: tuple[str, ...] = (), **sampling) -> Job:
    params = SamplingParams(**{"max_tokens": 200, "seed": 5} | sampling)
    return Job("job", (tuple(prompt.encode()),), params, n, stop)


def collected(job: Job, model):
    async def run():
        generation = Generation.start(job, model)
        try:
            return await generation.collect(), generation
        finally:
            generation.cancel()

    return asyncio.run(run())


def streamed(job: Job, model):
    """Text and tokens of each choice as pieces bring them, and the pieces."""

    async def run():
        generation = Generation.start(job, model)
        pieces = [piece async for piece in generation.pieces()]
        texts = ["" for _ in range(len(generation))]
        for piece in pieces:
            texts[piece.index] += piece.text
        return texts, pieces, generation

    return asyncio.run(run())


@pytest.mark.parametrize("seed", range(40))
def test_a_stream_says_what_the_whole_says(seed, model, engine):
    rng = random.Random(seed)
    stop = tuple(rng.choice(["a", "b ", "é", "中文", "😀", "END", "ND ", "\ufffd", ". "]) for _ in range(seed % 3))
    asked = job(prompt=str(seed), stop=stop, seed=seed, max_tokens=rng.choice([7, 200]), n=1 + seed % 2)
    engine.widest = 1
    outputs, one_by_one = collected(asked, model)
    for widest in (1, 2, 5, 50):
        engine.widest = widest
        texts, pieces, generation = streamed(asked, model)
        assert texts == [output.text for output in outputs]
        assert generation.completion_tokens == one_by_one.completion_tokens
        ends = {piece.index: piece.finish_reason for piece in pieces if piece.finish_reason}
        assert ends == {output.index: output.finish_reason for output in outputs}
        for text in texts:
            assert not any(string in text for string in stop)
    assert engine.active == set()


def test_the_text_is_the_engines(model, engine):
    engine.answer = "Grüße, 世界! 👩‍👧".encode()
    (output,), generation = collected(job(), model)
    assert output.text == "Grüße, 世界! 👩‍👧"
    assert output.finish_reason == "stop"
    assert generation.completion_tokens == len(engine.answer) + 1  # the stop token was generated, too
    assert generation.prompt_tokens == 5


def test_a_cut_character_is_marked(model, engine):
    engine.answer = "né".encode()
    (output,), generation = collected(job(max_tokens=2), model)
    assert (output.text, output.finish_reason) == ("n\ufffd", "length")
    assert generation.completion_tokens == 2


@pytest.mark.parametrize("widest", [1, 4, 50])
def test_a_stop_string_ends_the_count(widest, model, engine):
    engine.answer, engine.widest = b"one STOP two", widest
    (output,), generation = collected(job(stop=("STOP",)), model)
    assert (output.text, output.finish_reason) == ("one ", "stop")
    assert generation.completion_tokens == len("one STOP")
    assert engine.active == set()


def test_a_stop_string_frees_the_slot_at_once(model, engine):
    engine.answer, engine.widest = b"one STOP" + b"x" * 100, 1
    collected(job(stop=("STOP",)), model)
    assert engine.cancelled == ["job-0"]


def test_a_withheld_beginning_of_a_stop_string_comes_at_the_end(model, engine):
    engine.answer = b"one STO"
    (output,), _ = collected(job(stop=("STOP",)), model)
    assert output.text == "one STO"


def test_no_tokens_at_all(model):
    (output,), generation = collected(job(max_tokens=0), model)
    assert (output.text, output.finish_reason, generation.completion_tokens) == ("", "length", 0)


def test_choices_have_seeds_of_their_own(model, engine):
    outputs, generation = collected(job(n=3), model)
    assert [request.sampling.seed for request in engine.submitted] == [5, 6, 7]
    assert [request.id for request in engine.submitted] == ["job-0", "job-1", "job-2"]
    assert len({output.text for output in outputs}) == 3
    assert generation.prompt_tokens == 5
    alone, _ = collected(job(seed=6), model)
    assert alone[0].text == outputs[1].text


def test_the_last_seed_is_followed_by_the_first(model, engine):
    collected(job(n=2, seed=2**63 - 1), model)
    assert [request.sampling.seed for request in engine.submitted] == [2**63 - 1, 0]


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_logprobs_are_one_a_token_with_offsets_into_the_text(stop, model, engine):
    engine.answer = "aé😀b".encode()
    (output,), _ = collected(job(logprobs=2, stop=stop), model)
    assert [token.offset for token in output.tokens] == [0, 1, 1, 2, 2, 2, 2, 3]
    assert [len(token.top) for token in output.tokens] == [2] * 8
    assert [token.id for token in output.tokens] == [engine.token_of(byte) for byte in engine.answer]


def test_minus_infinity_has_a_number(model, engine):
    engine.answer = model.tokenizer.token_bytes(7)
    (output,), _ = collected(job(logprobs=0), model)
    assert output.tokens[0].logprob == -9999.0


def test_an_error_is_raised_and_frees_all(model, engine):
    engine.fail_after = (1, NumericalError("Not a number."))
    with pytest.raises(NumericalError):
        collected(job(n=3), model)
    assert engine.active == set()


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (Delta(finish_reason=FinishReason.ERROR), EngineError),
        (Delta(finish_reason=FinishReason.CANCELLED), ShuttingDown),
        (Delta(), EngineError),  # and then nothing
    ],
)
def test_other_ends_are_errors(last, error, model, engine, monkeypatch):
    monkeypatch.setattr(engine, "_deltas", lambda _: [Delta((1,)), last])
    with pytest.raises(error):
        collected(job(), model)


@pytest.mark.parametrize("error", [ShuttingDown("No more."), KeyError("a mistake of ours")])
def test_all_choices_are_submitted_or_none(error, model, engine):
    take = engine.submit

    def submit(request, *, patient=False):
        if len(engine.submitted) == 2:
            raise error
        return take(request)

    engine.submit = submit
    with pytest.raises(type(error)):
        Generation.start(job(n=3), dataclasses.replace(model, engine=engine))
    assert engine.active == set()
    assert len(engine.cancelled) == 2


class Narrow:
    """The fake engine with few places."""

    def __init__(self, engine, places: int) -> None:
        self.engine, self.places, self.most = engine, places, 0
        self.limits = engine.limits

    def submit(self, request, *, patient=False):
        if len(self.engine.active) >= self.places:
            raise Overloaded("Full.", retry_after=0.01)
        stream = self.engine.submit(request)
        self.most = max(self.most, len(self.engine.active))
        return stream


def test_more_choices_than_places_come_one_after_the_other(model, engine):
    whole, _ = collected(job(n=7, seed=5), model)
    engine.submitted.clear()
    narrow = Narrow(engine, 2)
    parted, _ = collected(job(n=7, seed=5), dataclasses.replace(model, engine=narrow))
    assert [output.text for output in parted] == [output.text for output in whole]
    assert [request.sampling.seed for request in engine.submitted] == list(range(5, 12))
    assert narrow.most == 2
    assert engine.active == set()


def test_choices_that_the_engine_turns_away_come_again(model, engine, monkeypatch):
    whole, _ = collected(job(n=3), model)
    engine.submitted.clear()
    answer = engine._deltas

    def deltas(request):
        if len(engine.submitted) in (2, 3):  # it finds only now that it has no place
            return [Delta(finish_reason=FinishReason.ERROR, error=Overloaded("Full.", retry_after=0.01))]
        return answer(request)

    monkeypatch.setattr(engine, "_deltas", deltas)
    parted, _ = collected(job(n=3), model)
    assert [output.text for output in parted] == [output.text for output in whole]
    assert len(engine.submitted) == 5


def test_choices_that_wait_for_room_keep_the_deadline(model, engine):
    narrow = dataclasses.replace(model, engine=Narrow(engine, 1))
    engine.delay = 0.05
    with pytest.raises(DeadlineExceeded):
        collected(dataclasses.replace(job(n=2), deadline=time.monotonic() + 0.02), narrow)


def test_without_any_place_a_request_is_refused(model, engine):
    with pytest.raises(Overloaded):
        Generation.start(job(n=3), dataclasses.replace(model, engine=Narrow(engine, 0)))


def test_leaving_while_choices_wait_frees_all(model, engine):
    engine.hold = True
    narrow = Narrow(engine, 1)

    async def run() -> None:
        generation = Generation.start(job(n=3), dataclasses.replace(model, engine=narrow))
        reader = asyncio.create_task(generation.collect())
        await asyncio.sleep(0.05)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        generation.cancel()
        await asyncio.sleep(0.05)
        assert engine.active == set()
        assert len(engine.submitted) == 1
        assert generation.generated == 0

    asyncio.run(run())


def test_leaving_early_frees_all(model, engine):
    async def run() -> None:
        generation = Generation.start(job(n=3), model)
        pieces = generation.pieces()
        await anext(pieces)
        await pieces.aclose()
        generation.cancel()
        assert engine.active == set()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_reader_that_waits_holds_the_choices_back(model, engine):
    engine.answer, engine.widest = b"x" * 100, 1

    async def run() -> None:
        generation = Generation.start(job(n=2), model)
        pieces = generation.pieces()
        await anext(pieces)
        await asyncio.sleep(0.05)
        assert generation.completion_tokens < 10
        await pieces.aclose()
        generation.cancel()

    asyncio.run(run())


def test_what_nobody_came_to_read_was_made_all_the_same(model, engine):
    """A reader that goes away early does not hide what its request has cost; nor does it cost more than its text."""
    engine.answer = b"x" * 100
    generation = Generation.start(job(n=2, ignore_eos=True), model)
    for stream in engine._streams:
        stream.generated = 30
    generation.cancel()
    assert (generation.generated, generation.completion_tokens) == (60, 0)
    outputs, whole = collected(job(stop=("xxx",)), model)
    assert outputs[0].finish_reason == "stop"
    assert whole.generated == whole.completion_tokens == 3


def test_the_best_are_given_and_all_are_counted(model, engine, monkeypatch):
    """By the mean log-probability of a choice's own tokens, the one that ends it too."""

    def unlike(token: int, request) -> TokenLogprob:
        return TokenLogprob(token, -(token * 7919 % 101) / 50)

    monkeypatch.setattr(engine, "_logprob", unlike)
    for stop in ((), ("a",)):
        tried, everyone = collected(job(n=6, stop=stop, logprobs=0), model)
        (end,) = model.tokenizer.encode("<|im_end|>", add_special=False, parse_special=True)
        tokens = []
        for output, choice in zip(tried, everyone._choices, strict=True):
            scores = [token.logprob for token in output.tokens]
            scores += [unlike(end, None).logprob] * (choice.completion_tokens - len(scores))
            tokens.append(scores)
        means = [sum(scores) / len(scores) for scores in tokens]
        order = sorted(range(6), key=lambda index: -means[index])
        asked = dataclasses.replace(job(n=2, stop=stop), best_of=6)
        best, generation = collected(asked, model)
        assert [output.text for output in best] == [tried[index].text for index in order[:2]]
        assert [output.index for output in best] == [0, 1]
        assert generation.completion_tokens == everyone.completion_tokens
        assert order[:2] != [0, 1]


def test_the_best_are_those_of_each_prompt(model, engine):
    asked = dataclasses.replace(job(n=1), prompts=((1, 2), (3, 4)), best_of=3)
    outputs, _ = collected(asked, model)
    assert [output.index for output in outputs] == [0, 1]
    assert {output.text for output in outputs} <= {stream.text for stream in collected(all_of(asked), model)[0]}
    groups = [request.group for request in engine.submitted[:6]]
    assert groups[0] == groups[1] == groups[2] != groups[3] == groups[4] == groups[5]


def all_of(asked: Job) -> Job:
    return dataclasses.replace(asked, n=asked.best_of)


def test_one_choice_shares_nothing(model, engine):
    collected(job(), model)
    assert [request.group for request in engine.submitted] == [""]
