"""Advice in messages: a test looks for each, in the situation in which it is right.

A message that tells its reader what to do is worse than none where that does not help. So the words of each piece of
advice are in some test, which produces it. In which situations some advice must not appear is in
failures/connections/test_remedies.py.
"""

import ast
import re
from pathlib import Path

import pytest

import redisacc

PACKAGE = Path(redisacc.__file__).parent
TESTS = Path(__file__).parent.parent

# How advice begins, at the beginning of a message or of a clause in it.
VERBS = (
    "add|allow|apply|call|change|check|choose|close|connect|create|delete|do|enlarge|fill|finish|give|install|leave|let|"
    "look|make|mend|move|name|open|pass|promote|publish|put|raise|read|remove|rename|renew|"
    "replace|restart|run|see|set|settle|start|stop|take|turn|upgrade|use|wait"
)
ADVICE = re.compile(rf"(?:^|[.:;,]\s|\(|, or |, and )(?:{VERBS})\b", re.IGNORECASE)
# What makes a message, besides classes of errors.
MAKERS = (
    "fail",
    "ok",
    "warn",
    "bad",
    "warning",
    "Failure",
    "_warn",
    "BadParameter",
    "UsageError",
    "_refusal",
    "_table",
)
# Of a message, and of the words of its advice that a test looks for.
SHORTEST, COMPARED = 15, 20
# Stands for what an f-string inserts.
INSERTED = "\0"
# What begins like advice and is none.
NO_ADVICE = (
    "name must be text or None, not",
    ", not a number of replicas",
    "WAIT cannot be used with replica instances",
    "and create=False forbids to create one",
    "and create=False requires it",
    "create=False requires a shared_name: a private a",
    "publish() needs the round of a loop over rounds(",
    "apply() needs the step of a loop over steps()",
    "name or service not known|nodename nor servname",
    "connect-src 'self'; form-action 'self'; base-uri",
    "a gradient was applied, announced, read and taken",
)


def text_of(node):
    """Returns a literal text, with `INSERTED` for what is inserted; None if the node is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else INSERTED for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (text_of(node.left) or INSERTED) + (text_of(node.right) or INSERTED)
    return None


def texts_in(tree):
    """Yields what errors, failures, findings and warnings say, and all texts that have a name or are in a table."""
    for node in ast.walk(tree):
        found = []
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                if name.endswith("Error") or name in MAKERS:
                    found = [*node.args, *(keyword.value for keyword in node.keywords)]
            case ast.Assign(value=value):
                found = [value]
            case ast.Dict(values=values) | ast.Tuple(elts=values):
                found = list(values)
        yield from (text for each in found if (text := text_of(each)) and len(text) > SHORTEST)


def trees(folder):
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}


def advises(text):
    """Yields how the clauses of a message begin that advise something."""
    for match in ADVICE.finditer(text):
        yield text[match.start() : match.start() + COMPARED].partition(INSERTED)[0].strip(" .:;,(")


@pytest.mark.slow
def test_a_test_looks_for_each_piece_of_advice():
    # In a regular expression, some characters are escaped.
    literals = "\n".join(
        text.replace("\\", "")
        for path, tree in trees(TESTS).items()
        if path != Path(__file__)
        for node in ast.walk(tree)
        if (text := text_of(node))
    )
    messages = {
        re.sub(r"\s+", " ", text): str(path.relative_to(PACKAGE))
        for path, tree in trees(PACKAGE).items()
        # They list the commands, each with what it does, and what a leader does next.
        if path not in (PACKAGE / "tools" / "cli" / "__init__.py", PACKAGE / "_training" / "decision.py")
        for text in texts_in(tree)
        if ADVICE.search(text)
    }
    missing = {
        text: where
        for text, where in messages.items()
        if not any(words in literals for words in advises(text)) and not any(words in text for words in NO_ADVICE)
    }
    assert missing == {}, "look for it in a test that produces it in the situation in which it is right"
    assert [words for words in NO_ADVICE if not any(words in text for text in messages)] == []
