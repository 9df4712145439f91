"""What is printed works as pasted."""

from __future__ import annotations

import ast
import io
import json
import shlex
import sys
from pathlib import Path

import pytest

from tasuki.command_line import print_all_letters
from tasuki.launch.banner import banner
from tasuki.launch.serve import Deployment, _begin
from tasuki.launch.supervisor import Supervisor

TEXT = banner("http://127.0.0.1:8000", "smollm2-135m-instruct", "1 prefill + 1 decode")


def test_the_curl_line_is_one_command_with_a_json_body() -> None:
    (line,) = [x for x in TEXT.splitlines() if x.startswith("curl ")]
    words = shlex.split(line)
    assert words[1] == "http://127.0.0.1:8000/v1/chat/completions"
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "smollm2-135m-instruct"
    assert body["messages"][0]["role"] == "user"


def test_the_snippet_is_python_even_for_an_interactive_prompt() -> None:
    lines = TEXT.splitlines()
    first = lines.index("from openai import OpenAI")
    snippet = lines[first : lines.index("", first)]
    for line in snippet:  # each line is a whole statement
        ast.parse(line)
    assert 'base_url="http://127.0.0.1:8000/v1"' in "\n".join(snippet)


def test_with_api_keys_both_read_the_key_from_the_environment() -> None:
    text = banner("http://127.0.0.1:8000", "m", "1 mixed", "MY_KEY")
    (line,) = [x for x in text.splitlines() if x.startswith("curl ")]
    words = shlex.split(line)
    assert "Authorization: Bearer $MY_KEY" in words
    assert '"Authorization: Bearer $MY_KEY"' in line  # in quotes that let the shell fill it in
    lines = text.splitlines()
    snippet = lines[lines.index("import os") : lines.index("", lines.index("import os"))]
    for each in snippet:
        ast.parse(each)
    assert 'api_key=os.environ["MY_KEY"]' in "\n".join(snippet)
    assert "MY_KEY" not in TEXT


def test_a_locale_without_letters_of_the_name_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    print_all_letters()
    _begin(Deployment("http://127.0.0.1:8000", "modèle", ""), None, Supervisor(tmp_path, False))
    assert b"Serving mod\\xe8le at http://127.0.0.1:8000" in written.getvalue()
