"""What each probe answers, and where: the routes that supervisors, load balancers and platforms ask.

Knows the shapes that they expect: Kubernetes reads the status, the Open Inference Protocol a boolean, people the rest.
What is true is for ``vitals`` to say. Every word is fixed: no path, no message, nothing that a client sent.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.errors import JaxserveError, ModelNotFound
from jaxserve.server.openai import error_response
from jaxserve.server.service import Service

Probe: TypeAlias = Callable[[Request], Coroutine[Any, Any, Response]]


class Probes:
    """The handlers of one service. None of them waits for anything."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._vitals = service.vitals

    async def live(self, _: Request) -> Response:
        """``GET /livez``: 503 asks for a restart."""
        alive = self._vitals.alive()
        return _answer(alive, {"status": "alive" if alive else "dead", "checks": self._vitals.checks()})

    async def started(self, _: Request) -> Response:
        """``GET /startupz``: 503 until it has been ready once."""
        started = self._vitals.started()
        return _answer(started, {"status": "started" if started else "starting", "progress": self._progress()})

    async def ready(self, _: Request) -> Response:
        """``GET /readyz``: 503 while requests should go elsewhere."""
        model = self._service.model
        ready = self._vitals.ready()
        body = {
            "status": "ready" if ready else self._vitals.state(),
            "since": int(self._service.readiness.status.since),
            "checks": self._vitals.checks(),
            "model": None if model is None else model.id,
            "native_kernels": None if model is None else model.native_kernels,
            "progress": self._progress(),
        }
        return _answer(ready, body)

    async def protocol_live(self, _: Request) -> Response:
        """``GET /v2/health/live`` of the Open Inference Protocol."""
        alive = self._vitals.alive()
        return _answer(alive, {"live": alive})

    async def protocol_ready(self, _: Request) -> Response:
        """``GET /v2/health/ready`` of the Open Inference Protocol."""
        ready = self._vitals.ready()
        return _answer(ready, {"ready": ready})

    async def model_ready(self, request: Request) -> Response:
        """``GET /v2/models/{model}/ready`` of the Open Inference Protocol; 404 for a model that is not the one here."""
        ready, model = self._vitals.ready(), self._service.model
        if model is None:
            return _answer(False, {"name": None, "ready": False})
        if request.path_params["model"] != model.id:
            raise ModelNotFound("The model does not exist here; GET /v1/models lists those that do.", param="model")
        return _answer(ready, {"name": model.id, "ready": ready})

    def _progress(self) -> dict[str, Any]:
        status = self._service.readiness.status
        return {"phase": str(status.phase), "done": status.done, "total": status.total}


def _answer(good: bool, body: Mapping[str, Any]) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(msgspec.json.encode(body), 200 if good else 503, headers, media_type="application/json")


def probe_routes(service: Service) -> list[Route]:
    """The routes of every probe, the one that a platform asked for at start included."""
    at = Probes(service)
    probes: dict[str, Probe] = {
        "/livez": at.live,
        "/startupz": at.started,
        "/readyz": at.ready,
        "/health": at.ready,
        "/ping": at.ready,
        "/v2/health/live": at.protocol_live,
        "/v2/health/ready": at.protocol_ready,
        "/v2/models/{model:path}/ready": at.model_ready,
    }
    if service.config.health_route is not None:
        probes.setdefault(service.config.health_route, at.ready)
    return [Route(path, probe) for path, probe in probes.items()]


def create_probe_app(service: Service) -> Starlette:
    """An application of nothing but probes, for a port of its own."""

    async def refuse(_: Request, error: Exception) -> Response:
        return error_response(error)

    handlers: dict[Any, Any] = {HTTPException: refuse, JaxserveError: refuse}
    app = Starlette(routes=probe_routes(service), exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app
