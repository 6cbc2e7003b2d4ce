"""API keys for rigs: a key file with some clients in it, and what each of them sends."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxserve.server.keys import Key, Scope, changing, create

OPERATOR = "operator"


@dataclasses.dataclass(frozen=True, slots=True)
class Keyring:
    """A key file and the keys in it, by client; the operator's may see metrics."""

    file: Path
    keys: dict[str, str]
    entries: dict[str, Key]

    def headers(self, client: str) -> dict[str, str]:
        """What a client sends."""
        return {"authorization": f"Bearer {self.keys[client]}"}

    def write(self, *clients: str) -> None:
        """Lists these clients in the file and nobody else."""
        with changing(self.file) as entries:
            entries[:] = [self.entries[client] for client in clients]


def keyed(folder: Path, *clients: str) -> Keyring:
    """A key file with a key for each client and one for the operator."""
    made = {client: create(client, (Scope.INFER, Scope.METRICS)) for client in (*clients, OPERATOR)}
    ring = Keyring(
        folder / "keys.yaml",
        {client: secret for client, (_, secret) in made.items()},
        {client: entry for client, (entry, _) in made.items()},
    )
    ring.write(*made)
    return ring
