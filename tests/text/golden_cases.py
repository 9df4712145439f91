"""What the golden files of the text layer are made of: chats, variables, texts."""
# ruff: noqa: RUF001

from datetime import datetime
from typing import Any

JSON = dict[str, Any]

#: What `strftime_now` is asked at, in every golden render.
NOW = datetime(2024, 7, 6, 9, 5, 3, 12345)

#: Variables of `expressions.txt`.
VARIABLES: JSON = {
    "user": {"name": "Ada", "age": 36, "tags": ["x", "é"], "none": None, "pi": 3.14},
    "users": [{"name": "Grace", "age": 1}, {"name": "Ada", "age": 2}, {"name": "Bob"}],
    "schema": {"type": "array", "items": {"type": "string"}, "keys": 1, "values": [2]},
    "list": [1, 2, 3, 4],
    "text": "Héllo wörld",
    "big": 2**62,
}

USER: JSON = {"role": "user", "content": "  What is 2 + 2?\nThink.  "}
SYSTEM: JSON = {"role": "system", "content": "You are «terse».\n"}
ANSWER: JSON = {"role": "assistant", "content": "4\n"}
THANKS: JSON = {"role": "user", "content": "Thänks 🙏 — 世界"}
PLAIN = [USER]
LONG = [SYSTEM, USER, ANSWER, THANKS]

WEATHER: JSON = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für «Städte» & <more>, 'now'",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": 'e.g. "Zürich"'},
                "unit": {"type": "string", "enum": ["°C", "°F"], "default": "°C"},
                "days": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                "items": {"type": ["string", "null"], "default": None},
                "place": {
                    "type": "object",
                    "properties": {"lat": {"type": "number", "default": 1.0}, "any": {}},
                    "required": ["lat"],
                },
            },
            "required": ["city"],
        },
    },
}
ADD: JSON = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLS: JSON = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Zürich", "n": [1, 2.0]}},
        },
        {"id": "2", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
    ],
}
RESULTS: list[JSON] = [
    {"role": "tool", "tool_call_id": "1", "content": '{"temp": 20}'},
    {"role": "tool", "tool_call_id": "2", "content": {"sum": 3, "ok": True, "note": None}},
]
TOOL_CHAT = [SYSTEM, USER, CALLS, *RESULTS, ANSWER, THANKS]
PARTS: list[JSON] = [
    {"role": "system", "content": "Look."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is "},
            {"type": "image_url", "image_url": {"url": "http://example.com/a.png"}},
            {"type": "text", "text": "thîs?"},
            {"type": "image"},
        ],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
    {"role": "user", "content": {"text": "mapping"}},
    {"role": "user", "content": []},
]
THOUGHT: list[JSON] = [
    USER,
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nfour"},
    THANKS,
    {"role": "assistant", "reasoning_content": "\nwell\n", "content": "\nYou're welcome"},
]
DOCUMENTS: list[JSON] = [
    {"title": "Zebra", "text": "Stripes, and then some more of them."},
    {"title": "ant", "text": ""},
    {"title": "Bee", "text": "Ä buzz"},
]
DATA: JSON = {
    "name": "Ünïcode 世界 🙂",
    "list": [1, 2.5, None, True, [], {}, [[]]],
    "z": {"b": 1, "a": 'quote " backslash \\ slash /'},
    "empty": "",
}

OPEN: JSON = {"continue_final_message": True}

#: Template, messages, and the other arguments of `apply_chat_template`.
CASES: list[tuple[str, list[JSON], JSON]] = [
    ("chatml", PLAIN, {}),
    ("chatml", LONG, {"add_generation_prompt": True}),
    ("chatml", PLAIN, {"name": "Ω", "add_generation_prompt": True}),
    ("chatml", LONG[:3], {"continue_final_message": True}),
    (
        "chatml",
        [USER, {"role": "assistant", "content": "It is  "}],
        {"continue_final_message": True},
    ),
    ("chatml", [{"role": "user", "content": None}], {}),
    ("chatml", [], {}),
    ("chatml", LONG, {"add_generation_prompt": True, "continue_final_message": True}),
    ("chatml", [{"role": "user"}], {"continue_final_message": True}),
    ("tools", PLAIN, {}),
    ("tools", LONG, {"add_generation_prompt": True}),
    ("tools", TOOL_CHAT, {"tools": [WEATHER, ADD], "add_generation_prompt": True}),
    ("tools", TOOL_CHAT[1:], {"tools": [ADD]}),
    ("tools", TOOL_CHAT, {"tools": []}),
    ("tools", TOOL_CHAT[:5], {"tools": None, "bos_token": "<override>"}),
    ("fold_system", LONG, {}),
    ("fold_system", PLAIN, {}),
    ("fold_system", [USER, USER], {}),
    ("fold_system", [SYSTEM, ANSWER], {}),
    ("fold_system", LONG[:3], {"continue_final_message": True}),
    ("fold_system", [SYSTEM], {}),
    ("dated", LONG, {}),
    ("dated", LONG, {"long_date": True}),
    ("dated", LONG, {"date_string": "1 Jan 1970"}),
    ("loops", LONG, {}),
    ("loops", [SYSTEM], {}),
    ("loops", [USER, ANSWER, {"role": "user", "content": "STOP"}, THANKS], {}),
    ("reasoning", THOUGHT, {"add_generation_prompt": True, "enable_thinking": False}),
    ("reasoning", THOUGHT, {"enable_thinking": True, "add_generation_prompt": True}),
    ("reasoning", THOUGHT[:3], {"add_generation_prompt": True}),
    ("reasoning", [USER, {"role": "assistant", "thinking": "so", "content": "x"}], {}),
    ("reasoning", [USER, {"role": "assistant", "reasoning": "old", "content": None}], {}),
    ("reasoning", THOUGHT, {"continue_final_message": True}),
    ("whitespace", PLAIN, {}),
    ("json", LONG, {"data": DATA}),
    ("json", PLAIN, {"data": {"list": "text"}}),
    ("parts", PARTS, {"add_generation_prompt": True}),
    ("parts", LONG, {}),
    ("parts", [{"role": "user", "content": [{"type": "audio"}]}], {}),
    ("parts", PARTS[:3], {"continue_final_message": True}),
    ("generation", LONG, {}),
    ("macros", PLAIN, {"tools": [WEATHER, ADD]}),
    ("macros", LONG, {}),
    ("documents", LONG, {"documents": DOCUMENTS}),
    ("documents", LONG, {}),
]

#: Chats for the default model's own template.
DEFAULT_MODEL_CASES: list[tuple[list[JSON], JSON]] = [
    (PLAIN, {"add_generation_prompt": True}),
    (LONG, {"add_generation_prompt": True}),
    (LONG[1:], {}),
    (LONG[:3], {"continue_final_message": True}),
    ([{"role": "user", "content": [{"type": "text", "text": "parts"}]}], {}),
]

TEXTS = [
    "",
    " ",
    "Hello, world!",
    " leading and trailing ",
    "The quick brown fox jumps over the lazy dog.",
    "a  b   c    d\t\te\n\nf\r\n\r\ng \n h\n   \n\t x   ",
    "0 12 345 6789 1234567890 3.14159 1,000,000 2024-07-26 １２３ ٣٤٥ Ⅷ ½",
    'def f(x: int) -> str:\n    return f"{x!r}"  # comment\n\n\tif x:\n\t\tpass\n',
    "I'm you're he's she'll we've they'd DON'T can't it’s",
    "駅伝では、たすきを渡します。今天天气怎么样？안녕하세요 세계",
    "Привет, мир! Γειά σου! مرحبا بالعالم नमस्ते दुनिया สวัสดี שלום",
    "🙂🎉 👍🏽 ❤️ 👩‍👩‍👧‍👦 🏳️‍🌈 🇯🇵 1️⃣ e\u0301 é \u200b\ufeff\u00a0\u3000|",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "x<|im_end|>y<|im_end|> <tool_call>{}</tool_call> <|late|><image> <s> </s><unk>[SEP]",
    "<|im_end| <|im_start <|endoftext|><|endoftext|> <0x41> ▁ Ġ Ċ",
    "<s> a <s>b  <s>   c</s>d",
    "\x00\x01\x1f\x7f\u0085\u2028\u2029 \ud7ff\ue000\U0010ffff",
    "ﬁ ﬂ ① ㍿ Å ℌ ǆ İ ß ẞ Σς",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 3,
    '{"role": "user", "content": "What is the weather?", "n": [1, 2.5e-3, null]}',
    "https://example.com/a?b=c&d=%20#e user@example.com C:\\path\\to /usr/bin/env",
]
