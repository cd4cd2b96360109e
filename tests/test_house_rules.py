"""The house rules of CONTRIBUTING that a machine can check: sizes, opening sentences, words that the text avoids."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)]

LINES_OF_A_FILE = 500
LINES_OF_A_FUNCTION = 60
PHRASES = ("The one idea to know", "anew", "whoever", "dearest", "in turns")
BANNED = re.compile("|".join(rf"\b{phrase}\b" for phrase in PHRASES), re.IGNORECASE)
# The text speaks of the product: not of who wrote it, on which machine, or where that machine fetched packages.
FOREIGN = re.compile(
    r"(?<![\w.])/(?:work|root|home)/|\b(?:pypi|artifactory|extra-index-url|index-url)\b|\bissues? #?\d"
    r"|\b(?:this|a previous|an earlier|the last) session\b|\bsub-?agents?\b",
    re.IGNORECASE,
)


def relative(path):
    return path.relative_to(ROOT).as_posix()


def is_kernel(function):
    """Return whether a function is Triton code, whose length the GPU's one program sets."""
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


def lines_of_code(text):
    """Return the numbers of the lines that hold code: neither blank nor a comment alone."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in layout]
    return {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}


def long_functions(text):
    """Return the names of functions with more lines of code than the rule allows, docstrings not counted."""
    code, found = lines_of_code(text), []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_kernel(node):
            continue
        opening = node.body[0]
        begin = opening.end_lineno + 1 if ast.get_docstring(node) is not None else opening.lineno
        counted = [*range(node.lineno, opening.lineno), *range(begin, node.end_lineno + 1)]
        if len(code & set(counted)) > LINES_OF_A_FUNCTION:
            found.append(node.name)
    return found


def test_files_are_short():
    native = [path for kind in ("h", "cpp", "cu", "cuh") for path in (ROOT / "src").rglob(f"*.{kind}")]
    assert native
    long = {relative(path) for path in [*SOURCES, *native] if len(path.read_text().splitlines()) > LINES_OF_A_FILE}
    assert not long


def test_functions_are_short():
    long = {f"{relative(path)}::{name}" for path in SOURCES for name in long_functions(path.read_text())}
    assert not long


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_modules_open_with_what_they_are(path):
    assert ast.get_docstring(ast.parse(path.read_text())), f"{relative(path)} has no docstring"


def test_the_text_avoids_phrases_that_readers_stumble_over():
    found = {relative(path) for path in [*SOURCES, *PAGES] if BANNED.search(path.read_text())}
    assert not found


def test_advice_names_the_distribution_of_this_project():
    texts = [*SOURCES, *PAGES, *ROOT.glob("*.md"), *(ROOT / "examples").glob("*.py")]
    other = re.compile(r"pip install [^\n`]*?['\" ]?\bsparta(?:\[|['\"`\s]|$)", re.MULTILINE)
    assert not [relative(path) for path in texts if other.search(path.read_text())]


def test_the_rule_on_any_is_switched_off_once():
    assert not [relative(path) for path in SOURCES if "noqa: ANN401" in path.read_text()]


def test_the_text_speaks_of_the_product_only():
    texts = [
        *SOURCES,
        *PAGES,
        *ROOT.glob("*.md"),
        *(ROOT / "benchmarks").rglob("*.py"),
        *(ROOT / "tests").rglob("*.py"),
    ]
    found = [
        f"{relative(path)}: {match.group()}"
        for path in texts
        if path != Path(__file__)
        for match in FOREIGN.finditer(path.read_text())
    ]
    assert not found


BODY = "\n".join(f"    x{place} = {place}" for place in range(LINES_OF_A_FUNCTION))
DOCUMENTED = f'def f():\n    """Say.\n\n    {"more" * 99}\n    """\n\n    # why\n'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"def f():\n{BODY}\n", ["f"]),
        (f"{DOCUMENTED}{BODY}\n", ["f"]),
        (f"@triton.jit(do_not_specialize=['n'])\ndef f():\n{BODY}\n", []),
        (f"{DOCUMENTED}{BODY.split(chr(10), 1)[1]}\n", []),
        (
            f"class A:\n    @property\n    def f(self):\n        def g():\n{BODY.replace('    ', ' ' * 12)}\n",
            ["f", "g"],
        ),
    ],
)
def test_the_count_leaves_out_docstrings_comments_and_kernels(text, found):
    assert long_functions(text) == found


@pytest.mark.parametrize(
    "text", ["see /work/main", "made in this session", "--index-url https://x", "as issue #12 asks", "in /home/me/x"]
)
def test_words_of_the_workshop_would_be_noticed(text):
    assert FOREIGN.search(text)


@pytest.mark.parametrize("text", ["a session of tuning", "docs/work/x", "~/.cache", "https://x.org/home/page"])
def test_words_of_the_product_are_left_alone(text):
    assert not FOREIGN.search(text)
