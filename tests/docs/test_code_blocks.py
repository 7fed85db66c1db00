"""Every block of code on a page runs, or is a command that is understood."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from everstep.cli.main import main
from processes import LIMIT_S

from .pages import PAGES, ROOT, Block, blocks, blocks_in
from .running import SEPARATELY

ELSEWHERE = {".", "cd", "docker", "git", "helm", "jq", "kubectl", "kill", "py-spy", "ray", "ssh", "torchrun"}
"""Commands that are not ours."""


def test_the_python_on_every_page_runs(tmp_path: Path) -> None:
    pages = {block.page for block in blocks_in("python", "diff")} - SEPARATELY
    running = Path(__file__).with_name("running.py")
    done = subprocess.run(
        [sys.executable, str(running), *sorted(pages)], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", blocks_in("console", "sh"), ids=str)
def test_a_command_on_a_page_is_understood(block: Block) -> None:
    commands = [line.removeprefix("$ ") for line in block.code.splitlines() if line.startswith("$ ")]
    assert commands, "commands begin with a dollar sign, so that they aren't taken for output"
    for command in commands:
        for part in _parts(command):
            _understood(part)


def _parts(command: str) -> list[list[str]]:
    """The words of each command in a line of them."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&")
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    for word in lexer:
        if word in ("|", "&&"):
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _understood(words: list[str]) -> None:
    while "=" in words[0]:
        words = words[1:]  # variables for this command
    program, *arguments = words
    match program, arguments:
        case "everstep", ["--version"]:
            pass
        case "everstep", [*path]:
            command: click.Command = main
            while isinstance(command, click.Group):
                command = command.commands[path.pop(0)]
            # Arguments are parsed, and nothing is run. Files needn't exist.
            command.make_parser(click.Context(command, **command.context_settings)).parse_args(path)
        case "make", [target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
        case "pip", ["install", *what]:
            offered = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for asked in re.findall(r"everstep\[(.*?)\]", " ".join(what)):
                assert set(asked.split(",")) <= set(offered), asked
        case "python" | "python3" | ".venv/bin/python", [script, *_]:
            known = {"-m", "hello.py", "train.py"}  # the page says what is in them
            assert script in known or (ROOT / script).exists(), script
        case _:
            assert program in ELSEWHERE, f"{program!r}: is this a command?"


@pytest.mark.parametrize("block", blocks_in("yaml"), ids=str)
def test_yaml_on_a_page_can_be_read(block: Block) -> None:
    yaml = pytest.importorskip("yaml")
    assert list(yaml.safe_load_all(block.code))


def test_every_block_says_what_it_is() -> None:
    every = [block for page in PAGES for block in blocks(page)]
    known = {"python", "diff", "console", "sh", "yaml", "text", "mermaid", ""}
    assert {block.language for block in every} <= known
    for block in every:
        if not block.language:  # a picture, or what a program prints
            assert not re.match(r"(\$|import|from) ", block.code), f"{block} is code, and isn't run by a test"
