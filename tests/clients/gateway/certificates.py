"""Self-signed certificates for gateways with TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path


def self_signed(folder: Path) -> tuple[Path, Path]:
    """The paths of a new self-signed certificate for 127.0.0.1 and of its private key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    options = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    name = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    command = ["openssl", "req", *options.split(), *name, *files]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key
