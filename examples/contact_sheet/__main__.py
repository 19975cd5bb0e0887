"""A photograph through rudnn, on one sheet with torch's difference: `python -m contact_sheet`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import skimage.data
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.table import Table

import rudnn
from rudnn.errors import DeviceError

from .filters import TILE, Entry, Place, entries, shrink

TOLERANCE = 5e-5  # of any pixel, 0 to 1: grid_sample finds its places in f32
COLUMNS, MARGIN, CAPTION = 6, 10, 30  # tiles in a row; pixels around, and below for the text
PHOTOS = ("astronaut", "chelsea", "coffee")  # what scikit-image's wheel itself brings in colour


def main() -> int:
    """Write the sheet; exit code 1 if a tile is off, 2 for bad arguments."""
    args = _arguments()
    try:
        device = rudnn.device(args.target)
    except DeviceError as error:
        print(f"contact_sheet: {error}", file=sys.stderr)
        return 2
    pixels = getattr(skimage.data, args.photo)().astype(np.float32) / 255  # [H, W, 3]
    photo = np.ascontiguousarray(pixels.transpose(2, 0, 1))[None]

    def place(array: np.ndarray) -> rudnn.Tensor:
        return rudnn.tensor(array, device=device)

    tiles = [("the photograph", "", shrink(photo))]
    table = Table("tile", "compared with", "max difference", title=f"on {device.name}, f32")
    worst = 0.0
    for entry in entries(photo):
        image, difference = compared(entry, place)
        tiles.append((entry.caption, f"from {entry.peer}: at most {difference:.1e}", image))
        table.add_row(entry.caption, entry.peer, f"{difference:.1e}")
        worst = difference if not difference <= worst else worst  # a NaN must fail too
    sheet(tiles).save(args.output)

    good = worst <= TOLERANCE
    verdict = "[green]ok[/]" if good else "[red]too large[/]"
    console = Console()
    console.print(table)
    console.print(f"greatest: {worst:.1e}, allowed {TOLERANCE:.0e}: {verdict}")
    console.print(f"the sheet: {args.output}", soft_wrap=True)
    return 0 if good else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="contact_sheet", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("contact_sheet.png"))
    parser.add_argument("--photo", choices=PHOTOS, default=PHOTOS[0])
    parser.add_argument("--target", default="llvm", help="device (%(default)s)")
    args = parser.parse_args()
    if not args.output.parent.is_dir():
        parser.error(f"--output needs a folder that is there, got {args.output.parent}")
    return args


def compared(entry: Entry, place: Place) -> tuple[np.ndarray, float]:
    """The image by rudnn, and how far the other side's is from it."""
    ours, theirs = entry.ours(place), entry.theirs()
    if ours.shape != theirs.shape:
        raise ValueError(f"{entry.caption}: needs shape {theirs.shape}, got {ours.shape}")
    return ours, float(np.abs(ours - theirs).max())


def sheet(tiles: list[tuple[str, str, np.ndarray]]) -> Image.Image:
    """Tiles (caption, note, planes) in rows, the text below each."""
    rows = -(-len(tiles) // COLUMNS)
    wide, high = TILE + MARGIN, TILE + CAPTION + MARGIN
    made = Image.new("RGB", (COLUMNS * wide + MARGIN, rows * high + MARGIN), "white")
    draw, font = ImageDraw.Draw(made), ImageFont.load_default(11)
    for at, (caption, note, planes) in enumerate(tiles):
        x, y = MARGIN + at % COLUMNS * wide, MARGIN + at // COLUMNS * high
        made.paste(picture(planes), (x, y))
        draw.text((x, y + TILE + 2), caption, "black", font)
        draw.text((x, y + TILE + 15), note, "dimgray", font)
    return made


def picture(planes: np.ndarray) -> Image.Image:
    """[1, 1 or 3, H, W] f32 → an RGB image; what filters take out of 0 … 1 is cut."""
    pixels = np.rint(np.clip(planes[0], 0, 1) * 255).astype(np.uint8)
    return Image.fromarray(
        np.broadcast_to(pixels, (3, *pixels.shape[1:])).transpose(1, 2, 0).copy()
    )


if __name__ == "__main__":
    sys.exit(main())
