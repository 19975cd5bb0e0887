"""What is done to the photograph, each time by rudnn and by torch.

Images are planes [1, C, H, W], f32, 0 to 1. torch computes in float64: its f32 kernels round the
places they read at, which shows in the fifth decimal, more than anything else here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from PIL import Image

import rudnn

Place = Callable[[np.ndarray], Any]  # an array → the same on the device in question

TILE, SMALL = 208, 60  # pixels of a side: what a tile shows, what is enlarged to it
RESIZES = (  # mode, align_corners, antialias
    ("nearest", False, False), ("nearest-exact", False, False), ("bilinear", False, False),
    ("bilinear", True, False), ("bilinear", False, True), ("bicubic", False, False),
    ("bicubic", True, False), ("bicubic", False, True), ("lanczos3", False, True),
)  # fmt: skip
WARPS = (  # mode, padding_mode
    ("nearest", "zeros"), ("bilinear", "zeros"), ("bilinear", "border"), ("bicubic", "reflection"),
)  # fmt: skip
LUMA = np.array([0.299, 0.587, 0.114], np.float32)
SOBEL = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]], np.float32) / 4
SIGMA, RADIUS = 2.5, 6  # of the blur, pixels


@dataclass(frozen=True)
class Entry:
    """A tile: the image by rudnn, and by `peer` (Pillow where torch has no such mode)."""

    caption: str
    ours: Callable[[Place], np.ndarray]
    theirs: Callable[[], np.ndarray]
    peer: str = "torch"


def entries(photo: np.ndarray) -> Iterator[Entry]:
    """All tiles of a photograph [1, 3, H, W] of at least TILE pixels a side."""
    middle = [(n - SMALL) // 2 for n in photo.shape[2:]]
    detail = photo[..., middle[0] : middle[0] + SMALL, middle[1] : middle[1] + SMALL]
    for title, image in (("enlarged", detail), ("reduced", photo)):
        for mode, align_corners, antialias in RESIZES:
            yield resize(title, image, mode, align_corners, antialias)
    tile = shrink(photo)
    for mode, padding_mode in WARPS:
        yield warp(tile, mode, padding_mode)
    blur = gaussian()
    identity = np.zeros_like(blur)
    identity[RADIUS, RADIUS] = 1
    yield depthwise("Gaussian blur", tile, blur)
    yield depthwise("sharpened", tile, 2 * identity - blur)
    yield edges(tile)


def exact(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).double()


def shrink(photo: np.ndarray) -> np.ndarray:
    return rudnn.interpolation.interpolate(photo, TILE, mode="bicubic", antialias=True)


def resize(title: str, image: np.ndarray, mode: str, align_corners: bool, antialias: bool) -> Entry:
    """`image` at TILE × TILE; lanczos3 is compared with Pillow."""
    corners = align_corners if mode in ("bilinear", "bicubic") else None
    words = [title, mode, *["corners aligned"] * align_corners, *["antialias"] * antialias]

    def ours(place: Place) -> np.ndarray:
        x = place(image)
        return np.asarray(rudnn.interpolation.interpolate(x, TILE, None, mode, corners, antialias))

    def torchs() -> np.ndarray:
        x = exact(image)
        return functional.interpolate(x, TILE, None, mode, corners, antialias=antialias).numpy()

    def pillows() -> np.ndarray:
        planes = [Image.fromarray(plane) for plane in image[0]]
        made = [plane.resize((TILE, TILE), Image.Resampling.LANCZOS) for plane in planes]
        return np.stack([np.asarray(plane) for plane in made])[None]

    caption = ", ".join(words)
    if mode == "lanczos3":
        return Entry(caption, ours, pillows, "Pillow")
    return Entry(caption, ours, torchs)


def warp(tile: np.ndarray, mode: str, padding_mode: str) -> Entry:
    """`tile` swirled about its middle, and seen from a little further away."""
    grid = swirl(1.25, 2.2)

    def ours(place: Place) -> np.ndarray:
        sample = rudnn.grid_sampling.grid_sample
        return np.asarray(sample(place(tile), place(grid), mode, padding_mode, False))

    def theirs() -> np.ndarray:
        made = functional.grid_sample(exact(tile), exact(grid), mode, padding_mode, False)
        return made.numpy()

    return Entry(f"swirl, {mode}, {padding_mode}", ours, theirs)


def swirl(reach: float, turn: float) -> np.ndarray:
    """A sampling grid [1, TILE, TILE, 2]: the plane to ±`reach`, turned by up to `turn` radians."""
    places = np.linspace(-reach, reach, TILE)
    x, y = np.meshgrid(places, places)
    angle = turn * np.exp(-2 * (x**2 + y**2))
    turned = np.stack([x * np.cos(angle) - y * np.sin(angle),
                       x * np.sin(angle) + y * np.cos(angle)], axis=-1)  # fmt: skip
    return turned[None].astype(np.float32)


def gaussian() -> np.ndarray:
    """A kernel [K, K] that sums to 1."""
    line = np.exp(-0.5 * (np.arange(-RADIUS, RADIUS + 1) / SIGMA) ** 2)
    kernel = np.outer(line, line)
    return (kernel / kernel.sum()).astype(np.float32)


def depthwise(caption: str, tile: np.ndarray, kernel: np.ndarray) -> Entry:
    """Each channel of `tile` convolved with `kernel` [K, K]."""
    channels = tile.shape[1]
    weight = np.ascontiguousarray(np.broadcast_to(kernel, (channels, 1, *kernel.shape)))

    def ours(place: Place) -> np.ndarray:
        return np.asarray(convolve(place(tile), place(weight), channels))

    def theirs() -> np.ndarray:
        made = functional.conv2d(exact(tile), exact(weight), padding="same", groups=channels)
        return made.numpy()

    return Entry(caption, ours, theirs)


def convolve(x: Any, weight: Any, groups: int = 1) -> Any:
    options = rudnn.convolution.ConvOptions(padding="same", groups=groups)
    return rudnn.convolution.conv_forward(x, weight, options=options)


def edges(tile: np.ndarray) -> Entry:
    """The length of the brightness's gradient: a 1×1 convolution, then Sobel's two 3×3."""
    luma = LUMA.reshape(1, 3, 1, 1)
    sobel = np.stack([SOBEL, SOBEL.T])[:, None]

    def ours(place: Place) -> np.ndarray:
        brightness = convolve(place(tile), place(luma))
        return length(np.asarray(convolve(brightness, place(sobel))))

    def theirs() -> np.ndarray:
        brightness = functional.conv2d(exact(tile), exact(luma))
        return length(functional.conv2d(brightness, exact(sobel), padding=1).numpy())

    return Entry("edges (Sobel)", ours, theirs)


def length(gradient: np.ndarray) -> np.ndarray:
    """[1, 2, H, W] → [1, 1, H, W]."""
    return np.sqrt((gradient**2).sum(axis=1, keepdims=True))
