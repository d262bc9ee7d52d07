"""Every link to a glossary term carries the term's definition as its title, shown on hover.

Works from disk and without JavaScript: the definition is copied into the page when the book is
built. Only the first paragraph is taken, as plain text; the link still leads to the whole
entry.
"""

from docutils import nodes
from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-resolved", give_term_links_their_definition)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def give_term_links_their_definition(app: Sphinx, page: nodes.document, docname: str) -> None:
    definitions = None
    for link in page.findall(nodes.reference):
        anchor = link.get("refid") or link.get("refuri", "").partition("#")[2]
        if anchor.startswith("term-"):
            definitions = definitions or definitions_by_anchor(app)
            link["reftitle"] = definitions[anchor]


def definitions_by_anchor(app: Sphinx) -> dict[str, str]:
    """`{"term-block": "Sixteen token slots of ..."}` for every entry of every glossary."""
    terms = app.env.get_domain("std").get_objects()
    pages = {docname for _, _, kind, docname, _, _ in terms if kind == "term"}
    return {
        anchor: " ".join(definition.next_node(nodes.paragraph).astext().split())
        for page in pages
        for entry in app.env.get_doctree(page).findall(nodes.definition_list_item)
        for definition in entry.findall(nodes.definition)
        for term in entry.findall(nodes.term)
        for anchor in term["ids"]
    }
