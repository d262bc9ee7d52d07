"""Keeps thebe off the pages: it would put a CDN's address and a broken script on every one.

Jupyter Book 1.x always loads sphinx-thebe. Whether or not its button is wanted, that writes
`const THEBE_JS_URL = ...` into every page, and Sphinx 7 writes the line twice, which is a
SyntaxError in the browser. It is set up before this extension is, so its listeners are taken
away again.
"""

from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, bool]:
    for listeners in app.events.listeners.values():
        for listener in list(listeners):
            if listener.handler.__module__ == "sphinx_thebe":
                app.disconnect(listener.id)
    sheets = app.registry.css_files
    sheets[:] = [(name, options) for name, options in sheets if name != "sphinx-thebe.css"]
    return {"parallel_read_safe": True, "parallel_write_safe": True}
