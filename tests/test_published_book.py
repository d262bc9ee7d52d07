"""The built pages as a reader meets them: from disk, in a browser, with the network off.

`make book` runs this against the book that it has built; run by itself it looks at whatever lies in
build/html. Nothing here waits for time to pass: every wait is for a condition.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, Request, sync_playwright

ROOT = Path(__file__).parents[1]
BOOK = ROOT / "build" / "html"
CHAPTERS = sorted(path.stem for path in (ROOT / "chapters").glob("*.ipynb"))
REPOSITORY = "mini-inference-engine/mie"
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1300, "height": 900}

pytestmark = pytest.mark.skipif(
    not (BOOK / "index.html").exists(), reason="there is no built book: run `make book` first"
)


def pages() -> list[Path]:
    """Every page that the book's builder wrote, less the redirect at the top."""
    found = (path for path in BOOK.rglob("*.html") if "_static" not in path.parts)
    return sorted(path for path in found if path != BOOK / "index.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip(f"no browser ({', '.join(names)}) on PATH: `make browser` says what to do")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    with browser.new_context(offline=True, viewport=DESK, color_scheme="light") as context:
        yield context.new_page()


def visit(page: Page, path: Path) -> None:
    """Open a page and wait until its scripts, pictures, fonts and formulas are there."""
    page.goto(path.as_uri())
    page.evaluate(
        """async () => {
            await window.MathJax?.startup?.promise
            await document.fonts.ready
            await Promise.allSettled([...document.images].map(image => image.decode()))
        }"""
    )


@pytest.fixture(scope="module")
def survey(browser: Browser) -> dict[str, list[str]]:
    """Every page visited once: what went wrong on it, and what sticks out of it on a phone."""
    found: dict[str, list[str]] = {"trouble": [], "wide": []}
    here = ""

    def note(what: object) -> None:
        found["trouble"].append(f"{here}: {what}")

    def watch(request: Request) -> None:
        if urlsplit(request.url).scheme not in {"file", "data", "blob"}:
            note(f"asked for {request.url}")

    with browser.new_context(offline=True, viewport=PHONE) as context:
        page = context.new_page()
        page.on("pageerror", note)
        page.on("console", lambda message: message.type == "error" and note(message.text))
        page.on("request", watch)
        for path in pages():
            here = str(path.relative_to(BOOK))
            visit(page, path)
            found["wide"] += [f"{here}: {element}" for element in page.evaluate(STICKING_OUT)[:3]]
    return found


# Elements of the text that reach past the window, though nothing around them scrolls.
STICKING_OUT = """() => {
    const out = element => element.getBoundingClientRect().right > innerWidth + 1
    const contained = element => {
        for (let e = element.parentElement; e !== document.body; e = e.parentElement)
            if (getComputedStyle(e).overflowX !== 'visible' && !out(e)) return true
        return false
    }
    const wide = [...document.querySelectorAll('.bd-article *')]
        .filter(element => out(element) && !contained(element))
        .map(element => element.outerHTML.slice(0, 120))
    const page = document.documentElement.scrollWidth
    return page > innerWidth ? [`the page is ${page} wide`, ...wide] : wide
}"""


# ---- every page ----------------------------------------------------------------------------------


def test_no_page_asks_the_network_or_complains(survey: dict[str, list[str]]) -> None:
    assert not survey["trouble"], "\n".join(survey["trouble"])


def test_no_page_is_wider_than_a_phone(survey: dict[str, list[str]]) -> None:
    """Wide tables and code scroll in themselves; the page doesn't."""
    assert not survey["wide"], "\n".join(survey["wide"])


def test_every_link_inside_the_book_leads_somewhere() -> None:
    texts = {path: path.read_text() for path in pages()}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in texts.items()}
    dead = []
    for path, text in texts.items():
        if (
            "_modules" in path.parts
        ):  # source listings point back at names by where they are defined
            continue
        for link in set(re.findall(r'<a\b[^>]*?\bhref="([^"]+)"', text)):
            address, anchor = urldefrag(link)
            if urlsplit(address).scheme:
                continue
            target = (path.parent / unquote(address)).resolve() if address else path
            if not target.exists() or (
                anchor and unquote(anchor) not in anchors.get(target, {anchor})
            ):
                dead.append(f"{path.relative_to(BOOK)}: {link}")
    assert not dead, "\n".join(dead)


def test_the_dark_mode_switch_works_and_darkens_outputs_too(page: Page) -> None:
    visit(page, BOOK / "chapters" / f"{CHAPTERS[0]}.html")
    lightness = """selector => {
        const canvas = document.createElement('canvas').getContext('2d')
        const colours = [...document.querySelectorAll(selector)].map(element => {
            canvas.clearRect(0, 0, 1, 1)
            canvas.fillStyle = getComputedStyle(element).backgroundColor
            canvas.fillRect(0, 0, 1, 1)
            const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data
            return alpha === 0 ? null : (red + green + blue) / 765
        })
        return colours.filter(lightness => lightness !== null)
    }"""
    surfaces = "body, .bd-article pre, .cell_input, .cell_output .text_html, .mie-output"
    assert min(page.evaluate(lightness, surfaces)) > 0.8

    switch = page.locator("button.theme-switch-button:visible").first
    for _ in range(3):  # it goes round: the system's, light, dark
        if page.evaluate("document.documentElement.dataset.theme") != "dark":
            switch.click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert max(page.evaluate(lightness, surfaces)) < 0.25


def test_the_fonts_are_the_books_own(page: Page) -> None:
    visit(page, BOOK / "chapters" / f"{CHAPTERS[0]}.html")
    loaded = page.evaluate(
        "[...document.fonts].filter(font => font.status === 'loaded').map(font => font.family)"
    )
    assert {"Source Serif 4", "Inter", "JetBrains Mono"} <= {name.strip('"') for name in loaded}


def test_formulas_are_set_without_the_network(page: Page) -> None:
    visit(page, BOOK / "book" / "notation.html")
    assert page.locator(".bd-article .math mjx-container").count() > 0


def test_a_glossary_term_shows_its_definition_on_hover(page: Page) -> None:
    visit(page, BOOK / "book" / "how-to-read.html")
    links = page.locator('a[href*="glossary.html#term-"]')
    assert links.count() > 0
    assert all(len(link.get_attribute("title") or "") > 20 for link in links.all())


# ---- every chapter -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chapter(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    with browser.new_context(offline=True, viewport=DESK) as context:
        page = context.new_page()
        visit(page, BOOK / "chapters" / f"{request.param}.html")
        yield page


every_chapter = pytest.mark.parametrize("chapter", CHAPTERS, indirect=True, scope="module")


@every_chapter
def test_formulas_are_set(chapter: Page) -> None:
    formulas = chapter.locator(".bd-article .math")
    assert formulas.locator("mjx-container").count() == formulas.count()
    assert chapter.locator("mjx-merror, [data-mjx-error]").count() == 0


@every_chapter
def test_figures_are_shown_and_described(chapter: Page) -> None:
    images = chapter.evaluate(
        """[...document.querySelectorAll('.bd-article img')]
            .map(image => [image.getAttribute('src'), image.naturalWidth, image.alt])"""
    )
    assert images, "the chapter has no figure"
    broken = [src for src, width, alt in images if width == 0 or not alt.strip() or alt == src]
    assert not broken, f"not loaded, or without alt text: {broken}"


@every_chapter
def test_steppers_move_by_keyboard_and_say_what_they_show(chapter: Page) -> None:
    steppers = chapter.locator(".mie-stepper[id]")
    assert steppers.count() > 0, "the chapter has no stepper"
    for stepper in steppers.all():
        frame = stepper.locator(".mie-frame[data-current]")
        stepper.focus()
        first = picture_and_words(frame)
        chapter.keyboard.press("ArrowRight")
        second = picture_and_words(frame)
        assert frame.is_visible()
        assert all(first) and all(second), "a frame without a picture, or without words for it"
        assert first[0] != second[0], "the picture did not move"
        assert first[1] != second[1], "the words did not move"
        chapter.keyboard.press("ArrowLeft")
        assert picture_and_words(frame) == first


def picture_and_words(frame: Locator) -> list[str]:
    return frame.evaluate(
        """frame => {
            const words = frame.cloneNode(true)
            words.querySelectorAll('svg, style').forEach(element => element.remove())
            return [frame.querySelector('svg')?.innerHTML ?? '', words.textContent.trim()]
        }"""
    )


@every_chapter
def test_no_widget_waits_for_a_kernel(chapter: Page) -> None:
    """A live widget would be an empty place here; its static twin stands in for it."""
    assert chapter.locator('script[type^="application/vnd.jupyter.widget"]').count() == 0
    assert "require.js" not in chapter.content()


@every_chapter
def test_buttons_launch_and_download_this_chapter(chapter: Page) -> None:
    name = chapter.url.rpartition("/")[2].removesuffix(".html") + ".ipynb"
    links = chapter.eval_on_selector_all(".bd-header-article a", "all => all.map(a => a.href)")
    colab = f"https://colab.research.google.com/github/{REPOSITORY}/blob/main/chapters/{name}"
    assert colab in links
    assert any(link.startswith("https://mybinder.org/") and link.endswith(name) for link in links)
    downloads = [
        Path(urlsplit(link).path) for link in links if link.endswith(f"_sources/chapters/{name}")
    ]
    assert downloads and all(path.exists() for path in downloads)
