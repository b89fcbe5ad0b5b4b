"""Addresses and secrets as the command line gives them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cpkv.errors import ConfigError

SECRET_VARIABLE = "CPKV_SECRET"
MAX_SECRET_BYTES = 4096


def read_secret(path: Path | None, environment: Mapping[str, str]) -> str:
    """The shared secret of a file, or of the environment; empty where there is none.

    It is no command-line argument, since those are seen by everyone on the machine.

    Raises:
        ConfigError: the file cannot be read, is too large, or is empty, or the variable is no text.
    """
    if path is None:
        secret = environment.get(SECRET_VARIABLE, "")
        # Bytes that are no UTF-8 come as halves of characters, which cannot be encoded again.
        if not secret.isprintable():
            raise ConfigError(f"{SECRET_VARIABLE} holds characters that are no text; set it to one line of text")
        return secret
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SECRET_BYTES + 1)
        secret = content.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the secret file {path} cannot be read: {error}; give one with a line of text") from error
    if not secret or len(content) > MAX_SECRET_BYTES:
        raise ConfigError(
            f"the secret file {path} is {'too large' if secret else 'empty'}; write one line of at most "
            f"{MAX_SECRET_BYTES} bytes into it, for instance of `openssl rand -hex 32`"
        )
    return secret


def parse_address(text: str, flag: str) -> tuple[str, int]:
    """Host and port of HOST:PORT.

    Raises:
        ConfigError: it is no such thing.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{flag} is {text!r}; write it as HOST:PORT, as it was printed where that runs")
    return host, int(port)


def check_port(port: int, flag: str) -> None:
    """Refuse what is no port to listen on.

    Raises:
        ConfigError: with the range.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"{flag} is {port}; give 1 to 65535, or 0 to take a free one")
