"""TLS before a server of a test: a certificate authority, and a proxy with a certificate of it for 127.0.0.1."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import socket
import ssl
import threading
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Makes certificates; its own is in the file `path`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = self._build(self._name, self._key.public_key()).add_extension(x509.BasicConstraints(True, None), True)
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def certificate(self, name: str = "server") -> tuple[Path, Path]:
        """The files of a certificate for 127.0.0.1, and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
        alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        signed = (
            self._build(subject, key.public_key()).add_extension(alternative, False).sign(self._key, hashes.SHA256())
        )
        files = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        files[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return files

    def _build(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )


class TlsProxy:
    """Ends TLS on a port of its own, and passes on to the server's. `clients`: the authority whose certificate each client needs."""

    def __init__(self, server_port: int, authority: Authority, clients: Authority | None = None) -> None:
        self._server_port = server_port
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*authority.certificate())
        if clients:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(clients.path)
        self._listener = context.wrap_socket(
            socket.create_server(("127.0.0.1", 0)), server_side=True, do_handshake_on_connect=False
        )
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for each in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._begin, args=(client,), daemon=True).start()

    def _begin(self, client: ssl.SSLSocket) -> None:
        self._sockets.append(client)
        with contextlib.suppress(OSError):  # a client that refuses the certificate
            client.do_handshake()
            server = socket.create_connection(("127.0.0.1", self._server_port))
            self._sockets.append(server)
            threading.Thread(target=self._forward, args=(server, client), daemon=True).start()
            self._forward(client, server)

    def _forward(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                to.sendall(piece)
