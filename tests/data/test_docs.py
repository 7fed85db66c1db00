"""The code on the page runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from processes import LIMIT_S

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("at", range(len(BLOCKS)))
def test_the_code_on_the_page_runs(at, tmp_path):
    framework = next((name for name in ("torch", "jax") if f"import {name}\n" in BLOCKS[at]), "json")
    pytest.importorskip(framework)
    script = tmp_path / "example.py"
    script.write_text(BLOCKS[at])
    subprocess.run([sys.executable, str(script)], check=True, timeout=LIMIT_S)
