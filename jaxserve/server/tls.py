"""TLS: a context to listen with, whose certificates can be replaced while it is in use.

Every handshake asks for the context that is current. A new one is built whole, from files that belong together, before
it takes the old one's place: loading files into a context in use would leave it without a key if they did not, and
could never take back trust in an authority. Knows files and the standard library's ``ssl``.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, NoReturn

from jaxserve.config import TLSConfig
from jaxserve.errors import ConfigError
from jaxserve.server.watched import Watcher


class _Renewable(ssl.SSLContext):
    """Stands for whatever context is current; event loops make each connection's TLS object by ``wrap_bio``."""

    current: ssl.SSLContext

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """A connection's TLS object, of the current context."""
        return self.current.wrap_bio(*args, **kwargs)


class Certificates:
    """The server's certificate, its key, and whose client certificates are taken.

    Attributes:
        context: what to listen with.

    Raises:
        ConfigError: a file cannot be read or is not what it should be.
    """

    def __init__(self, config: TLSConfig) -> None:
        self._config = config
        self.context = _Renewable(ssl.PROTOCOL_TLS_SERVER)
        self.context.current = _context(config)

    @classmethod
    def of(cls, config: TLSConfig) -> Certificates | None:
        """The certificates of a section ``tls``; ``None`` if it asks for plain HTTP.

        Raises:
            ConfigError: as above, or a key or an authority is named without a certificate.
        """
        if config.certificate is not None:
            return cls(config)
        for name, path in _files(config):
            raise ConfigError(f"`{name}` is {path}, but there is no certificate: set `tls.certificate`.", param=name)
        return None

    def watch(self, watcher: Watcher) -> None:
        """Has the files read anew when one of them changes."""
        watcher.watch("tls", [path for _, path in _files(self._config)], self.reload)
        self.reload()  # what has changed between the first reading and now

    def reload(self) -> None:
        """Reads the files anew for the connections to come; those there are keep what they have.

        Raises:
            ConfigError: they are of no use, and the certificates stay as they are.
        """
        self.context.current = _context(self._config)


def _files(config: TLSConfig) -> list[tuple[str, Path]]:
    named = [
        ("tls.certificate", config.certificate),
        ("tls.private_key", config.private_key),
        ("tls.client_ca", config.client_ca),
    ]
    return [(name, path) for name, path in named if path is not None]


def _context(config: TLSConfig) -> ssl.SSLContext:
    """A new context of what the files say now."""
    for name, path in _files(config):
        try:
            path.read_bytes()
        except OSError as error:  # ssl would not say which file it means
            raise ConfigError(f"`{name}`: {path} cannot be read: {error.strerror}.", param=name) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    certificate, key = config.certificate, config.private_key or config.certificate
    try:
        context.load_cert_chain(str(certificate), None if key is None else str(key), password=_encrypted)
    except ssl.SSLError as error:
        mismatch = error.reason == "KEY_VALUES_MISMATCH"
        reason = "the key is not the certificate's" if mismatch else "not a certificate and a key in PEM"
        raise ConfigError(f"{certificate}, {key}: {reason}.", param="tls.certificate") from None
    if config.client_ca is not None:
        try:
            context.load_verify_locations(str(config.client_ca))
        except ssl.SSLError:
            message = f"{config.client_ca}: no certificate of an authority in PEM."
            raise ConfigError(message, param="tls.client_ca") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _encrypted() -> NoReturn:
    """OpenSSL would ask for the passphrase on the terminal, and wait."""
    raise ConfigError("The private key is encrypted: give one without a passphrase.", param="tls.private_key")
