"""What each diagnosis means, in one sentence for somebody who sees it for the first time."""

from __future__ import annotations

DIAGNOSES: dict[str, str] = {
    "seam": "A line shows where two tiles meet.",
    "band": "The error gathers in the bands where tiles overlap: they are blended wrongly.",
    "corner": "The error gathers where four tiles meet.",
    "chroma": "Tiles differ from each other in colour.",
    "tone_drift": "A tile is brighter, darker or of another contrast than its neighbours.",
    "periodic": "The difference repeats as a grid of its own pitch.",
    "geometry": "The sample has another shape than the golden, or another grid than the plan asks for.",
    "not_engaged": "An option was asked for and nothing shows that it ran.",
    "non_finite": "The sample holds NaN or infinity: half precision overflowed.",
    "scale": "The sample is the golden times a factor: latents were scaled wrongly.",
    "shift": "The sample is the golden plus a constant: a shift was forgotten.",
    "double_normalised": "The sample was mapped from [-1, 1] to [0, 1] once more than it should be.",
    "clipping": "Values were cut off at the ends of the range.",
    "truncation": "Values were rounded down where they should be rounded to the nearest.",
    "order": "Items, frames or colour channels are in another order.",
    "misaligned": "The picture is moved by whole pixels or frames.",
    "temporal_seam": "The picture jumps where one chunk of frames ends and the next begins.",
    "ghost": "A frame shows what belongs to the frame beside it.",
    "dtype": "Something was computed in another precision than the plan asks for.",
    "nondeterministic": "The same decode gives other bits when it is done again.",
    "state_leak": "The option left something behind on the model.",
    "memory": "It needs more memory than it should, or there was not enough.",
    "not_as_specified": "The decode differs from the same tiles or items decoded one by one.",
    "regressed": "It is worse than what was approved, by more than the noise floor.",
    "blur": "Fine detail is gone.",
    "crash": "The decode raised an error.",
    "drift": "The decode as a whole moved away from the golden, without a place or a kind of its own.",
}
"""One entry for each of `records.DIAGNOSES`."""
