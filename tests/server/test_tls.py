"""Certificates: new ones count for the next handshake, broken ones for none, and clients may have to show theirs."""

from __future__ import annotations

import socket
import ssl
import time

import httpx2
import msgspec
import pytest
import trustme

from jaxserve.config import TLSConfig
from jaxserve.errors import ConfigError
from jaxserve.server.tls import Certificates
from jaxserve.server.watched import Watcher


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(authority, tmp_path):
    """A certificate for localhost in files of its own, and a way to write others into them."""

    class Files:
        certificate, key, ca = tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt"

        def write(self, authority: trustme.CA = authority) -> None:
            issued = authority.issue_cert("localhost", "127.0.0.1")
            self.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
            self.key.write_bytes(issued.private_key_pem.bytes())
            self.ca.write_bytes(authority.cert_pem.bytes())

        @property
        def config(self) -> TLSConfig:
            return TLSConfig(certificate=self.certificate, private_key=self.key)

    files = Files()
    files.write()
    return files


def trusting(*authorities: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for authority in authorities:
        authority.configure_trust(context)
    return context


def ask(served, context: ssl.SSLContext) -> int:
    """The status of a probe, on a connection of its own."""
    with httpx2.Client(verify=context) as client:
        return client.get(served.url.replace("http:", "https:") + "/livez").status_code


def test_plain_http_needs_nothing():
    assert Certificates.of(TLSConfig()) is None


def test_a_new_certificate_counts_for_the_next_handshake(files, authority, service, serve_it):
    other = trustme.CA()
    certificates = Certificates.of(files.config)
    watcher = Watcher()
    certificates.watch(watcher)
    with serve_it(service, tls=certificates.context) as served:
        address = served.url.replace("http:", "https:")
        with httpx2.Client(verify=trusting(authority)) as kept:
            assert kept.get(address + "/livez").status_code == 200
            files.write(other)
            watcher.look()
            assert ask(served, trusting(other)) == 200
            with pytest.raises(httpx2.ConnectError):
                ask(served, trusting(authority))
            assert kept.get(address + "/livez").status_code == 200  # the connection that was there


def test_whoever_speaks_no_tls_gets_no_answer(files, service, serve_it):
    certificates = Certificates.of(files.config)
    with serve_it(service, tls=certificates.context) as served, pytest.raises(httpx2.TransportError):
        httpx2.get(served.url + "/livez")


@pytest.mark.parametrize(
    ("which", "content", "says"),
    [
        ("certificate", b"", "not a certificate and a key in PEM"),
        ("certificate", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "not a certificate"),
        ("key", b"nonsense", "not a certificate and a key in PEM"),
        ("key", trustme.CA().issue_cert("x").private_key_pem.bytes(), "the key is not the certificate's"),
        ("key", None, "cannot be read: No such file"),
        ("ca", b"nonsense", "no certificate of an authority"),
    ],
)
def test_a_broken_file_keeps_the_old_ones(which, content, says, files, authority, service, serve_it, caplog):
    config = msgspec.structs.replace(files.config, client_ca=files.ca)
    certificates = Certificates.of(config)
    failures: list[str] = []
    watcher = Watcher(failures.append)
    certificates.watch(watcher)
    context = trusting(authority)
    authority.issue_cert("client").configure_cert(context)
    with serve_it(service, tls=certificates.context) as served:
        path = getattr(files, which)
        path.unlink() if content is None else path.write_bytes(content)
        watcher.look()
        assert failures == ["tls"]
        assert says in caplog.text or says in str([record.fields for record in caplog.records])
        assert ask(served, context) == 200
    with pytest.raises(ConfigError, match=says) as caught:
        Certificates.of(config)
    assert caught.value.exit_code == 78
    assert str(path) in caught.value.message


def test_clients_show_certificates_of_the_authority_that_counts_now(files, authority, service, serve_it):
    """Trust in an authority can be taken back, too."""
    clients, others = trustme.CA(), trustme.CA()
    files.ca.write_bytes(clients.cert_pem.bytes())
    certificates = Certificates.of(msgspec.structs.replace(files.config, client_ca=files.ca))
    watcher = Watcher()
    certificates.watch(watcher)
    mine, theirs = trusting(authority), trusting(authority)
    clients.issue_cert("me").configure_cert(mine)
    others.issue_cert("them").configure_cert(theirs)
    with serve_it(service, tls=certificates.context) as served:
        assert ask(served, mine) == 200
        for context in (theirs, trusting(authority)):
            with pytest.raises(httpx2.TransportError):
                ask(served, context)
        files.ca.write_bytes(others.cert_pem.bytes())
        watcher.look()
        assert ask(served, theirs) == 200
        with pytest.raises(httpx2.TransportError):
            ask(served, mine)


def test_an_idle_connection_does_not_hold_up_the_end(files, authority, service, serve_it):
    """It would wait for a farewell that the client does not send."""
    service.config = msgspec.structs.replace(service.config, drain_s=30.0)
    certificates = Certificates.of(files.config)
    with serve_it(service, tls=certificates.context) as served, httpx2.Client(verify=trusting(authority)) as client:
        client.get(served.url.replace("http:", "https:") + "/livez")
        begin = time.monotonic()
        served.terminate()
        served.thread.join(20)
        assert time.monotonic() - begin < 15


def test_whoever_does_not_shake_hands_is_cut_off(files, service, serve_it):
    service.config = msgspec.structs.replace(service.config, header_timeout_s=0.3)
    certificates = Certificates.of(files.config)
    with (
        serve_it(service, tls=certificates.context) as served,
        socket.create_connection(served.address, timeout=20) as connection,
    ):
        assert connection.recv(1) == b""


@pytest.mark.filterwarnings("ignore:.*TLSv1_1 is deprecated:DeprecationWarning")
def test_nothing_older_than_tls_1_2(files, authority, service, serve_it):
    certificates = Certificates.of(files.config)
    old = trusting(authority)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with serve_it(service, tls=certificates.context) as served:
        with pytest.raises(httpx2.ConnectError):
            ask(served, old)
        old.maximum_version = old.minimum_version = ssl.TLSVersion.TLSv1_2
        assert ask(served, old) == 200


def test_a_key_in_the_certificates_file(files, authority, service, serve_it):
    files.certificate.write_bytes(files.key.read_bytes() + files.certificate.read_bytes())
    certificates = Certificates.of(TLSConfig(certificate=files.certificate))
    with serve_it(service, tls=certificates.context) as served:
        assert ask(served, trusting(authority)) == 200


def test_an_encrypted_key_is_not_waited_for(files):
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"x")
    pem = serialization.PrivateFormat.PKCS8
    files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, pem, locked))
    with pytest.raises(ConfigError, match="encrypted"):
        Certificates.of(files.config)


@pytest.mark.parametrize("name", ["private_key", "client_ca"])
def test_a_key_without_a_certificate(name, files):
    with pytest.raises(ConfigError, match=r"set `tls\.certificate`") as caught:
        Certificates.of(TLSConfig(**{name: files.key}))
    assert caught.value.param == f"tls.{name}"
