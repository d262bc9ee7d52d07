"""The stepper, the drawings and what they are made of: well formed, repeatable, whole in words."""

from __future__ import annotations

import re
import shutil
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator

import pytest
from hash_seeds import outputs_of
from hypothesis import given
from hypothesis import strategies as st
from strict_html import Tree

from mie.book.palette import LOOKS, look
from mie.viz import (
    Computed,
    Frame,
    Reading,
    Segment,
    Stepper,
    figure_frame,
    file_map,
    interactive,
    kv_grid,
    logit_lens,
)
from mie.viz.interactive import with_steps, with_widgets
from mie.viz.stepper import scope_ids
from mie.viz.svg import Canvas, visible

KNOBS = sys.modules["mie.viz.interactive"]  # the package gives the function under this name
SVG = "{http://www.w3.org/2000/svg}"
AWKWARD = "<|im_end|> \"quoted\" 'single' & </script></svg> \x00 \ud800\n next"


def plain(texts: list[str]) -> str:
    return re.sub(r"\s+", " ", " ".join(texts))


def drawing(label: str = "A") -> Frame:
    canvas = Canvas(120, 60, "Two cells")
    canvas.cell((0, 0, 50, 20), look(1), label)
    canvas.cell((60, 0, 50, 20), look(2), "B")
    return canvas.frame(f"{label} stands beside B.")


def small_stepper(title: str = "Title", count: int = 4) -> Stepper:
    return Stepper([drawing(f"f{i}") for i in range(count)], title)


MAP = file_map(
    [
        Segment("length", 0, 8, "u64", "The header has 40 bytes.", (40).to_bytes(8, "little")),
        Segment("header", 8, 48, "JSON", 'It says {"a": 1}.', b'{"a": "</script>"}'),
        Segment("model.layers.0.self_attn.q_proj.weight" * 2, 48, 1_000_000, "BF16, 576 × 576"),
    ],
    "A file",
)
LENS = logit_lens(
    [
        Reading("layer 1", [("\n", 0.5), (AWKWARD, 0.25)], 0.0004),
        Reading("layer 2", [(" Paris", 0.9), ("\n", 0.05)], 0.9),
    ],
    " Paris",
    "The lens",
)
GRID = kv_grid(
    ["The", " cat", "<|im_end|>", " sat", '"'],
    {
        "Without": [Computed(0, 3), Computed(0, 4), Computed(0, 5)],
        "With": [Computed(0, 3), Computed(3, 4), Computed(4, 5)],
    },
    "The grid",
)
ALL = [MAP, LENS, GRID, small_stepper(), Stepper([Frame("<svg/>", AWKWARD, AWKWARD)] * 2, AWKWARD)]
TITLES = ["map", "lens", "grid", "small", "awkward"]


# -- form ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stepper", ALL, ids=TITLES)
def test_every_page_is_well_formed_and_every_picture_is_xml(stepper):
    tree = Tree(stepper.html())
    assert tree.tags[0][0] == "figure"
    assert len(tree.ids) == len(set(tree.ids))
    for frame in stepper.frames:
        ET.fromstring(frame.svg)


@pytest.mark.parametrize("stepper", ALL, ids=TITLES)
def test_nothing_comes_from_elsewhere(stepper):
    page = stepper.html().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(src|href)=\"(?!#)|@import|url\((?!#)|https?:", page)


@pytest.mark.parametrize("stepper", ALL, ids=TITLES)
def test_the_text_form_has_every_word_of_every_frame(stepper):
    twin = plain([repr(stepper)])
    words = Tree(stepper.html()).words
    assert plain([stepper.title]) in twin
    for index, frame in enumerate(stepper.frames):
        assert plain([frame.text]) in twin
        assert plain([stepper.name(index)]) in twin
    if stepper.title != AWKWARD:  # what escaping made readable reads differently
        for frame in stepper.frames:
            assert plain([frame.text]).replace("\x00", "") in plain(words)
    assert stepper._repr_mimebundle_()["text/plain"] == repr(stepper)


@pytest.mark.parametrize("stepper", [MAP, LENS, GRID, small_stepper()], ids=TITLES[:4])
def test_each_picture_has_a_title_and_a_description(stepper):
    for frame in stepper.frames:
        root = ET.fromstring(frame.svg)
        assert root.get("role") == "img"
        assert [child.tag for child in root[:2]] == [f"{SVG}title", f"{SVG}desc"]
        assert root[0].text == stepper.title or stepper.title == "Title"
        assert root[1].text


def test_awkward_text_stays_text():
    page = ALL[-1].html()
    assert page.count("</script>") == 1
    assert page.count("<svg") == 2 + 4  # the frames and the controls' icons
    assert "&lt;|im_end|&gt;" in page
    assert "\x00" not in page
    page.encode("utf-8")


@given(st.text(max_size=20))
def test_any_token_can_be_drawn(token):
    frame = drawing(visible(token))
    texts = ET.fromstring(frame.svg).findall(f"{SVG}text")
    assert len(texts) == (2 if visible(token) else 1)
    Tree(Stepper([frame, frame], token).html())


def test_visible_tokens_show_their_spaces():
    assert visible(" Paris") == "·Paris"
    assert visible("a\n\tb\r") == "a⏎⇥b␍"
    assert visible("\xa0\u200b\x00") == "\\xa0\\u200b\\x00"
    assert visible("x" * 14) == "x" * 14
    assert visible("x" * 15) == "x" * 13 + "…"


def test_a_stepper_of_nothing_is_refused():
    with pytest.raises(ValueError, match="'empty' has no frames"):
        Stepper([], "empty")


def test_a_single_frame_needs_no_controls_and_no_number():
    page = Stepper([drawing()], "Alone").html()
    assert "<button" not in page
    assert "step 1" not in page
    assert repr(Stepper([drawing("X")], "Alone")) == "Alone\nX stands beside B."


def test_a_frame_displays_itself():
    bundle = Frame("<svg/>", "What it shows.", "layer 3")._repr_mimebundle_()
    assert bundle["text/plain"] == "layer 3: What it shows."
    assert "mie-output" in Tree(bundle["text/html"]).tags[0][1]["class"]


# -- ids -----------------------------------------------------------------------------------------


def test_steppers_on_one_page_share_no_id_even_when_they_are_equal():
    page = "".join(stepper.html() for stepper in [*ALL, small_stepper(), small_stepper(), GRID])
    ids = Tree(f"<main>{page}</main>").ids
    assert len(ids) == len(set(ids))
    references = re.findall(r'(?:url\(#|href="#)([^")]+)', page)
    assert references
    assert set(references) <= set(ids)


def test_drawings_that_differ_define_different_ids():
    one, two = (set(re.findall(r' id="([^"]+)"', drawing(label).svg)) for label in "AB")
    assert one
    assert two
    assert one.isdisjoint(two)


def test_scoping_renames_ids_with_their_references_and_nothing_else():
    svg = (
        '<svg><defs><g id="a"/></defs><use href="#a"/><use xlink:href="#a"/>'
        '<rect fill="url(#a)"/><text>id=&quot;a&quot; url(#a)</text></svg>'
    )
    assert scope_ids(svg, "p-") == (
        '<svg><defs><g id="p-a"/></defs><use href="#p-a"/><use xlink:href="#p-a"/>'
        '<rect fill="url(#p-a)"/><text>id=&quot;a&quot; url(#a)</text></svg>'
    )


def test_a_second_run_of_the_same_notebook_gives_the_same_page():
    program = (
        "from mie.viz import *; from mie.viz.svg import Canvas\n"
        "from mie.book.palette import look\n"
        "c = Canvas(90, 30, 'x'); c.cell((0, 0, 9, 9), look(3))\n"
        "s = Stepper([c.frame('y')] * 3, 'T')\n"
        "import sys; assert 'torch' not in sys.modules\n"
        "print(s.html() + s.html())"
    )
    runs = outputs_of(program)
    assert runs[0] == runs[1]
    assert len(set(re.findall(r'id="(mie-\w{8}(?:-2)?)"', runs[0]))) == 2


# -- the vocabulary ------------------------------------------------------------------------------


def test_patterns_tell_owners_apart_without_colour():
    drawn = set()
    for each in LOOKS:
        canvas = Canvas(50, 20, "one")
        canvas.cell((0, 0, 50, 20), each)
        svg = re.sub(r"mie-[0-9a-f]{8}|var\([^)]*\)|-(?:\w+)(?=[\")])", "", canvas.frame("x").svg)
        drawn.add(svg)
    assert len(drawn) == len(LOOKS)


def test_cells_of_one_owner_are_one_shape():
    canvas = Canvas(500, 20, "pool")
    canvas.cells([(10 * i, 0, 8, 8) for i in range(40)], look(3))
    svg = canvas.frame("forty blocks").svg
    shapes = [each for each in ET.fromstring(svg) if each.tag == f"{SVG}path"]
    assert len(shapes) == 1
    assert shapes[0].get("d").count("M") == 40
    assert len(svg) < 3000


def test_colours_follow_the_page():
    canvas = Canvas(100, 100, "all")
    for each in LOOKS:
        canvas.cell((0, 0, 9, 9), each, "x")
    canvas.arrow(0, 0, 50, 50)
    canvas.arrow(5, 5, 5, 5)
    canvas.brace(0, 50, 40, "brace")
    canvas.legend(0, 60, [(look(0), "meaning")])
    canvas.line([(0, 0), (1, 1)])
    canvas.area([(0, 0), (1, 1), (1, 0)], 0.5)
    root = ET.fromstring(canvas.frame("words").svg)
    for element in root.iter():
        for channel in ("fill", "stroke"):
            value = element.get(channel, "none")
            assert re.fullmatch(r"none|currentColor|url\(#.+\)|var\(--mie-\w+, #\w+\)", value)


# -- the three drawings --------------------------------------------------------------------------


def test_a_file_map_covers_the_file_without_holes():
    whole, first, *_ = MAP.frames
    assert "1,000,000 bytes" in whole.text
    assert "length (8 B)" in whole.text
    assert first.text == (
        "Bytes 0 to 8, 8 B: u64. The header has 40 bytes. It begins with 28 00 00 00 00 00 00 00."
    )
    with pytest.raises(ValueError, match="bytes 9 to 12, but the segment before it ends at 8"):
        file_map([Segment("a", 0, 8), Segment("b", 9, 12)], "hole")
    with pytest.raises(ValueError, match="bytes 0 to -1"):
        file_map([Segment("a", 0, -1)], "backwards")
    with pytest.raises(ValueError, match="at least one"):
        file_map([], "nothing")


def test_the_scale_of_a_file_map_is_true():
    frame = file_map([Segment("a", 0, 250), Segment("b", 250, 1000)], "scale").frames[0]
    paths = [each.get("d") for each in ET.fromstring(frame.svg) if each.tag == f"{SVG}path"]
    boxes = [re.fullmatch(r"M1 [\d.]+h18v([\d.]+)h-18z", path) for path in paths]
    heights = [float(box[1]) for box in boxes if box]
    assert len(heights) == 2
    assert heights[1] / heights[0] == pytest.approx(3, rel=1e-3)


def test_a_long_name_is_cut_in_the_picture_and_whole_in_the_words():
    frame = MAP.frames[3]
    name = "model.layers.0.self_attn.q_proj.weight" * 2
    texts = [each.text or "" for each in ET.fromstring(frame.svg).iter(f"{SVG}text")]
    assert name not in texts
    assert any(text.startswith("…") and name.endswith(text[1:]) for text in texts)
    assert MAP.name(3) == name


def test_the_lens_says_every_probability_and_where_the_answer_stands():
    first, last = LENS.frames
    assert LENS.name(0) == "layer 1"
    assert "“⏎” 50.0%" in first.text
    assert "“·Paris”, stands at <0.1%" in first.text
    assert "“·Paris” 90.0%" in last.text


def test_the_lens_draws_all_layers_on_one_scale():
    def bars(frame):
        paths = (each.get("d", "") for each in ET.fromstring(frame.svg).iter(f"{SVG}path"))
        found = (re.fullmatch(r"M134 [\d.]+h([\d.]+)v20h-[\d.]+z", path) for path in paths)
        return [float(match[1]) for match in found if match]

    assert bars(LENS.frames[0]) == pytest.approx([135, 67.5])
    assert bars(LENS.frames[1]) == pytest.approx([243, 13.5])


def brute_force(run, now):
    """Which positions the step reads, computes again and computes new, one position at a time."""
    seen = {p for step in run[:now] for p in range(step.first, step.end)}
    step = run[now]
    computed = set(range(step.first, step.end))
    return set(range(step.first)), computed & seen, computed - seen


@given(st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_the_grid_counts_what_a_run_did(prompt, steps, cached):
    ends = [prompt + i for i in range(steps)]
    starts = [0, *ends[:-1]] if cached else [0] * steps
    run = [Computed(first, end) for first, end in zip(starts, ends, strict=True)]
    grid = kv_grid(["t"] * ends[-1], {"run": run}, "grid")
    total = 0
    for now, frame in enumerate(grid.frames):
        read, again, new = brute_force(run, now)
        total += len(again) + len(new)
        assert re.search(rf"computes {len(again) + len(new)} position", frame.text)
        assert (f", {len(again)} of them again" in frame.text) == bool(again)
        assert (f", reads {len(read)} from the cache" in frame.text) == bool(read)
        assert f"; {total} computed so far." in frame.text
        rows = [brute_force(run, row) for row in range(now + 1)]
        for kind, fill in enumerate(("-dots-", "-diagonal-", 'fill-opacity="1"')):
            assert cells(frame, fill) == sum(len(row[kind]) for row in rows)


def cells(frame: Frame, fill: str) -> int:
    """How many cells of the grid are filled in this way; the legend's have another height."""
    shapes = re.findall(
        r'<path d="((?:M[\d.]+ [\d.]+h[\d.]+v18h-[\d.]+z)+)" (fill[^/]+)', frame.svg
    )
    return sum(path.count("z") for path, style in shapes if fill in style)


def test_the_grid_refuses_a_trace_that_does_not_fit():
    with pytest.raises(ValueError, match=r"different numbers of steps: \{'a': 1, 'b': 2\}"):
        kv_grid(["t"], {"a": [Computed(0, 1)], "b": [Computed(0, 1)] * 2}, "uneven")
    with pytest.raises(ValueError, match="in a sequence of 1 positions"):
        kv_grid(["t"], {"a": [Computed(0, 2)]}, "too long")


# -- figures and knobs ---------------------------------------------------------------------------


def plot(points: int) -> Frame:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 2))
    figure.subplots().plot(range(points))
    return figure_frame(figure, f"A line of {points} points.")


def test_a_figure_becomes_a_frame_that_keeps_to_itself():
    one, two = plot(5), plot(5)
    assert one == two
    assert "<style" not in one.svg  # matplotlib's says `*`, which is the whole page
    root = ET.fromstring(one.svg)
    assert root.get("role") == "img"
    assert root[0].text == "A line of 5 points."
    assert len(Tree(Stepper([one, two], "Plots").html()).ids) > 2


def test_knobs_become_steps_on_a_published_page(monkeypatch):
    monkeypatch.setattr(KNOBS, "_kernel_runs", lambda: True)
    monkeypatch.setenv("MIE_BOOK", "1")
    calls = []

    def draw(layer, head):
        calls.append((layer, head))
        return drawing(f"{layer}{head}")

    stepper = interactive(draw, "Heads", layer=[0, 1], head=range(3))
    assert isinstance(stepper, Stepper)
    assert calls == [(a, b) for a in range(2) for b in range(3)]
    assert stepper.name(4) == "layer 1, head 1"
    assert "layer 1, head 1: 11 stands beside B." in repr(stepper)


def test_knobs_turn_live_where_a_kernel_runs(monkeypatch):
    monkeypatch.setattr(KNOBS, "_kernel_runs", lambda: True)
    monkeypatch.delenv("MIE_BOOK", raising=False)
    assert not isinstance(interactive(lambda n: drawing(), "Knob", n=[1, 2]), Stepper)
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    widget = with_widgets(lambda n: Frame("<svg/>", f"n is {n}"), {"n": [5, 7]})
    widget.children[0].value = 7
    widget.update()
    assert shown[-1] == Frame("<svg/>", "n is 7")


def test_what_cannot_be_published_is_refused():
    with pytest.raises(ValueError, match="20 a × 30 b is 600 pictures"):
        with_steps(lambda a, b: drawing(), "many", {"a": list(range(20)), "b": list(range(30))})
    with pytest.raises(TypeError, match="draw returned str"):
        with_steps(lambda a: "picture", "no frame", {"a": [1]})


# -- in a browser --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator:
    api = pytest.importorskip("playwright.sync_api", reason="needs `pip install playwright`")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs a browser: `apt-get install chromium`")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_page(browser, body: str, **options):
    page = browser.new_page(**options)
    page.set_default_timeout(5000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text))
    page.on("request", lambda request: problems.append(request.url))
    page.set_content(f"<!doctype html><html><body>{body}</body></html>")
    page.problems = problems
    return page


def shown(page, stepper: int = 0) -> list[int]:
    """Which frames of a stepper can be seen."""
    return page.evaluate(
        """n => [...document.querySelectorAll('.mie-stepper')[n].querySelectorAll('.mie-frame')]
            .flatMap((f, i) => f.querySelector('.mie-picture').checkVisibility(
                {visibilityProperty: true}) ? [i] : [])""",
        stepper,
    )


def test_keys_buttons_and_slider_all_step(browser):
    page = open_page(browser, small_stepper().html())
    assert shown(page) == [0]
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "mie-output mie-stepper"
    for key, frame in [
        ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 3), ("ArrowRight", 3),
        ("Home", 0), ("ArrowLeft", 0), ("a", 0), ("Control+ArrowRight", 0),
    ]:  # fmt: skip
        page.keyboard.press(key)
        assert shown(page) == [frame], key
    page.get_by_role("button", name="Next step").click()
    assert shown(page) == [1]
    page.get_by_role("button", name="Previous step").click()
    assert shown(page) == [0]
    assert page.get_by_role("button", name="Previous step").is_disabled()
    slider = page.get_by_role("slider", name="step")
    slider.focus()
    page.keyboard.press("ArrowRight")  # once, not once by the slider and once by the figure
    assert shown(page) == [1]
    slider.fill("3")
    assert shown(page) == [3]
    assert page.get_by_role("button", name="Next step").is_disabled()
    assert slider.get_attribute("aria-valuetext") == "step 4, 4 of 4"
    assert page.problems == []


def test_the_text_is_announced_and_the_hidden_frames_are_not_read(browser):
    page = open_page(browser, GRID.html())
    live = page.locator("[aria-live=polite]")
    assert live.text_content() == ""  # a page that opens does not speak
    page.locator("figure").press("ArrowRight")
    said = live.text_content()
    assert said.startswith("step 2 Without: computes 4 positions, 3 of them again")
    assert said.endswith("With: computes 1 position, reads 3 from the cache; 4 computed so far.")
    hidden = page.evaluate(
        "[...document.querySelectorAll('.mie-frame')].map(f => f.getAttribute('aria-hidden'))"
    )
    assert hidden == ["true", "false", "true"]


def test_two_steppers_do_not_know_of_each_other(browser):
    same = small_stepper().html() + GRID.html() + small_stepper().html()
    page = open_page(browser, same)
    page.locator("figure").nth(1).press("End")
    page.locator("figure").nth(2).press("ArrowRight")
    assert [shown(page, i) for i in range(3)] == [[0], [2], [1]]
    # A cell that runs again brings its script again: the others keep their place.
    page.evaluate(
        """() => { const s = document.createElement('script');
            s.textContent = document.querySelector('.mie-stepper script').textContent;
            document.body.append(s); }"""
    )
    assert [shown(page, i) for i in range(3)] == [[0], [2], [1]]
    page.locator("figure").nth(2).press("ArrowRight")
    assert shown(page, 2) == [2]
    assert page.problems == []


def test_keys_of_the_stepper_do_not_turn_the_books_page(browser):
    page = open_page(browser, small_stepper().html())
    page.evaluate("document.addEventListener('keydown', e => { window.turned = e.key })")
    page.locator("figure").press("ArrowRight")
    assert page.evaluate("window.turned") is None
    page.locator("figure").press("x")
    assert page.evaluate("window.turned") == "x"


def test_play_runs_to_the_end_and_rests_for_who_wants_no_motion(browser):
    page = open_page(browser, small_stepper().html())
    page.clock.install()
    page.set_content(small_stepper("played").html())
    page.get_by_role("button", name="Play").click()
    assert page.get_by_role("button", name="Pause").get_attribute("aria-pressed") == "true"
    page.clock.run_for(950)
    assert shown(page) == [1]
    page.clock.run_for(5000)
    assert shown(page) == [3]
    page.get_by_role("button", name="Play").click()  # from the end it starts over
    assert shown(page) == [0]
    page.locator("figure").press("ArrowRight")  # a key takes the reins
    page.clock.run_for(5000)
    assert shown(page) == [1]
    calm = open_page(browser, small_stepper().html(), reduced_motion="reduce")
    assert calm.get_by_role("button", name="Play").count() == 0


def test_without_javascript_every_text_can_be_read(browser):
    page = open_page(browser, small_stepper().html(), java_script_enabled=False)
    words = page.locator(".mie-words")
    assert [words.nth(i).is_visible() for i in range(4)] == [True] * 4
    pictures = page.locator(".mie-picture")
    assert [pictures.nth(i).is_visible() for i in range(4)] == [True, False, False, True]
    assert not page.locator("button").first.is_visible()


def test_paper_shows_the_first_and_last_picture_and_all_texts(browser):
    page = open_page(browser, small_stepper().html())
    page.locator("figure").press("ArrowRight")
    page.emulate_media(media="print")
    words, pictures = page.locator(".mie-words"), page.locator(".mie-picture")
    assert [words.nth(i).is_visible() for i in range(4)] == [True] * 4
    assert [pictures.nth(i).is_visible() for i in range(4)] == [True, False, False, True]


@pytest.mark.parametrize("width", [390, 1100])
@pytest.mark.parametrize("stepper", [MAP, LENS, GRID], ids=TITLES[:3])
def test_pictures_stay_inside_and_readable_at_every_width(browser, stepper, width):
    page = open_page(browser, stepper.html(), viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    sizes = page.evaluate(
        """() => [...document.querySelectorAll('[data-current] .mie-picture text')].map(t =>
            parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a)"""
    )
    assert len(sizes) > 5
    unturned = [size for size in sizes if size > 0]
    assert max(unturned) < 20
    overflow = page.evaluate(
        """() => { const p = document.querySelector('[data-current] .mie-picture');
            return p.scrollWidth - p.clientWidth }"""
    )
    assert overflow <= 1


def test_colours_follow_the_theme(browser):
    page = open_page(browser, small_stepper().html())
    colour = (
        "getComputedStyle(document.querySelector('.mie-frame path[stroke-width=\"1\"]')).stroke"
    )
    light = page.evaluate(colour)
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    assert page.evaluate(colour) != light
