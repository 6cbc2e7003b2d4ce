"""The Starlette application: which URL leads where, and what every request passes through.

Knows the routes and the order of the middleware. Knows nothing of what they do.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.errors import JaxserveError
from jaxserve.server.endpoints import Endpoints
from jaxserve.server.middleware import AccessLog, BodyLimit, Failures, RequestId, StrictHeaders
from jaxserve.server.openai import error_object, error_response
from jaxserve.server.service import Service


def create_app(service: Service) -> Starlette:
    """The application of ``service``; it may be made, and asked, before there is a model."""
    at = Endpoints(service)
    routes = [
        Route("/generate", at.generate, methods=["POST"]),
        Route("/v1/completions", at.completions, methods=["POST"]),
        Route("/v1/chat/completions", at.chat, methods=["POST"]),
        Route("/v1/models", at.models),
        Route("/v1/models/{model:path}", at.model),
        Route("/tokenize", at.tokenize, methods=["POST"]),
        Route("/detokenize", at.detokenize, methods=["POST"]),
        Route("/livez", at.live),
        Route("/readyz", at.ready),
        Route("/health", at.ready),
        Route("/metrics", at.metrics),
    ]
    middleware = [
        Middleware(RequestId),
        Middleware(AccessLog, service=service),
        Middleware(Failures),
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
