"""The README's section on PyTorch, as typed; tests/docs/test_readme.py reads the others."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from pages import DOCS, Reader, blocks_of

README = DOCS.parent / "README.md"


@pytest.mark.timeout(300)
def test_the_section_on_pytorch_does_what_it_shows(tmp_path: Path) -> None:
    blocks = blocks_of(README)
    [program] = [number for number, block in enumerate(blocks) if block.file == "train.py"]
    run = blocks[program + 1]
    text = re.sub(r"process .* is ready at .*", "… is ready at …", run.text)
    text = re.sub(r"worker \d", "worker …", text).replace("0.98", "0.9…")
    # It says that it needs no server.
    Reader(README, tmp_path, "redis://nowhere").read([blocks[program], replace(run, text=text)])
