"""``jaxserve serve``: listen at once, load meanwhile, serve when every check has passed, leave when told."""

from __future__ import annotations

import logging
import os
import threading

from jaxserve.config import Config
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.metrics import Metrics
from jaxserve.errors import JaxserveError
from jaxserve.launch.loading import LoadedModel, load_model
from jaxserve.server.logs import configure_logging
from jaxserve.server.serve import Server, listen
from jaxserve.server.service import ServedModel, Service

logger = logging.getLogger(__name__)

EX_SOFTWARE = 70  # sysexits.h: the device hangs


class Launch:
    """One process's way from the first connection to readiness; the loading thread's side of it.

    Attributes:
        service, server: what is served, and by what.
        failure: why loading failed, if it did.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._metrics = Metrics()
        self._engine: AsyncEngine | None = None
        self.failure: BaseException | None = None
        self.service = Service(
            config=config.server,
            registry=self._metrics.registry,
            metrics=self._metrics,
            access_log=config.log.access,
        )
        self.server = Server(self.service)

    def load(self) -> None:
        """Runs in a thread; tells the probes each step, and ends the process when the model cannot be served."""
        try:
            model = load_model(self._config, self._advance)
            model.engine.metrics = self._metrics  # from here on: the self-test is nobody's request
            self.service.model = self._serve_model(model)
        except Exception as fault:  # noqa: BLE001 - any failure to load ends the process, with its own exit code
            self.failure = fault
            self.service.readiness.fail(str(fault))
            self.server.abandon()
            return
        self.service.readiness.ready()
        logger.info("ready", extra={"fields": {"model": model.id, "version": model.folder.name}})

    def close(self) -> bool:
        """Stops the engine's thread; false if it does not end."""
        return self._engine is None or self._engine.close()

    def _advance(self, phase: str, done: int, total: int) -> None:
        before = self.service.readiness.status.phase
        self.service.readiness.advance(phase, done, total)
        if before != phase:
            logger.info("starting", extra={"fields": {"phase": phase}})

    def _serve_model(self, model: LoadedModel) -> ServedModel:
        self._engine = AsyncEngine(model.engine)
        return ServedModel(
            id=model.id,
            engine=self._engine,
            tokenizer=model.tokenizer,
            chat_template=model.chat_template,
            created=int(model.folder.stat().st_mtime),
            defaults=model.defaults,
            fingerprint=f"{model.folder.name}-{model.plan.dtype}",
            heartbeat=self._engine.heartbeat,
        )


def serve(config: Config) -> None:
    """Serves until a signal ends it; blocks.

    Raises:
        JaxserveError: the address is taken, or the model cannot be served.
    """
    configure_logging(config.log)
    listener = listen(config.server)
    host, port = listener.getsockname()[:2]
    logger.info("listening", extra={"fields": {"address": f"http://{host}:{port}"}})
    launch = Launch(config)
    loading = threading.Thread(target=launch.load, name="loading", daemon=True)
    loading.start()
    try:
        launch.server.run([listener])
    finally:
        ended = launch.close()
    if launch.failure is None and (loading.is_alive() or not ended):
        # A compilation or a step cannot be interrupted, and the interpreter must not be torn down under it.
        logging.shutdown()
        os._exit(0 if ended else EX_SOFTWARE)
    if launch.failure is not None:
        if isinstance(launch.failure, JaxserveError):
            raise launch.failure
        raise RuntimeError(f"loading failed: {launch.failure}") from launch.failure
