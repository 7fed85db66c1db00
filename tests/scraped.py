"""What a run serves for Prometheus, read by Prometheus's own parser."""

from __future__ import annotations

import random
import socket
import urllib.request
from collections.abc import Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families

from processes import LIMIT_S


class Samples:
    """Values by (name, labels)."""

    def __init__(self, found: Mapping[tuple[str, frozenset[tuple[str, str]]], float]) -> None:
        self._found = found

    def __getitem__(self, key: tuple[str, Mapping[str, str]]) -> float:
        name, labels = key
        return self._found[name, frozenset(labels.items())]

    def __iter__(self) -> Iterator[tuple[str, dict[str, str]]]:
        for name, labels in self._found:
            yield name, dict(labels)

    def __bool__(self) -> bool:
        return bool(self._found)

    def total(self, name: str) -> float:
        """Over all labels."""
        return sum(value for (found, _), value in self._found.items() if found == name)


def scrape(url: str) -> Samples:
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        text = answer.read().decode()
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge"), family.name
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return Samples(found)


def free_port() -> int:
    """One that the system gives to nobody who asks for any."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
