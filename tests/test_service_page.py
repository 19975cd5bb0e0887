"""The service's page in headless Chromium (Debian: chromium and chromium-driver)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rudnn.service import Projections

pytest.importorskip("fastapi_offline")
pytest.importorskip("selenium")
from selenium.webdriver import Chrome, ChromeOptions  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402
from service_client import Server, expected, running  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver: Debian's chromium-driver"
)
WEIGHTS = Projections.seeded(4, 0)
# No sandbox: tests may run as root. The rest keeps the browser from looking for other hosts.
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1200,1400",
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as made:
        yield made


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = Chrome(options, Service(DRIVER))
    yield browser
    browser.quit()


@pytest.fixture
def page(server: Server, chromium: Chrome) -> Iterator[Page]:
    made = Page(chromium, server)
    made.open()
    yield made
    assert not [e for e in chromium.get_log("browser") if "422" not in e["message"]]


class Page:
    """The page as a user handles it."""

    def __init__(self, browser: Chrome, server: Server) -> None:
        self.browser, self.server = browser, server

    def open(self) -> None:
        self.browser.get(self.server.url)
        self.wait(lambda: self.one("#rows").get_attribute("value"))

    def wait(self, condition: Any) -> Any:
        return WebDriverWait(self.browser, 30).until(lambda _: condition())

    def one(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def type(self, text: str) -> None:
        self.one("#rows").clear()
        self.one("#rows").send_keys(text)

    def press(self, button: str) -> None:
        """Press a button and wait until the page is done."""
        self.one(f"#{button}").click()
        self.wait(lambda: self.one(f"#{button}").is_enabled())

    def output(self, kernel: str) -> np.ndarray:
        lines = self.all(f"[data-kernel={kernel}] table.output tr")
        cells = [[float(c.text) for c in line.find_elements(By.TAG_NAME, "td")] for line in lines]
        return np.array(cells)

    def shades(self, kernel: str) -> np.ndarray:
        """How dark each of the map's pixels is, 0 to 1 [n, n]."""
        size, data = self.browser.execute_script(
            """const c = document.querySelector(`[data-kernel=${arguments[0]}] canvas`);
            const image = c.getContext("2d").getImageData(0, 0, c.width, c.height);
            return [c.width, Array.from(image.data)];""", kernel)  # fmt: skip
        red = np.array(data).reshape(size, size, 4)[..., 0]
        return (247 - red) / (247 - 8)


def weights_of(rows: np.ndarray) -> np.ndarray:
    scores = (rows @ WEIGHTS.query) @ (rows @ WEIGHTS.key).T / 2
    e = np.exp(scores)
    return e / e.sum(1, keepdims=True)


def test_a_pasted_row_is_processed(page: Page) -> None:
    page.type("[0.5,0.1,0.4,0.8]")
    page.press("process")
    want = expected(np.array([[0.5, 0.1, 0.4, 0.8]]), WEIGHTS)
    np.testing.assert_allclose(page.output("flash"), want, atol=1e-5)
    link = page.one("[data-kernel=flash] .stored a")
    stored = page.server.ask("GET", link.get_attribute("href").removeprefix(page.server.url))
    np.testing.assert_allclose([stored.json["output"]], want, atol=1e-5)
    np.testing.assert_allclose(page.shades("flash"), [[1]], atol=0.01)


def test_kernels_are_compared_side_by_side(page: Page) -> None:
    rows = np.random.default_rng(0).uniform(-3, 3, (9, 4)).round(2)
    page.type("\n".join(", ".join(map(str, row)) for row in rows))
    page.press("compare")
    panels = page.all("#results section")
    assert [p.get_attribute("data-kernel") for p in panels] == ["dense", "flash"]
    left, right = (p.rect for p in panels)
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
    for kernel in ("dense", "flash"):
        np.testing.assert_allclose(page.output(kernel), expected(rows, WEIGHTS), atol=1e-4)
        np.testing.assert_allclose(page.shades(kernel), weights_of(rows), rtol=0, atol=0.005)
    told = page.one("#difference").text
    assert told.startswith("Greatest difference between dense and flash: ")
    assert float(told.rsplit(" ", 1)[1]) <= 2e-6


def test_the_map_tells_a_weight_under_the_pointer(page: Page) -> None:
    rows = np.random.default_rng(1).uniform(-3, 3, (4, 4)).round(2)
    page.type("\n".join(" ".join(map(str, row)) for row in rows))
    page.press("process")
    canvas = page.one("[data-kernel=flash] canvas")
    step = canvas.rect["width"] / 4
    ActionChains(page.browser).move_to_element_with_offset(canvas, step / 2, -step / 2).perform()
    told = page.wait(lambda: page.one("[data-kernel=flash] .cell").text)
    assert told == f"row 1 takes {weights_of(rows)[1, 2]:.4f} of row 2"


def test_the_kernel_chosen_is_the_one_used(page: Page) -> None:
    kernel = Select(page.one("#kernel"))
    assert [o.text for o in kernel.options] == ["dense", "flash"]
    assert kernel.first_selected_option.text == "flash"
    kernel.select_by_visible_text("dense")
    page.press("process")
    assert len(page.all("[data-kernel=dense]")) == 1 and not page.all("[data-kernel=flash]")
    id = page.one(".stored a").text.removeprefix("stored as ")
    assert page.server.ask("GET", f"/retrieve/{id}").json["kernel"] == "dense"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1 2 3", "needs 4 numbers in a row, got 3 in row 0"),
        ("1 2 3 4\n1 2 x 4", 'needs a number, got "x" in row 1'),
        ("[[1,2,3,4],[true,2,3,4]]", "needs numbers only, got a boolean in row 1, column 0"),
    ],
)
def test_what_cannot_be_processed_is_told(page: Page, text: str, told: str) -> None:
    page.type(text)
    page.press("process")
    assert page.one("#error").text == told and not page.all("#results section")
    page.type("1 2 3 4")
    page.press("process")
    assert page.one("#error").text == "" and len(page.all("#results section")) == 1


def test_many_rows_are_shown_without_a_map(page: Page) -> None:
    page.browser.execute_script("document.querySelector('#rows').value = '1 2 3 4\\n'.repeat(300)")
    page.press("process")
    assert page.output("flash").shape == (300, 4)
    assert page.one("[data-kernel=flash] .cell").text == "too many rows for a map"


def test_the_page_and_the_documentation_ask_no_other_host(page: Page) -> None:
    for path in ("/", "/docs"):
        page.browser.get(page.server.url + path)
        page.wait(lambda: page.all("#rows, .opblock-post"))
        names = page.browser.execute_script(
            "return performance.getEntriesByType('resource').map((e) => e.name)"
        )
        assert names and all(n.startswith((page.server.url, "data:", "blob:")) for n in names)


def test_a_narrow_window_needs_no_scrolling_sideways(page: Page) -> None:
    page.browser.set_window_size(500, 900)
    try:
        page.press("compare")
        wide, seen = page.browser.execute_script(
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert wide <= seen
    finally:
        page.browser.set_window_size(1200, 1400)
