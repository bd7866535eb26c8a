"""From a sample to what a server sends, step by step.

The steps are those of diffusers' processors (`VaeImageProcessor.postprocess`; of a clip, `VideoProcessor.
postprocess_video`), written out by name so that each can be measured; a test holds them to diffusers' bit for bit.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from fidelity.lazy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image
    from torch import Tensor

    DataRange = tuple[float, float]

JPEG_QUALITY = 95
FRAMES_A_SECOND = 24
PICTURE_FILES = ("PNG", "JPEG", "WebP")


def denormalise(images: Tensor, data_range: DataRange) -> Tensor:
    """To [0, 1], clamped, in the sample's own dtype: `VaeImageProcessor.denormalize` where the range is (-1, 1)."""
    if tuple(data_range) == (-1.0, 1.0):
        return (images * 0.5 + 0.5).clamp(0, 1)
    low, high = data_range
    return ((images - low) / (high - low)).clamp(0, 1)


def array_of(images: Tensor) -> NDArray[Any]:
    """(N, H, W, C) float32 in main memory: `VaeImageProcessor.pt_to_numpy`. A view where the tensor is that already."""
    return images.cpu().permute(0, 2, 3, 1).float().numpy()


def to_uint8(images: NDArray[Any]) -> NDArray[Any]:
    """0 to 255, rounded: the first half of `VaeImageProcessor.numpy_to_pil`."""
    with np.errstate(invalid="ignore"):  # a sample that is not finite fails by its own measurement
        return (images * 255).round().astype("uint8")


def to_pil(images: NDArray[Any]) -> list[Image]:
    """One picture each: the second half of `VaeImageProcessor.numpy_to_pil`."""
    from PIL import Image

    return [Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image) for image in images]


def encode(picture: Image, kind: str) -> bytes:
    """A picture's file: `PNG`, `JPEG` (quality 95) or `WebP`."""
    stream = io.BytesIO()
    picture.save(stream, format=kind, **({"quality": JPEG_QUALITY} if kind == "JPEG" else {}))
    return stream.getvalue()


def animation(frames: Sequence[Image]) -> bytes:
    """The frames as one animated WebP."""
    stream = io.BytesIO()
    duration = round(1000 / FRAMES_A_SECOND)
    frames[0].save(stream, format="WebP", save_all=True, append_images=list(frames[1:]), duration=duration)
    return stream.getvalue()


def film(frames: Sequence[Image]) -> bytes:
    """The frames as H.264 in MP4, by PyAV. Raises ImportError where it is not installed."""
    import av

    stream = io.BytesIO()
    with av.open(stream, mode="w", format="mp4") as container:
        track: Any = container.add_stream("libx264", rate=FRAMES_A_SECOND)
        track.width, track.height = frames[0].size
        # halved colour needs even sides
        track.pix_fmt = "yuv420p" if not (track.width % 2 or track.height % 2) else "yuv444p"
        for frame in frames:
            container.mux(track.encode(av.VideoFrame.from_image(frame.convert("RGB"))))
        container.mux(track.encode())
    return stream.getvalue()


@cache
def has_pyav() -> bool:
    """Whether `film` can run."""
    try:
        import av  # noqa: F401
    except ImportError:
        return False
    return True
