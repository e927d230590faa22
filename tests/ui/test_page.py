"""The page in a real browser: the whole way, cancel, a wrong adapter, another page, the keyboard, a narrow screen."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_merge import merge
from lora_merge.ui.runs import Run
from tests.kit.browser import Window, wait, window
from tests.kit.forms import TINY, A
from tests.kit.page_server import Page, serving

pytestmark = pytest.mark.release

READY = "$('#plan').dataset.state === 'ready' && $('#plan')"
FIRST = "$('#runs > li')?.dataset.state"
OUTPUT = "#fields [name=output]"


@pytest.fixture
def page(comfy: Path) -> Iterator[Page]:
    """The page for a folder of ComfyUI."""
    with serving(comfy) as it:
        yield it


def choose(w: Window, base: str = "tiny", adapter: str = "a {x}") -> None:
    """Choose a base and an adapter."""
    w.choose("#fields .field select", base)
    w.choose("fieldset select", adapter)


def test_from_an_empty_page_to_a_verified_file(page: Page, comfy: Path, tmp_path: Path) -> None:
    with window(page.address) as w:
        w.open()
        assert w.js("return $('#run').disabled && $('#plan').dataset.state") == "empty"
        choose(w)
        w.until(READY)
        assert w.js("return $('fieldset .remark').innerText") == "fits: 20 of 20 modules match"
        assert "LoRA, rank 4" in w.js("return $('#files').innerText")
        summary = w.js("return $('#summary').textContent")
        assert all(word in summary for word in ("Writes ", " KiB; memory", "time: "))
        assert "trigger words: ohwx <b>" in w.js("return $('#files').innerText"), "names are text, never HTML"
        slide = (
            "const r = [...document.querySelectorAll('fieldset .slider')].find((s) => s.textContent === arguments[0])"
        )
        set_value = ".querySelector('input[type=range]'); r.value = arguments[1]; r.dispatchEvent(new Event('input'))"
        w.until("[...document.querySelectorAll('fieldset .slider')].some((s) => s.textContent === 'te')")
        for name, value in (("strength", 0.8), ("te", 0.5)):
            w.js(slide + set_value, name, value)
        w.js("$('#copy-command').click()")
        w.until("$('#plan .copied pre')?.textContent.includes('--strength=0.8 --strength-for=1:te=0.5')")
        w.until(READY)
        w.js("$('#run').click()")
        assert w.until(f"['done', 'failed'].includes({FIRST}) && {FIRST}") == "done"
        assert "verified" in w.js("return $('#runs').innerText")
        name = w.js("return $(arguments[0]).value", OUTPUT)
        assert w.errors() == []
    expected = tmp_path / "expected.safetensors"
    from lora_merge import Adapter

    merge(comfy / "models" / TINY, [Adapter(comfy / "models" / A, 0.8, (("te", 0.5),))], expected)
    assert (comfy / f"{name}.safetensors").read_bytes() == expected.read_bytes()


def test_finished_file_is_verified_and_its_adapter_taken_out(page: Page, comfy: Path) -> None:
    product = comfy / "models/checkpoints/product.safetensors"
    merge(comfy / "models" / TINY, (comfy / "models" / A, 0.8), product)
    with window(page.address) as w:
        w.open()
        for command in ("verify", "unmerge"):
            w.js("$(`[data-command=${arguments[0]}]`).click()", command)
            assert w.js("return $('#run').disabled && !$('#plan .error')")
            w.choose("#fields .field select", "product")
            w.until(READY)
            w.js("$('#run').click()")
            w.until(f"$('#runs h3')?.textContent.startsWith(arguments[0]) && {FIRST} === 'done'", command.title())
        assert w.errors() == []
    assert (comfy / "models/checkpoints/product-without.safetensors").exists()


def test_form_asks_for_what_is_missing_and_offers_only_what_it_takes(page: Page) -> None:
    """A file that a form has no use for is put aside, and comes back with the next form that takes it."""
    still = "$('#summary').textContent"
    with window(page.address, 1060, 700) as w:
        w.open()
        assert w.js(f"return {still}") == "Still to choose: Base."
        choose(w)
        w.until(READY)
        for command, missing in (("extract", "Tuned checkpoint"), ("resize", "Rank")):
            w.js("$(`[data-command=${arguments[0]}]`).click()", command)
            w.until(f"{still} === arguments[0]", f"Still to choose: {missing}.")
            assert w.js("return $('#run').disabled && !$('#plan .error')")
        assert "a {x}" in w.js("return $('fieldset select').selectedOptions[0].text")
        w.js("const r = $('[name=rank]'); r.value = 2; r.dispatchEvent(new Event('input'))")
        w.until(READY)
        w.js("$('#run').click()")
        w.until("$('#runs > li') && $('#runs > li').getBoundingClientRect().top < innerHeight")
        w.js("$('[data-command=average]').click()")
        assert w.js("return $('[name=rank]').value") == "", "options are those of one form"
        assert w.errors() == []


def test_cancel_leaves_nothing(page: Page, comfy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, work, step = threading.Event(), Run._work, Run.step

    def waiting(run: Run) -> None:  # in the thread of the run, which does not wait for who takes its steps
        run.cancelled.wait(30)
        work(run)

    def taken(run: Run, one: Any) -> None:
        ended.set()
        step(run, one)

    monkeypatch.setattr(Run, "_work", waiting)
    monkeypatch.setattr(Run, "step", taken)
    before = sorted(comfy.rglob("*"))
    with window(page.address) as w:
        w.open()
        choose(w)
        w.until(READY)
        w.js("$('#run').click()")
        w.until(f"{FIRST} === 'running'")
        w.js("$('#runs button').click()")
        w.until(f"{FIRST} === 'cancelled'")
        assert ended.is_set() and w.js("return $('#runs button').hidden")
    assert sorted(comfy.rglob("*")) == before


def test_error_is_shown_once_at_what_is_wrong(page: Page, comfy: Path) -> None:
    """And what is wrong cannot run."""
    (comfy / "models/loras/damaged.safetensors").write_bytes(b"<html>")
    wrong = (
        ("$('#fields .field select')", "sd3", "no module of the adapter", "fieldset .remark"),
        ("$('fieldset select')", "damaged", "but a web page", "fieldset .remark"),
        ("$('[name=seed]')", "x", "is not a whole number", ".remark[data-place=seed]"),
        (f"$('{OUTPUT}')", "../x", "outside the output folder", ".remark[data-place=output]"),
    )
    with window(page.address) as w:
        for field, word, what, place in wrong:
            w.open()
            choose(w)
            w.until(READY)
            w.js(
                f"const e = {field}; e.value = e.options ? [...e.options].find((o) => o.text.includes(arguments[0])).value : arguments[0];"
                "for (const kind of ['input', 'change']) e.dispatchEvent(new Event(kind, { bubbles: true }))",
                word,
            )
            w.until("$('#plan').dataset.state === 'error' && $('.error')")
            assert what in w.js("return $(arguments[0]).innerText", place)
            assert w.js("return $(arguments[0]).previousElementSibling.ariaInvalid", place) == "true"
            assert w.js("return document.querySelectorAll('.error').length") == 1
            assert w.js("return document.body.innerText.split(arguments[0]).length", what) == 2, "it is said once"
            assert w.js("return $('#run').disabled && $('.error .fix').innerText && $('.error').checkVisibility()")
        assert w.errors() == []


class _Evil(http.server.BaseHTTPRequestHandler):
    """A page of another origin."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>another page</title><form method=post></form>")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_page_of_another_origin_cannot_start_a_merge(page: Page, comfy: Path) -> None:
    """Not even with the token: by fetch of every kind, and by a form."""
    with http.server.HTTPServer(("127.0.0.1", 0), _Evil) as evil:
        threading.Thread(target=evil.serve_forever, daemon=True).start()
        try:
            with window(page.address) as w:
                w.driver.get(f"http://localhost:{evil.server_port}/")
                send = """const [url, body, done] = arguments;
                const kinds = [{}, {"Content-Type": "application/json"}, {"Content-Type": "text/plain"}];
                Promise.all(kinds.flatMap((headers) => ["cors", "no-cors"].map((mode) =>
                  fetch(url, {method: "POST", mode, headers, body}).then((a) => `${a.type} ${a.status}`, () => "refused")))).then(done);"""
                models = comfy / "models"
                job = {"command": "merge", "base": str(models / TINY), "output": "evil"}
                body = json.dumps({**job, "adapters": [{"path": str(models / "loras/b.safetensors")}]})
                answers = w.driver.execute_async_script(send, f"{page.address}api/run", body)
                assert set(answers) <= {"refused", "opaque 0"} and answers.count("refused") >= 3
                w.js(
                    "const f = $('form'); f.action = arguments[0]; f.enctype = 'text/plain'; f.submit()",
                    f"{page.address}api/run",
                )
                w.until("document.body.innerText.includes('another page may not')")
                w.driver.get(f"http://localhost:{evil.server_port}/")
                w.js(
                    "const i = document.createElement('iframe'); i.src = arguments[0]; document.body.append(i)",
                    page.address,
                )
                wait(lambda: any("frame-ancestors" in line for line in w.errors()), "the refusal")
        finally:
            evil.shutdown()
    assert page.call("queue")["runs"] == []
    assert not (comfy / "evil.safetensors").exists()


def test_keyboard_alone_leads_to_a_file(page: Page, comfy: Path) -> None:
    from selenium.webdriver import Keys

    def tab_to(w: Window, condition: str) -> None:
        for _ in range(60):
            w.press(Keys.TAB)
            if w.js(f"const e = document.activeElement; return {condition}"):
                style = w.js("const s = getComputedStyle(document.activeElement); return s.outlineStyle")
                assert style != "none", "the focus is seen"
                return
        raise AssertionError(condition)

    with window(page.address) as w:
        w.open()
        w.js("document.body.focus()")
        tab_to(w, "e.tagName === 'SELECT'")
        w.press("tin")
        w.until("$('#fields select').selectedOptions[0].text.includes('tiny')")
        tab_to(w, "e.getAttribute('aria-label') === 'Adapter 1'")
        w.press("b.s")
        w.until(READY)
        tab_to(w, "e.type === 'range' && e.getAttribute('aria-label').startsWith('strength')")
        w.press(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
        assert w.js("return document.activeElement.value") == "0.9"
        tab_to(w, "e.name === 'output'")
        w.press(Keys.END, "-keys")
        w.until(f"{READY} && $('#plan').innerText.includes('-keys')")
        tab_to(w, "e.id === 'run'")
        w.press(Keys.ENTER)
        assert w.until(f"['done', 'failed'].includes({FIRST}) && {FIRST}") == "done"
    assert [*(comfy / "models/checkpoints").glob("*-keys.safetensors")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screen_has_no_sideways_scroll(scheme: str, page: Page) -> None:
    with window(page.address, 390, 844, dark=scheme == "dark") as w:
        w.open()
        for command in w.js("return [...document.querySelectorAll('#commands button')].map((b) => b.dataset.command)"):
            w.js(
                "$(`[data-command=${arguments[0]}]`).click(); for (const d of document.querySelectorAll('details')) d.open = true",
                command,
            )
            wide = w.js(
                "return [...document.querySelectorAll('body *:not(.unseen):not(.skip)')].filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('pre')).map((e) => e.outerHTML.slice(0, 99))"
            )
            assert wide == [] and w.js("return document.documentElement.scrollWidth <= innerWidth"), command
        choose_first = "$('[data-command=merge]').click()"
        w.js(choose_first)
        assert w.errors() == []
        choose(w)
        w.until(READY)
        w.until("$('fieldset details .blocks')")
        w.js("for (const d of document.querySelectorAll('details')) d.open = true")
        assert w.js("return document.documentElement.scrollWidth <= innerWidth")


def test_text_has_contrast(page: Page) -> None:
    """WCAG: 4.5 to 1 for text, in light and dark."""
    ratio = """
    const rgb = (c) => c.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    const light = (c) => { const [r, g, b] = rgb(c); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const back = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!c.startsWith("rgba(0, 0, 0, 0")) return c; } return "rgb(255, 255, 255)"; };
    const low = [];
    for (const e of document.querySelectorAll("button:not(:disabled), label, p, h1, h2, h3, summary, select, dd, dt, legend, .name")) {
      if (!e.offsetParent || !e.textContent.trim()) continue;
      const [a, b] = [light(getComputedStyle(e).color), light(back(e))].sort((x, y) => y - x);
      const r = (a + 0.05) / (b + 0.05);
      if (r < 4.5) low.push(`${e.tagName}.${e.className} ${e.textContent.slice(0, 30)} ${r.toFixed(2)}`);
    }
    return low;"""
    for dark in (False, True):
        with window(page.address, dark=dark) as w:
            w.open()
            choose(w, base="sd3")
            w.until("$('#plan').dataset.state === 'error'")
            assert w.js(ratio) == []
            choose(w)
            w.until(READY)
            assert w.js(ratio) == []


def test_presets_and_block_sliders_become_block_weights(page: Page) -> None:
    def copied(text: str) -> None:
        w.js("$('#plan .copied')?.remove(); $('#copy-command').click()")
        w.until("$('#plan .copied pre')?.textContent.includes(arguments[0])", text)

    with window(page.address) as w:
        w.open()
        choose(w)
        w.until(f"{READY} && $('fieldset details .blocks')")
        w.js("$('fieldset details').open = true")
        w.choose("fieldset details select", "ALL")
        copied("--strength-for=1:lbw=ALL")
        w.js("const r = $('.blocks input'); r.value = 0.5; r.dispatchEvent(new Event('input'))")
        copied("--strength-for=1:lbw=0.5,1,1,1")
        w.choose("fieldset details select", "none")
        w.js(
            "const o = $('fieldset [placeholder^=te]'); o.value = 're:attn1=0.25, te=0'; o.dispatchEvent(new Event('input'))"
        )
        copied("--strength-for=1:re:attn1=0.25 --strength-for=1:te=0.0")
        w.until(READY)
        assert w.errors() == []


def test_dropped_files_are_chosen(page: Page, comfy: Path, tmp_path: Path) -> None:
    """One that the library has, and one that it has not."""
    new = tmp_path / "new.safetensors"
    new.write_bytes((comfy / "models/loras/b.safetensors").read_bytes())
    with window(page.address) as w:
        w.open()
        drop = """const [name, bytes] = arguments; const data = new DataTransfer();
        data.items.add(new File([Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0))], name));
        document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }))"""
        tiny = comfy / "models" / TINY
        w.js(drop, tiny.name, base64.b64encode(tiny.read_bytes()).decode())
        w.until("$('#fields .field select').value === arguments[0]", str(tiny))
        w.driver.find_element("id", "file").send_keys(str(new))
        w.until("$('fieldset select').value === arguments[0]", str(comfy / "dropped/new.safetensors"))
        w.until(READY)
        assert (comfy / "dropped/new.safetensors").read_bytes() == new.read_bytes()
        w.js(drop, "note.txt", "")
        w.until("$('#dropped .fix')?.textContent.includes('.safetensors')")
        assert [line for line in w.errors() if " 422 " not in line] == []
