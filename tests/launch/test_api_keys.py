"""New keys; that the router takes their lines is tested end to end."""

from __future__ import annotations

import hashlib

import pytest

from tasuki.launch.api_keys import KeyNameError, make_key


def test_the_line_has_the_digest_and_not_the_key() -> None:
    key, line = make_key("web", 3)
    assert line == f"web {hashlib.sha256(key.encode()).hexdigest()} max-requests=3"
    other, plain = make_key("web")
    assert other != key
    assert len(plain.split()) == 2


@pytest.mark.parametrize("name", ["", "a b", "x#", "x" * 65, "ä"])
def test_a_name_that_a_line_cannot_have_is_refused(name: str) -> None:
    with pytest.raises(KeyNameError, match="1 to 64 letters"):
        make_key(name)
