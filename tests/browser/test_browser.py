"""What the tests of the pages stand on."""

from ..chromium import open_page, take_screenshots

PAGE = """<style>@media (prefers-color-scheme: dark) { body { background: black } }</style><h1>Aerie</h1>"""


def test_a_page_is_kept_in_both_themes(page, tmp_path, monkeypatch):
    monkeypatch.setenv("AERIE_TEST_ARTEFACTS", str(tmp_path))
    page.set_content(PAGE)
    files = take_screenshots(page, "a_page")
    assert sorted(path.name for path in (tmp_path / "screenshots").iterdir()) == ["a_page-dark.png", "a_page-light.png"]
    assert files["light"].read_bytes() != files["dark"].read_bytes()


def test_no_test_sees_what_another_left_in_the_browser(browser):
    address = "http://aerie.invalid/"
    for _ in range(2):
        with open_page(browser) as page:
            page.route(address, lambda route: route.fulfill(body=PAGE, content_type="text/html"))
            page.goto(address)
            assert page.evaluate("localStorage.getItem('theme')") is None
            page.evaluate("localStorage.setItem('theme', 'dark')")
