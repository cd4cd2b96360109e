"""The report as a page: complete, escaped, self-contained; and in a real browser, where one is installed."""

import json
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from reporting.reports import made
from sparta.reporting import page

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Tags(HTMLParser):
    """Counts tags and checks that all are closed."""

    VOID = ("meta", "link", "br")

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.links = [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def tags_of(text):
    found = Tags()
    found.feed(text)
    assert found.open == []
    return found


def everything():
    curve = [{"latency_ms": 1.0, "loss": 0.5}, {"latency_ms": 2.0, "loss": 0.2, "chosen": 1}]
    history = [{"step": n, "loss": 1 / (n + 1), "sparsity": n / 10} for n in range(10)]
    roof = {"flops_per_second": 1e11, "bytes_per_second": 2e10}
    return page(made(layers=7, notes=("one note",)).to_dict(), title="a model", curve=curve, history=history, roof=roof)


def test_the_page_is_whole_and_needs_no_network():
    text = everything()
    found = tags_of(text)
    assert found.links == ["data:,"]
    assert found.seen.count("tr") > 7
    for heading in (
        "Layers, the slowest first",
        "Speed against loss",
        "Training",
        "What is left",
        "How it was measured",
    ):
        assert heading in text
    assert "one note" in text
    assert "a processor" in text


def test_what_is_not_known_is_left_out():
    text = page(made().to_dict())
    for heading in ("Speed against loss", "Training", "roof of the machine"):
        assert heading not in text


def test_no_string_of_a_report_becomes_markup():
    hostile = "<script>alert(1)</script>"
    facts = json.loads(json.dumps(made(notes=(hostile,)).to_dict()).replace("encoder.0.up", hostile))
    facts["machine"] = {hostile: hostile}
    text = page(facts, title=hostile)
    assert hostile not in text
    assert tags_of(text).seen.count("script") == 1


def test_a_model_without_layers_has_a_page():
    assert "No layer that a kernel could run" in page(made(layers=0).to_dict())


def test_the_file_is_written_and_named(tmp_path):
    path = made().html(tmp_path / "report.html")
    assert path.read_text("utf-8").startswith("<!doctype html>")
    assert made()._repr_html_().startswith("<pre>")


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_a_browser_sorts_the_table_without_an_error(tmp_path):
    text = everything().replace(
        "</body>",
        """<script>
        window.addEventListener("error", (e) => { document.body.dataset.broken = e.message; });
        const names = () => [...document.querySelectorAll("td.name")].map((cell) => cell.textContent).slice(0, 7);
        const head = [...document.querySelectorAll("th button")].find((each) => each.textContent === "ms now");
        head.click();
        document.body.dataset.up = names().join(" ");
        head.click();
        document.body.dataset.down = names().join(" ");
        </script></body>""",
    )
    file = tmp_path / "report.html"
    file.write_text(text, "utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    command = [BROWSER, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    by_time = sorted(made(layers=7).rows(), key=lambda row: row["ms"])
    up = " ".join(row["layer"] for row in by_time)
    down = " ".join(row["layer"] for row in reversed(by_time))
    assert "data-broken" not in shown
    assert f'data-up="{up}"' in shown
    assert f'data-down="{down}"' in shown
