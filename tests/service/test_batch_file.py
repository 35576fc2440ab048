"""A batch's file: what is wrong with it is said with the line, before anything is run, and without a text of it."""

import json

import pytest

from billing.ids import uuid7
from service.batch.file import BatchFileError, read_batch, write_output

GOOD = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": [{"role": "user", "content": "a secret of the user"}]},
}


def line(**changes):
    return json.dumps(GOOD | changes).encode() + b"\n"


def body(**changes):
    return GOOD["body"] | changes


def test_lines_are_numbered_and_kept_as_they_are():
    file = read_batch([line(), b"\n", b"  \r\n", line(custom_id="b")])
    assert (file.endpoint, file.model) == ("/v1/chat/completions", "m")
    assert [(one.number, one.custom_id) for one in file.lines] == [(1, "a"), (2, "b")]
    assert json.loads(file.lines[1].body) == GOOD["body"]


def test_a_byte_order_mark_is_no_error():
    assert len(read_batch([b"\xef\xbb\xbf" + line()]).lines) == 1


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (b"{", "not a JSON object"),
        (b"\xff\xfe", "not a JSON object"),
        (b'{"body":' + b"[" * 100_000, "not a JSON object"),
        (b"[]", "Expected 'object'"),
        (line(), "same as in line 1"),
        (line(custom_id=""), "custom_id"),
        (line(custom_id=7), "custom_id"),
        (line(custom_id="b", method="GET"), "'method' must be POST"),
        (line(custom_id="b", url="/v1/embeddings"), "'url' must be /v1/chat/completions or /v1/completions"),
        (line(custom_id="b", extra="a secret of the user"), "unknown field 'extra'"),
        (line(custom_id="b", body=body(model="other")), "must be the same in all lines"),
        (line(custom_id="b", body=body(stream=True)), "'stream' is not possible"),
        (line(custom_id="b", body=body(n=2)), "'n' is not supported"),
        (line(custom_id="b", body=body(messages=[])), "messages"),
        (line(custom_id="b", body=body(temperature=9)), "temperature"),
        (line(custom_id="b", body=body(messages=[{"role": "tool", "content": "x"}])), "messages[0].role"),
        (line(custom_id="b", body="text"), "body"),
    ],
)
def test_what_is_wrong_is_named_with_its_line_and_quotes_nothing(second, words):
    with pytest.raises(BatchFileError) as caught:
        read_batch([line(), second])
    assert str(caught.value).startswith("Line 2: ")
    assert words in str(caught.value)
    assert "secret of the user" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_without_lines_is_refused():
    with pytest.raises(BatchFileError, match="no lines"):
        read_batch([b"\n"])


def test_an_output_line_has_the_fields_of_openais():
    request_id = uuid7()
    written = json.loads(write_output("a", request_id, 200, b'{"id":"x"}'))
    assert written == {
        "id": f"batch_req_{request_id.hex}",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": str(request_id), "body": {"id": "x"}},
        "error": None,
    }
