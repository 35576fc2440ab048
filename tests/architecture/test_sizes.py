"""Files and functions that fit into a head. The lists of exceptions may only shrink."""

import ast

from tests.architecture.source import PACKAGES, modules, name

FILE_LINES = 300
FUNCTION_LINES = 60
LONG_FILES = {
    "engine/protocol.py": 384,  # every message of the system in one file, on purpose
    "service/dispatch.py": 324,
}
LONG_FUNCTIONS: dict[str, int] = {}


def file_lengths():
    return {name(path): len(path.read_text().splitlines()) for path in modules(*PACKAGES)}


def function_lengths():
    return {
        f"{name(path)}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in modules(*PACKAGES)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def too_long(lengths, bound, allowed):
    return {what: lines for what, lines in lengths.items() if lines > allowed.get(what, bound)}


def no_longer_long(lengths, bound, allowed):
    return [what for what, lines in allowed.items() if lengths.get(what, 0) <= bound or lengths[what] < lines]


def test_no_file_is_longer_than_the_bound():
    assert too_long(file_lengths(), FILE_LINES, LONG_FILES) == {}


def test_no_function_is_longer_than_the_bound():
    assert too_long(function_lengths(), FUNCTION_LINES, LONG_FUNCTIONS) == {}


def test_an_exception_goes_when_it_is_no_longer_needed():
    assert no_longer_long(file_lengths(), FILE_LINES, LONG_FILES) == []
    assert no_longer_long(function_lengths(), FUNCTION_LINES, LONG_FUNCTIONS) == []
