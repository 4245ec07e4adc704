"""The page of timelines in a real browser, where there is one: what a wheel, a drag and clicks do."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from multimodal.schedule.chrome_trace import write_timeline_page
from multimodal.schedule.simulate import timeline_of_unit_costs
from tests.unit.schedule.test_simulate import lower, one_sample

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
SWITCHES = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
USER = f"<script>\n{Path(__file__).with_name('timeline_user.js').read_text()}</script>\n</body>"


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome")
def test_a_person_zooms_moves_and_asks(tmp_path: Path) -> None:
    timeline = timeline_of_unit_costs(lower(one_sample()))
    longer = timeline.scaled(2)
    page = tmp_path / "page.html"
    write_timeline_page({"Predicted </script>": timeline, "Measured": longer}, page)
    page.write_text(page.read_text().replace("</body>", USER))
    command = [str(BROWSER), *SWITCHES.split(), f"--user-data-dir={tmp_path}", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    told = json.loads(shown.split('<pre id="found">')[1].split("</pre>")[0].replace("&gt;", ">").replace("&lt;", "<"))
    whole, zoomed, moved, again, asked, nothing = told["found"]
    assert whole["first"] == 0 and whole["last"] == longer.duration_seconds
    assert zoomed["last"] - zoomed["first"] < longer.duration_seconds, "the wheel zooms in"
    assert moved["first"] > zoomed["first"] and moved["last"] - moved["first"] == pytest.approx(zoomed["last"] - zoomed["first"])
    assert (again["first"], again["last"]) == (whole["first"], whole["last"]), "a double click shows the whole step"
    _, _, _, start, end, name = told["chosen"]
    first, *times = asked["told"].split("\n")
    assert first == name and [line.split(", ")[0] for line in times] == ["Predicted </script>", "Measured"]
    assert f"{end - start:.3f} s" in times[1] and times[0] != times[1]
    assert nothing["told"] == whole["told"], "a click beside all actions chooses none"
    assert told["pixel"] != [255, 255, 255, 255] and "llm forward" in told["legend"]
