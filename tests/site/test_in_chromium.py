"""The site that `make docs` has built, in a headless Chromium: `make test-docs`."""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="only `make test-docs` has a browser")

SITE = Path(__file__).resolve().parent.parent.parent / "build" / "site"
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
PAGES = sorted(str(page.parent.relative_to(SITE)) for page in SITE.rglob("index.html"))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium")
    assert chromium, "make test-docs installs it"
    with playwright.sync_playwright() as driver:
        entry = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield entry
        entry.close()


def test_there_is_a_site() -> None:
    assert len(PAGES) > 40, "run make docs"


@pytest.mark.parametrize("size", SIZES)
def test_every_page_fits_and_fetches_nothing_from_elsewhere(browser: Any, address: str, size: str) -> None:
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height})
    wrong: list[str] = []
    page.on("console", lambda value: wrong.append(f"{page.url}: {value.text}") if value.type == "error" else None)
    page.on("request", lambda item: None if is_ours(item.url, address) else wrong.append(f"{page.url} asks {item.url}"))
    for name in PAGES:
        page.goto(f"{address}{name}/", wait_until="load")
        if page.evaluate("document.documentElement.scrollWidth") > width:
            wrong.append(f"{name} is wider than {width} pixels")
        broken = "[...document.images].filter(one => !one.complete || !one.naturalWidth).map(one => one.src)"
        page.wait_for_load_state("networkidle")
        wrong += [f"{name} shows no {image}" for image in page.evaluate(broken)]
    page.close()
    assert wrong == []


def is_ours(url: str, address: str) -> bool:
    return url.startswith((address, "data:", "blob:"))


def test_links_within_the_site_lead_to_places_that_exist(browser: Any, address: str) -> None:
    page = browser.new_page()
    ids: dict[str, set[str]] = {}
    links: list[tuple[str, str, str]] = []
    for name in PAGES:
        page.goto(f"{address}{name}/", wait_until="domcontentloaded")
        ids[page.url] = set(page.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)"))
        actual = page.evaluate("[...document.querySelectorAll('article a[href]')].map(one => one.href)")
        links += [(name, *href.partition("#")[::2]) for href in actual if href.startswith(address)]
    page.close()
    known = {url.removesuffix("./"): names for url, names in ids.items()}
    lost = [f"{name}: {url}#{place}" for name, url, place in links if not leads(url, place, known, address)]
    assert lost == []
    assert len(links) > 200


def leads(url: str, place: str, known: dict[str, set[str]], address: str) -> bool:
    if url in known:
        return not place or place in known[url]
    return (SITE / url.removeprefix(address)).is_file()


def test_the_start_page_has_the_figure_and_the_search_finds_a_class(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(address)
    figure = page.locator("article img").first
    assert figure.get_attribute("src") == "flow.svg"
    assert figure.bounding_box()["y"] < 900, "it is seen without scrolling"
    page.locator("input.md-search__input").fill("StateChangedError")
    page.locator(".md-search-result__item").first.wait_for()
    titles = page.locator(".md-search-result__item").all_inner_texts()
    assert any("StateChangedError" in title for title in titles)
    page.close()


def test_a_page_of_the_reference_shows_parameters_as_a_table(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(f"{address}reference/checkpointer/")
    cells = page.locator("table td:first-child").all_inner_texts()
    assert {"path", "keep", "budget_bytes", "on_error", "saves_in_flight"} <= set(cells)
    page.close()
