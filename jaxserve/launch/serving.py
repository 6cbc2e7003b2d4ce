"""``jaxserve serve``: listen at once, load meanwhile, serve when every check has passed, leave when told."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import threading

from jaxserve.config import Config
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.metrics import Metrics
from jaxserve.errors import JaxserveError
from jaxserve.launch.loading import LoadedModel, load_model
from jaxserve.launch.planning import is_native
from jaxserve.server.audit import audit_log
from jaxserve.server.auth import Access
from jaxserve.server.logs import configure_logging
from jaxserve.server.probe_port import ProbePort
from jaxserve.server.serve import Server, listen, listen_for_probes
from jaxserve.server.service import ServedModel, Service
from jaxserve.server.tls import Certificates
from jaxserve.server.watchdog import EX_SOFTWARE, Watchdog
from jaxserve.server.watched import Watcher

logger = logging.getLogger(__name__)


class Launch:
    """One process's way from the first connection to readiness; the loading thread's side of it.

    Attributes:
        service, server: what is served, and by what.
        watchdog: what looks after both.
        metrics: what is counted.
        watcher: what looks at the files that may change while they are in use.
        failure: why loading failed, if it did.
        engine_failure: why the engine gave up, if it did.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.metrics = Metrics()
        self._engine: AsyncEngine | None = None
        self.failure: BaseException | None = None
        self.engine_failure: JaxserveError | None = None
        self.service = Service(
            config=config.server,
            registry=self.metrics.registry,
            metrics=self.metrics,
            access_log=config.log.access,
            access=Access(config.auth, config.server.host),
            audit=audit_log(config.audit, self.metrics.audit_lines_dropped.inc),
        )
        certificates = Certificates.of(config.tls)
        self.server = Server(self.service, None if certificates is None else certificates.context)
        self.watcher = Watcher(lambda file: self.metrics.reload_failures.labels(file).inc())
        self.service.access.watch(self.watcher)
        if certificates is not None:
            certificates.watch(self.watcher)
        self.watchdog = Watchdog(self.service, self.give_up)
        self.metrics.loop_lag.set_function(self.service.vitals.pulse.lag)

    def load(self) -> None:
        """Runs in a thread; tells the probes each step, and ends the process when the model cannot be served."""
        try:
            model = load_model(self._config, self._advance)
            model.engine.metrics = self.metrics  # from here on: the self-test is nobody's request
            served = self.service.model = self._serve_model(model)
            self.metrics.native_kernels.set(served.native_kernels)
        except Exception as fault:  # noqa: BLE001 - any failure to load ends the process, with its own exit code
            self.failure = fault
            self.service.readiness.fail(str(fault))
            self.server.abandon()
            return
        # What is here now stays: a collection that walks through all of it stops every thread for a third of a second.
        gc.collect()
        gc.freeze()
        self.service.readiness.ready()
        experts = {} if model.plan.multiplies is None else {"experts": model.plan.multiplies}
        logger.info("ready", extra={"fields": {"model": model.id, "version": model.folder.name, **experts}})

    def give_up(self, error: JaxserveError) -> None:
        """Ends the process because its engine can serve no more; running requests are told why."""
        self.engine_failure = error
        self.service.readiness.fail(error.message)
        self.server.abandon(error)

    def close(self) -> bool:
        """Stops the engine's thread; false if it does not end."""
        return self._engine is None or self._engine.close()

    def _advance(self, phase: str, done: int, total: int) -> None:
        before = self.service.readiness.status.phase
        self.service.readiness.advance(phase, done, total)
        if before != phase:
            logger.info("starting", extra={"fields": {"phase": phase}})

    def _serve_model(self, model: LoadedModel) -> ServedModel:
        engine = self._engine = AsyncEngine(model.engine)
        self.metrics.heartbeat.set_function(engine.heartbeat)
        return ServedModel(
            id=model.id,
            engine=engine,
            tokenizer=model.tokenizer,
            chat_template=model.chat_template,
            created=int(model.folder.stat().st_mtime),
            defaults=model.defaults,
            fingerprint=f"{model.folder.name}-{model.plan.dtype}",
            heartbeat=engine.heartbeat,
            step_limit=lambda: engine.step_limit,
            failure=lambda: engine.failure,
            degraded=lambda: engine.degraded,
            native_kernels=is_native(model.plan),
            decoding=model.family.decoding,
            drafts=model.plan.widths[-1] - 1 if model.family.decoding is None else 0,
        )


def serve(config: Config) -> None:
    """Serves until a signal ends it; blocks.

    Raises:
        JaxserveError: the address is taken, or the model cannot be served.
    """
    lines = configure_logging(config.log)
    listener = listen(config.server)
    prober = listen_for_probes(config.server, listener.getsockname()[1])
    launch = Launch(config)
    lines.on_drop = launch.metrics.log_lines_dropped.inc
    for signal_number in (signal.SIGTERM, signal.SIGINT):  # from here on, and not only while uvicorn runs
        signal.signal(signal_number, launch.server.handle_exit)
    if launch.watcher:
        signal.signal(signal.SIGHUP, lambda _number, _frame: launch.watcher.look_soon())
    probes = None if prober is None else ProbePort(launch.service, prober)
    if probes is not None:
        probes.start()
    _say("listening", listener, "http" if config.tls.certificate is None else "https")
    if prober is not None:
        _say("probes", prober)
    launch.service.access.announce()
    launch.watchdog.start()
    launch.watcher.start()
    loading = threading.Thread(target=launch.load, name="loading", daemon=True)
    loading.start()
    try:
        launch.server.run([listener])
    finally:
        ended = launch.close()
        launch.watchdog.stop()
        launch.watcher.stop()
        if launch.service.audit is not None:
            launch.service.audit.close()
    if launch.failure is None:
        # Nothing is left to save. JAX takes seconds to be torn down, and a compilation or a step that still runs must
        # not be torn down at all.
        code = 0 if ended and launch.engine_failure is None else EX_SOFTWARE
        logger.info("ended", extra={"fields": {"exit": code}})
        logging.shutdown()
        os._exit(code)
    if probes is not None:
        probes.stop()
    if isinstance(launch.failure, JaxserveError):
        raise launch.failure
    raise RuntimeError(f"loading failed: {launch.failure}") from launch.failure


def _say(what: str, listener: socket.socket, scheme: str = "http") -> None:
    host, port = listener.getsockname()[:2]
    logger.info(what, extra={"fields": {"address": f"{scheme}://{host}:{port}"}})
