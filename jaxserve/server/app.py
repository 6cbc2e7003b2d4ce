"""The Starlette application: which URL leads where, and what every request passes through.

Knows the routes and the order of the middleware. Knows nothing of what they do.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.errors import JaxserveError
from jaxserve.server.auth import Gate
from jaxserve.server.endpoints import Endpoints
from jaxserve.server.keys import Scope
from jaxserve.server.middleware import AccessLog, BodyLimit, Failures, OnlyJSON, RequestId, SafeHeaders, StrictHeaders
from jaxserve.server.openai import error_object, error_response
from jaxserve.server.probes import probe_routes
from jaxserve.server.service import Service

# What each path needs. A route whose path is not in here is closed to everybody, whoever adds it.
SCOPES: Mapping[str, Scope] = {
    "/generate": Scope.INFER,
    "/v1/completions": Scope.INFER,
    "/v1/chat/completions": Scope.INFER,
    "/v1/models": Scope.INFER,
    "/v1/models/{model:path}": Scope.INFER,
    "/tokenize": Scope.INFER,
    "/detokenize": Scope.INFER,
    "/metrics": Scope.METRICS,
    "/openapi.json": Scope.PUBLIC,
}


def create_app(service: Service) -> Starlette:
    """The application of ``service``; it may be made, and asked, before there is a model."""
    at = Endpoints(service)
    json = [Middleware(OnlyJSON)]
    routes = [
        Route("/generate", at.generate, methods=["POST"], middleware=json),
        Route("/v1/completions", at.completions, methods=["POST"], middleware=json),
        Route("/v1/chat/completions", at.chat, methods=["POST"], middleware=json),
        Route("/v1/models", at.models),
        Route("/v1/models/{model:path}", at.model),
        Route("/tokenize", at.tokenize, methods=["POST"], middleware=json),
        Route("/detokenize", at.detokenize, methods=["POST"], middleware=json),
        Route("/metrics", at.metrics),
        Route("/openapi.json", at.openapi),
        *(probes := probe_routes(service)),
    ]
    scopes = {probe.path: Scope.PUBLIC for probe in probes} | dict(SCOPES)  # a probe opens no path that is taken
    middleware = [
        Middleware(RequestId),
        Middleware(SafeHeaders),
        Middleware(AccessLog, service=service),
        Middleware(Failures),
        Middleware(Gate, access=service.access, scopes=scopes),
        Middleware(StrictHeaders),
        Middleware(BodyLimit, limit=service.config.max_body_bytes),
    ]
    handlers = {HTTPException: _answer_error, JaxserveError: _answer_error}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False  # a redirect would send clients to whatever their Host header says
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    request.scope["state"]["error"] = error_object(error).code
    return error_response(error)
