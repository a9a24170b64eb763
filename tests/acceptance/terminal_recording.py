"""Record a terminal session in which a text becomes a published model, and make the README's picture of it.

::

    python -m tests.acceptance.terminal_recording --into docs/images/first-run.gif

It types the commands below into a real shell, in a terminal of 100 x 26 characters and a folder with some text. The GIF
shortens every wait, runs four times as fast, and shows about three frames a second. The paths of this checkout and of
the folder are shown as /opt/t5-pretrain and /home/me/project.
"""

import argparse
import os
import pty
import select
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

import matplotlib
import pyte
from PIL import Image, ImageDraw, ImageFont

from t5train.data.sources import write_pydocs

CHECKOUT, SHOWN_CHECKOUT = Path(__file__).parents[2], "/opt/t5-pretrain"
SHOWN_FOLDER = "/home/me/project"
COLUMNS, LINES = 100, 26
PROMPT = "$ "
COMMANDS = (
    "head -n 1 notes/python.jsonl | cut -c 1-300",
    "t5-pretrain run smoke --set corpus.source=notes --name notes",
    "t5-pretrain status",
    "t5-pretrain verify work/published/notes",
    "t5-pretrain generate work/published/notes 'the value of <extra_id_0> is a list of <extra_id_1>.'",
)
COMMAND_SECONDS = 600.0
LONGEST_WAIT = 1.0
FRAME_SECONDS = 0.3
SPEED = 4.0
END_SECONDS = 6.0
BACKGROUND, FOREGROUND = "#16181d", "#d8dee9"
COLORS = {
    "red": "#e06c75",
    "green": "#98c379",
    "brown": "#e5c07b",
    "blue": "#61afef",
    "magenta": "#c678dd",
    "cyan": "#56b6c2",
    "black": "#5c6370",
}
Event = tuple[float, str]
"""Seconds since the start, and what the terminal was sent then."""


class Shell:
    """A shell in a terminal of its own. Records what it prints."""

    def __init__(self, folder: Path) -> None:
        self.events: list[Event] = []
        self._folder = folder
        self._screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self._screen)
        self._start = time.monotonic()
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
            "PS1": PROMPT,
        }
        pid, self._terminal = pty.fork()
        if pid == 0:
            os.chdir(folder)
            os.execve("/bin/bash", ["bash", "--norc", "--noprofile"], environment)  # noqa: S606 - what is recorded is a shell
        ioctl(self._terminal, TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self._until_prompt()

    def do(self, command: str) -> None:
        """Type a command, and wait for the next prompt. Raises TimeoutError."""
        for character in command:
            os.write(self._terminal, character.encode())
            self._read(0.03)
        self._read(0.8)
        os.write(self._terminal, b"\n")
        self._read(0.5)
        self._until_prompt()
        self._read(2.0)

    def _until_prompt(self) -> None:
        deadline = time.monotonic() + COMMAND_SECONDS
        while self._screen.display[self._screen.cursor.y].rstrip() != PROMPT.rstrip():
            if time.monotonic() > deadline:
                raise TimeoutError("\n".join(self._screen.display))
            self._read(0.2)

    def _read(self, seconds: float) -> None:
        """Record what is printed in the next seconds."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._terminal], [], [], left)[0]:
                data = os.read(self._terminal, 65536)
                self._stream.feed(data)
                shown = data.decode("utf-8", "replace").replace(str(CHECKOUT), SHOWN_CHECKOUT)
                shown = shown.replace(str(self._folder), SHOWN_FOLDER)
                self.events.append((time.monotonic() - self._start, shown))


def record(folder: Path) -> list[Event]:
    """Type the commands in a folder with Python's documentation as text. Returns what the terminal showed, and when."""
    notes = folder / "notes"
    notes.mkdir()
    write_pydocs(notes / "python.jsonl")
    shell = Shell(folder)
    for command in COMMANDS:
        shell.do(command)
    return shell.events


def frames(events: list[Event]) -> Iterator[tuple[Image.Image, float]]:
    """Yield pictures of the terminal, and how many seconds each is shown."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.Stream(screen)
    shown = waited = 0.0
    for (at, data), (then, _) in zip(events, [*events[1:], (events[-1][0], "")], strict=True):
        stream.feed(data)
        waited += min(then - at, LONGEST_WAIT)
        if waited - shown >= FRAME_SECONDS * SPEED:
            yield picture(screen), (waited - shown) / SPEED
            shown = waited
    yield picture(screen), END_SECONDS


def picture(screen: pyte.Screen) -> Image.Image:
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    font = ImageFont.truetype(str(fonts / "DejaVuSansMono.ttf"), 13)
    width, height = 8, 17
    image = Image.new("RGB", (COLUMNS * width + 16, LINES * height + 16), BACKGROUND)
    draw = ImageDraw.Draw(image)
    for y in range(LINES):
        for x, cell in screen.buffer[y].items():
            if cell.data.strip():
                color = COLORS.get(cell.fg, FOREGROUND if cell.fg == "default" else f"#{cell.fg}")
                color = color if color.startswith("#") and len(color) == len(FOREGROUND) else FOREGROUND
                draw.text((8 + x * width, 8 + y * height), cell.data, font=font, fill=color)
    return image.quantize(16)


def save(events: list[Event], path: Path) -> None:
    pictures, seconds = zip(*frames(events), strict=True)
    durations = [max(40, round(each * 1000)) for each in seconds]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=durations, loop=0, optimize=True)
    print(f"{path}: {len(pictures)} frames, {path.stat().st_size / 1e3:,.0f} kB")


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--into", type=Path, required=True, help="path of the GIF")
    into = made.parse_args().into
    with tempfile.TemporaryDirectory() as folder:
        save(record(Path(folder)), into)


if __name__ == "__main__":
    main()
