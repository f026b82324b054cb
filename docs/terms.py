"""Links the first use of each term on a page to its definition in the concepts, when the documentation is built."""

import re
from pathlib import Path

GLOSSARY = "explanations/concepts"

# How a term may look in a sentence, where that is more than the term itself, or with an "s".
_FORMS = {
    "Acknowledgment": r"acknowledg(?:e|es|ed|ing|ment|ments)",
    "Compaction": r"compact(?:s|ed|ing|ion)?",
    "In place": r"in place(?! of\b)",
    "Round": r"rounds?(?! trips?\b)",
    "Step": r"(?<!step by )steps?(?! by step\b)",
    # The weights of a model are its parameters.
    "Weight": r"weight",
}
# Pages on which the word means something else.
_OTHER = {
    "Session": ("guides/from-sync-replicas", "guides/from-tensorflow", "guides/processes", "reference/semantics"),
}


def terms() -> dict[str, re.Pattern[str]]:
    """Returns each term, and what finds it in a text."""
    text = (Path(__file__).parent / f"{GLOSSARY}.md").read_text().partition("\n## Terms\n")[2]
    return {
        term: re.compile(rf"\b{_FORMS.get(term, f'{re.escape(term)}s?')}\b", re.IGNORECASE)
        for term in re.findall(r"^### (.+)$", text, re.MULTILINE)
    }


def link(app, doctree, page):
    """Replaces the first use of each term on a page by a link. Headings, code and texts of links stay as they are."""
    from docutils import nodes
    from sphinx import addnodes

    if page == GLOSSARY or page.endswith("index"):
        return
    glossary = app.builder.get_relative_uri(page, GLOSSARY)
    skipped = (nodes.title, nodes.reference, nodes.literal, nodes.literal_block, addnodes.desc_signature)
    left = {term: pattern for term, pattern in terms().items() if page not in _OTHER.get(term, ())}
    for text in list(doctree.findall(nodes.Text)):
        ancestors = []
        node = text.parent
        while node is not None:
            ancestors.append(node)
            node = node.parent
        if not isinstance(text.parent, (nodes.paragraph, nodes.strong, nodes.emphasis)):
            continue
        if any(isinstance(node, skipped) for node in ancestors):
            continue
        found = sorted((match.start(), match.end(), term) for term in left if (match := left[term].search(text)))
        pieces, end = [], 0
        for start, stop, term in found:
            if start < end:
                continue
            pieces.append(nodes.Text(text[end:start]))
            anchor = term.lower().replace(" ", "-")
            pieces.append(
                nodes.reference("", text[start:stop], internal=True, refuri=f"{glossary}#{anchor}", classes=["term"])
            )
            end = stop
            del left[term]
        if pieces:
            text.parent.replace(text, [*pieces, nodes.Text(text[end:])])
