"""What each URL does: admit, read, parse, check, tokenise, submit, and stream or gather.

Knows the order of the steps, and no details of any of them. Who cannot be served is told so before a byte of the body
is read. From there to the engine's request everything happens in a worker thread; the event loop only hands over and
passes on.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from jaxserve.errors import InvalidRequest, ModelNotFound
from jaxserve.server import candidates, openapi, parallel, params, prompts, wire
from jaxserve.server.account import Updates, usage
from jaxserve.server.admission import Place
from jaxserve.server.generation import Generation, Job
from jaxserve.server.parse import parse
from jaxserve.server.service import ServedModel, Service
from jaxserve.server.shapes import ChatShape, CompletionShape, Envelope, GenerateShape, MaybeUsage, Shape
from jaxserve.server.sse import EventStream, Named, attended


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A request that passed every check: what to generate, and how to say it."""

    job: Job
    shape: Shape
    stream: bool
    usage_at_end: bool
    usage_always: bool
    envelope: Envelope | None = None


# --- generating -------------------------------------------------------------------------------------------------------


class Endpoints:
    """The handlers of one service; each takes a Starlette request and gives a response."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def generate(self, request: Request) -> ASGIApp:
        """``POST /generate``."""
        return await self._answer(request, _plan_generate)

    async def completions(self, request: Request) -> ASGIApp:
        """``POST /v1/completions``."""
        return await self._answer(request, _plan_completion)

    async def chat(self, request: Request) -> ASGIApp:
        """``POST /v1/chat/completions``."""
        return await self._answer(request, _plan_chat)

    async def _answer(self, request: Request, plan_of: Callable[[bytes, ServedModel, Service], Plan]) -> ASGIApp:
        service = self._service
        model = service.admit()
        charge = service.access.enter(request.scope)
        tenant, deadline = _tenant(request), _deadline(request)
        model.engine.room(tenant)
        async with service.admission.place(tenant, deadline) as place:
            plan = await self._prepare(request, place, plan_of, model, lambda: model.engine.room(tenant))
        job = dataclasses.replace(plan.job, tenant=tenant, deadline=deadline)
        charge.reserve(
            sum(map(len, job.prompts)), len(job.prompts) * job.tried * job.asked.times * job.sampling.max_tokens
        )
        generation = Generation.start(job, model)
        charge.begin(lambda: generation.generated)
        if plan.stream:
            return EventStream(
                _events(plan, generation, model, request),
                close=generation.cancel,
                ping=service.config.sse_ping_s,
                running=service.running,
            )
        try:
            outputs = await attended(request.receive, generation.collect(), service.running)
        finally:
            generation.cancel()
        _note(generation, request)
        return _json(plan.shape.whole(outputs, usage(generation, job.asked, model, last=True)))

    # --- text ---------------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``: text or messages to token ids."""
        model = self._service.ready_model()
        self._service.access.enter(request.scope)
        async with self._service.counting.place(_tenant(request), _deadline(request)) as place:
            return _json(await self._prepare(request, place, _tokenize, model))

    async def detokenize(self, request: Request) -> Response:
        """``POST /detokenize``: token ids to text."""
        model = self._service.ready_model()
        self._service.access.enter(request.scope)
        async with self._service.counting.place(_tenant(request), _deadline(request)) as place:
            return _json(await self._prepare(request, place, _detokenize, model))

    # --- on the way to the engine -------------------------------------------------------------------------------------

    async def _prepare(
        self,
        request: Request,
        place: Place,
        work: Callable[[bytes, ServedModel, Service], Any],
        model: ServedModel,
        admit: Callable[[], None] = lambda: None,
    ) -> Any:
        """Reads the body, waits for a thread and does ``work`` there; ``admit`` may still refuse in its turn."""
        body = await request.body()

        async def in_turn() -> Any:
            await place.turn()
            admit()  # others may have filled the queue meanwhile
            return await place.run(work, body, model, self._service)

        return await attended(request.receive, in_turn(), self._service.running)

    # --- models and metrics -------------------------------------------------------------------------------------------

    async def models(self, _: Request) -> Response:
        """``GET /v1/models``; not before the model can answer, because routers take it for a readiness probe."""
        return _json(wire.ModelList(data=[_card(self._service.ready_model())]))

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/{id}``."""
        model = self._service.ready_model()
        _check_model(request.path_params["model"], model)
        return _json(_card(model))

    async def metrics(self, _: Request) -> Response:
        """``GET /metrics`` in Prometheus's text format."""
        return Response(generate_latest(self._service.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def openapi(self, _: Request) -> Response:
        """``GET /openapi.json``."""
        return Response(openapi.encoded(self._service.config), media_type="application/json")


async def _events(
    plan: Plan, generation: Generation, model: ServedModel, request: Request
) -> AsyncGenerator[msgspec.Struct | Named, None]:
    not_due: MaybeUsage = None if plan.usage_at_end else msgspec.UNSET
    asked, updates, opened = plan.job.asked, Updates(model, plan.envelope), False
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            _note(generation, request)
            if not opened:
                opened = True
                for event in plan.shape.opening(len(generation), not_due):
                    yield event
            if piece.says:
                last = piece.finish_reason is not None and not plan.usage_at_end
                due = usage(generation, asked, model, last=last) if plan.usage_always else not_due
                yield plan.shape.chunk(piece, due)
            if piece.canvas:
                yield Named("block.update", updates.of(piece))
    if plan.usage_at_end:
        for event in plan.shape.closing(usage(generation, asked, model, last=True)):
            yield event


def _tenant(request: Request) -> str:
    """On whose behalf: whatever has checked the key has written it down."""
    return str(request.scope["state"].get("tenant", ""))


def _deadline(request: Request) -> float | None:
    """When the client gives up, on the monotonic clock, if it says so: counted from the end of the request's head."""
    timeout = params.client_timeout(request.headers.getlist(params.TIMEOUT_HEADER))
    arrived: float = request.scope["state"].get("arrived", time.monotonic())
    return None if timeout is None else arrived + timeout


def _note(generation: Generation, request: Request) -> None:
    """Tokens so far, for the access log."""
    request.scope["state"]["tokens"] = (generation.prompt_tokens, generation.completion_tokens)


def _json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


# --- plans: these run in worker threads -------------------------------------------------------------------------------


def _plan_generate(body: bytes, model: ServedModel, service: Service) -> Plan:
    wanted = parse(body, wire.GenerateRequest)
    draft = _draft("gen", wanted, model, service)
    read = prompts.completion_prompts(wanted.prompt, model, service.config)
    job = _fill(draft, wanted, read, model, service)
    shape = GenerateShape(model.tokenizer, logprobs=job.sampling.logprobs is not None)
    return Plan(job, shape, bool(wanted.stream), usage_at_end=False, usage_always=True)


def _plan_completion(body: bytes, model: ServedModel, service: Service) -> Plan:
    wanted = parse(body, wire.CompletionRequest)
    draft = _draft("cmpl", wanted, model, service)
    read = prompts.completion_prompts(wanted.prompt, model, service.config)
    job = _fill(draft, wanted, read, model, service)
    shape = CompletionShape(_envelope(job, model), model.tokenizer, logprobs=job.sampling.logprobs)
    return _openai_plan(wanted, job, shape, model)


def _plan_chat(body: bytes, model: ServedModel, service: Service) -> Plan:
    wanted = parse(body, wire.ChatRequest)
    draft = _draft("chatcmpl", wanted, model, service)
    read = prompts.chat_prompt(wanted, model, service.config)
    job = dataclasses.replace(
        _fill(draft, wanted, (read,), model, service), continues=bool(wanted.continue_final_message)
    )
    shape = ChatShape(_envelope(job, model), model.tokenizer, logprobs=job.sampling.logprobs is not None)
    return _openai_plan(wanted, job, shape, model)


def _draft(kind: str, wanted: wire.SamplingFields, model: ServedModel, service: Service) -> Job:
    """A job without its prompts: every check that needs no tokenising comes before it."""
    _check_model(wanted.model, model)
    params.refuse_unserved(wanted)
    params.check_streaming(wanted)
    n = params.choices_per_prompt(wanted, service.config)
    best_of = params.choices_to_try(wanted, n, service.config)
    stop = params.stop_strings(wanted.stop, service.config)
    sampling = params.sampling_params(wanted, model.engine.limits, model.defaults)
    asked = parallel.asked(wanted, model)
    candidates.check(asked, sampling, best_of=best_of > n)
    return Job(f"{kind}-{uuid.uuid4().hex}", (), sampling, n, stop, asked=asked, best_of=best_of)


def _fill(
    draft: Job, wanted: wire.SamplingFields, read: tuple[tuple[int, ...], ...], model: ServedModel, service: Service
) -> Job:
    """The job with its prompts, and as much output as fits behind the longest."""
    limits = model.engine.limits
    many = draft.tried * draft.asked.candidates
    name = "best_of" if draft.tried > draft.n else "n"
    name = "parallel.candidates" if draft.asked.candidates > 1 else name
    params.check_count(name, many * len(read), service.config.max_choices)
    chat = isinstance(wanted, wire.ChatRequest)
    default = limits.max_output_tokens if chat else service.config.default_completion_tokens
    sampling = params.fit_output(wanted, draft.sampling, max(map(len, read)), limits, default=default)
    return dataclasses.replace(draft, prompts=read, sampling=sampling)


def _envelope(job: Job, model: ServedModel) -> Envelope:
    return Envelope(job.id, int(time.time()), model.id, model.fingerprint)


def _openai_plan(wanted: wire.SamplingFields, job: Job, shape: Shape, model: ServedModel) -> Plan:
    options = wanted.stream_options or wire.StreamOptions()
    at_end, always = bool(options.include_usage), bool(options.continuous_usage_stats)
    return Plan(job, shape, bool(wanted.stream), at_end, always, _envelope(job, model))


def _tokenize(body: bytes, model: ServedModel, service: Service) -> wire.TokenizeResponse:
    wanted = parse(body, wire.TokenizeRequest)
    _check_model(wanted.model, model)
    params.refuse_unserved(wanted)
    if (wanted.prompt is None) == (wanted.messages is None):
        raise InvalidRequest("Give either 'prompt' or 'messages'.", param="prompt", code="missing_required_parameter")
    if wanted.messages is not None:
        add_special = bool(wanted.add_special_tokens)
        ids: Sequence[int] = prompts.chat_prompt(wanted, model, service.config, add_special=add_special, to_count=True)
    else:
        add_special = wanted.add_special_tokens is not False
        ids = prompts.text_tokens(wanted.prompt or "", model, add_special=add_special)
    names = [model.tokenizer.token_text(token) for token in ids] if wanted.return_token_strs else None
    return wire.TokenizeResponse(count=len(ids), max_model_len=model.max_model_len, tokens=list(ids), token_strs=names)


def _detokenize(body: bytes, model: ServedModel, _: Service) -> wire.DetokenizeResponse:
    wanted = parse(body, wire.DetokenizeRequest)
    _check_model(wanted.model, model)
    params.check_count("tokens", len(wanted.tokens), prompts.countable(model))
    params.check_token_ids("tokens", wanted.tokens, model.engine.limits.vocab_size)
    return wire.DetokenizeResponse(model.tokenizer.decode(wanted.tokens, skip_special=False))


def _check_model(name: str | None, model: ServedModel) -> None:
    """A request that names no model means the one there is."""
    if name is not None and name != model.id:
        raise ModelNotFound("The model does not exist here; GET /v1/models lists those that do.", param="model")


def _card(model: ServedModel) -> wire.Model:
    return wire.Model(id=model.id, created=model.created, max_model_len=model.max_model_len)
