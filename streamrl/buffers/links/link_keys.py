"""Keys of a run's tcp sockets (C11): CURVE (RFC 26/CurveZMQ) authenticates every client and encrypts all traffic.

One key pair belongs to the run. It lies in the run's private socket folder (0700), and whoever can read it is a member:
a server takes connections of this very key only, which the ZAP handler (RFC 27) checks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator


@dataclass(frozen=True)
class LinkKeys:
    """A CURVE key pair in Z85 text."""

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> LinkKeys:
        public, secret = zmq.curve_keypair()
        return cls(public, secret)

    def save(self, path: Path) -> None:
        """Write to a new file that only its owner can read. Raises ``FileExistsError``."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.public + b"\n" + self.secret + b"\n")

    @classmethod
    def load(cls, path: Path) -> LinkKeys:
        """What ``save`` wrote. Raises ``OSError``."""
        public, secret = path.read_bytes().split()
        return cls(public, secret)

    def secure_server(self, socket: zmq.Socket[Any]) -> ThreadAuthenticator:
        """Before ``bind``. Returns the running ZAP handler of the socket's context; ``stop`` it after the socket."""
        authenticator = ThreadAuthenticator(socket.context)
        authenticator.start()
        authenticator.configure_curve_callback("*", credentials_provider=_Only(self.public))
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        return authenticator

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        """Before ``connect``."""
        socket.curve_serverkey = self.public
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret


class _Only:
    """Admits one public key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public
