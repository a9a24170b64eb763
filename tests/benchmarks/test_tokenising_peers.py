"""The text of a comparison is without markup and repetitions, and memory is that of all processes."""

import subprocess
import sys

from benchmarks.tokenising_peers import unrepeated, watched, without_roff, without_tags

MEGABYTES = 60


def test_a_line_that_occurred_before_is_left_out() -> None:
    seen = set[bytes]()
    assert unrepeated("one two\n  one   two \nthree", seen) == ["one", "two", "three"]
    assert unrepeated("three\nfour", seen) == ["four"]


def test_markup_is_left_out() -> None:
    page = '.TH ls 1\n.\\" a comment\n.SH NAME\nls \\- list \\fBfiles\\fR\n.B ls\n.PP\n\\&.hidden'
    assert without_roff(page).split() == ["NAME", "ls", "-", "list", "files", "ls", ".hidden"]
    tagged = "<p>one<script>no()</script> two <b>&amp;</b> three</p>"
    assert without_tags(tagged).split() == ["one", "two", "&", "three"]


def test_the_peak_is_that_of_the_largest_process_and_of_all() -> None:
    child = f"import time; held = b'x' * {MEGABYTES << 20}; time.sleep(0.5)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    peak = watched(subprocess.Popen([sys.executable, "-c", parent]))
    assert MEGABYTES << 20 < peak.largest < (MEGABYTES + 30) << 20
    assert peak.largest + (5 << 20) < peak.total < peak.largest + (30 << 20)
