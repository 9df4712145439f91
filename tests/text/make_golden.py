"""Write `golden/*.json`: what transformers makes of templates and texts.

    python tests/text/make_golden.py            # all files whose model is there
    python tests/text/make_golden.py --check    # compare instead of writing

`default_model.json` needs the default model (`tasuki model fetch smollm2-135m`).
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import jinja2
from golden_cases import CASES, DEFAULT_MODEL_CASES, NOW, TEXTS, VARIABLES
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from tasuki.models.cache import models_dir

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
DEFAULT_MODEL = models_dir() / "smollm2-135m-instruct"
SMALL_MODELS = [
    "byte_level",
    "split_regex",
    "byte_fallback",
    "llama_class",
    "metaspace",
    "wordpiece",
]


class _Clock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return NOW


def render(call: Callable[[], str]) -> dict[str, str]:
    """Return the text of a render, or what kind of error it ends in."""
    try:
        with mock.patch.object(chat_template_utils, "datetime", _Clock):
            return {"text": call()}
    except jinja2.TemplateSyntaxError:
        return {"error": "syntax"}
    except jinja2.TemplateError as error:
        if type(error) is jinja2.TemplateError:
            return {"error": "raised", "message": str(error)}
        return {"error": "render"}
    except (TypeError, ValueError, AttributeError, LookupError, ZeroDivisionError):
        return {"error": "render"}


def templates() -> Any:
    """Render every case with the small byte-level model's special tokens."""
    tokenizer = load(HERE / "models" / "byte_level")
    cases = []
    for name, messages, arguments in CASES:
        source = (HERE / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
        cases.append(
            {
                "template": name,
                "messages": messages,
                "arguments": arguments,
                **render_chat(tokenizer, messages, arguments, source),
            }
        )
    return cases


def expressions() -> Any:
    """Render every line of `expressions.txt`."""
    tokenizer = load(HERE / "models" / "byte_level")
    lines = (HERE / "expressions.txt").read_text(encoding="utf-8").split("\n")
    messages = [{"role": "user", "content": "hi", "tool_calls": None}]
    sources = [line for line in lines if line]
    sources += ["a\r\n{% if true %}\r\nb\r\n{% endif %}\r\nc\r", "trailing\n\n", "", "{{ 'x' }}\n"]
    return {
        "variables": VARIABLES,
        "messages": messages,
        "cases": [
            {"source": source, **render_chat(tokenizer, messages, VARIABLES, source)}
            for source in sources
        ],
    }


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    arguments: dict[str, Any],
    source: str | None = None,
) -> dict[str, Any]:
    """Render one chat; with its token ids where there is a text."""
    result: dict[str, Any] = render(
        lambda: tokenizer.apply_chat_template(
            messages, chat_template=source, tokenize=False, **arguments
        )
    )
    if "text" in result:
        result["ids"] = tokenizer(result["text"], add_special_tokens=False)["input_ids"]
    return result


def tokens(path: Path) -> Any:
    """Encode every text, and decode random ids, with the model of a folder."""
    tokenizer = load(path)
    encoded = [
        {
            "text": text,
            "ids": tokenizer.encode(text, add_special_tokens=False),
            "ids_with_special": tokenizer.encode(text),
            "decoded": tokenizer.decode(tokenizer.encode(text)),
        }
        for text in TEXTS
    ]
    generator = random.Random(7)
    decoded = []
    for length in (1, 2, 3, 5, 8, 13, 40, 120):
        ids = [generator.randrange(len(tokenizer)) for _ in range(length)]
        decoded.append(
            {
                "ids": ids,
                "text": tokenizer.decode(ids),
                "text_without_special": tokenizer.decode(ids, skip_special_tokens=True),
            }
        )
    return {
        "special_tokens": tokenizer.special_tokens_map,
        "length": len(tokenizer),
        "encoded": encoded,
        "decoded": decoded,
    }


def default_model() -> Any:
    """The default model's template and tokenizer."""
    tokenizer = load(DEFAULT_MODEL)
    return {
        "chats": [
            {
                "messages": messages,
                "arguments": arguments,
                **render_chat(tokenizer, messages, arguments),
            }
            for messages, arguments in DEFAULT_MODEL_CASES
        ],
        "tokens": tokens(DEFAULT_MODEL),
    }


def load(path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local folder."""
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


FILES: dict[str, Callable[[], Any]] = {
    "templates": templates,
    "expressions": expressions,
    "tokens": lambda: {name: tokens(HERE / "models" / name) for name in SMALL_MODELS},
    "default_model": default_model,
}


def generate(name: str) -> str:
    """Return the content of one golden file."""
    return json.dumps(FILES[name](), ensure_ascii=False, indent=1) + "\n"


def main() -> int:
    """Write or compare the golden files; the exit status tells of differences."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    differing = []
    for name in FILES:
        if name == "default_model" and not DEFAULT_MODEL.is_dir():
            print(f"skipped {name}: {DEFAULT_MODEL} is not there", file=sys.stderr)
            continue
        path = GOLDEN / f"{name}.json"
        content = generate(name)
        if not check:
            path.write_text(content, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != content:
            differing.append(path.name)
    for name in differing:
        print(f"{name} differs from what transformers gives now", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
