"""A plan as a short program in plain diffusers: to reproduce a finding, or to paste into one's own program.

Nothing is said twice: the family sets its attributes and decodes as it always does, on an `Echo`, which writes down
what is done to it. So the program does what the decode did, whatever the class calls its tiles.
"""

from __future__ import annotations

import pprint
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fidelity.errors import EvaluationError, RequestError
from fidelity.records import Case, DecodePlan, Model
from fidelity.registry import CHECKS

VAE, LATENTS = "vae", "latents"
DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
CPU = 'torch.device("cpu")'
_GROUP = f"vae.enable_group_offload(onload_device={CPU}, offload_device={CPU}, offload_type="
OFFLOADS = {
    "model": ("from accelerate import cpu_offload_with_hook", f"cpu_offload_with_hook(vae, {CPU})"),
    "sequential": ("from accelerate import cpu_offload", f"cpu_offload(vae, {CPU})"),
    "group_block": (None, f'{_GROUP}"block_level", num_blocks_per_group=1)'),
    "group_leaf": (None, f'{_GROUP}"leaf_level")'),
    "disk": ("from accelerate import disk_offload", f'disk_offload(vae, "offload", {CPU})'),
}
"""What each offload takes, by accelerate's and diffusers' own calls: an import, where it needs one, and the call."""
WIDTH = 110
Act = Callable[[Any], Any]
"""Something to do to a vae, a real one or an Echo."""


class Echo:
    """Stands for an object in a program: what is set on it and called of it becomes lines of Python.

    Reading an attribute gives the Echo of that attribute, a call the Echo of its result; a call is a line of its own
    as long as nothing more is done with its result. What no line can say (arithmetic) raises EvaluationError.
    """

    def __init__(self, expression: str, lines: list[list[str]], own: list[str] | None = None):
        vars(self).update(_expression=expression, _lines=lines, _own=own, _values={})

    def _use(self) -> str:
        """The expression, as part of another one: then it is no line of its own."""
        own, lines = vars(self)["_own"], vars(self)["_lines"]
        if any(line is own for line in lines):
            lines[:] = [line for line in lines if line is not own]
        return str(vars(self)["_expression"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Echo(f"{self._use()}.{name}", vars(self)["_lines"])

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["_values"][name] = value
        vars(self)["_lines"].append([f"{self._use()}.{name} = {said(value)}"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        words = [*map(said, args), *(f"{key}={said(value)}" for key, value in kwargs.items())]
        line = [f"{self._use()}({', '.join(words)})"]
        vars(self)["_lines"].append(line)
        return Echo(line[0], vars(self)["_lines"], line)

    def __getitem__(self, key: Any) -> Any:
        return Echo(f"{self._use()}[{said(key)}]", vars(self)["_lines"])

    def _arithmetic(self, *_: Any) -> Any:
        raise EvaluationError(
            f"{vars(self)['_expression']} is computed with, which no line of a program says: say it in a call"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __floordiv__ = _arithmetic
    __int__ = __float__ = __index__ = __bool__ = __len__ = __iter__ = _arithmetic


def said(value: Any) -> str:
    """A value as Python: an Echo by what it stands for, a tensor by torch.tensor, a dtype by its name."""
    if isinstance(value, Echo):
        return value._use()
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(said, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if type(value).__module__ == "torch":
        return f"torch.tensor({value.tolist()!r})" if hasattr(value, "tolist") else str(value)
    return repr(value)


def recorded(act: Act) -> list[str]:
    """What `act(vae)` would be in a program: its assignments and calls, in order. It is called with an Echo."""
    lines: list[list[str]] = []
    act(Echo(VAE, lines))
    return [line[0] for line in lines]


def assigned(act: Act) -> dict[str, Any]:
    """The values that `act(vae)` assigns to attributes of the vae itself."""
    echo = Echo(VAE, [])
    act(echo)
    return dict(vars(echo)["_values"])


# ---------------------------------------------------------------- what a plan sets


def settings(model: Model, plan: DecodePlan) -> str:
    """The lines that configure `vae`, a pipeline's or one's own, as this plan does; empty where it sets nothing.

    `import torch` is taken for granted, and so is that the latents come in the dtype of the weights. An option that
    diffusers does not have stays as a comment. Raises IllegalTiling for tiles that the class cannot have.
    """
    return "\n".join(_settings(model, plan))


def _settings(model: Model, plan: DecodePlan) -> list[str]:
    family, geometry = model.family, model.geometry
    lines = []
    if plan.dtype != "fp32":
        lines.append(f"vae.to({DTYPES[plan.dtype]})")
    if plan.force_upcast:
        lines.append("vae.to(torch.float32)  # weights rounded to half, computed in fp32, as force_upcast does")
    if plan.slicing:
        lines.append("vae.enable_slicing()")
    if (tiling := plan.tiling) is not None:
        lines += recorded(lambda vae: family.set_tiling(vae, geometry, tiling))
    if (temporal := plan.temporal) is not None:
        lines += recorded(lambda vae: family.set_temporal(vae, geometry, temporal))
    lines += [f"# {name} = {value!r}: no option of diffusers" for name, value in plan.options.items() if value]
    if plan.offload != "none":
        needs, call = OFFLOADS[plan.offload]
        lines += [*([needs] if needs else []), call]
    return lines


# ---------------------------------------------------------------- whole programs


def code(model: Model, plan: DecodePlan, shape: tuple[int, ...], *, seed: int = 0) -> str:
    """A program without fidelity: build the class, decode seeded latents of `shape` plainly and under `plan`, compare.

    It prints both shapes and the relative RMSE (over the standard deviation of the plain decode), or what was raised.
    Weights are those of the model's own folder where it has one, else random and seeded.
    """
    upcast = plan.dtype != "fp32" and not plan.force_upcast
    fed = f"{LATENTS}.to({DTYPES[plan.dtype]})" if upcast else LATENTS
    return program(model, shape, [*_settings(model, plan), f"sample = {decoding(model, fed)}"], seed=seed)


def of_case(case: Case, model: Model, shape: tuple[int, ...]) -> str:
    """The program of a case of a suite, by its check where that has one of its own; a comment where there is none."""
    about = CHECKS.get(case.check) if case.check is not None else None
    make = about.code if about is not None and about.code is not None else code
    try:
        return make(model, case.plan, shape)
    except (EvaluationError, RequestError) as error:
        return f"# {error}\n"


def program(model: Model, shape: tuple[int, ...], lines: Sequence[str], *, seed: int = 0) -> str:
    """The same for `lines` of one's own: they find `vae`, `latents`, the plain decode `full`, and may leave `sample`.

    Raises EvaluationError for a model that no line of diffusers makes.
    """
    cls = model.config.get("_class_name")
    if cls != model.family.name:
        raise EvaluationError(f"{model.name} is no class of diffusers, so no program in diffusers alone decodes it")
    settled = recorded(getattr(model.family, "settle", lambda _: None))
    compared = [
        'print("this decode", *sample.shape)',
        "if sample.shape == full.shape:",
        '    print("relative RMSE", ((sample.float() - full).square().mean().sqrt() / full.std()).item())',
    ]
    tried = [
        f"full = {decoding(model)}",
        'print("full decode", *full.shape)',
        *lines,
        *(compared if any(line.startswith("sample = ") for line in lines) else []),
    ]
    return "\n".join([
        "import torch",
        f"from diffusers import {cls}",
        "",
        f"torch.manual_seed({seed})",
        *_built(model, cls),
        *settled,
        f"{LATENTS} = torch.randn({', '.join(map(str, shape))})",
        "",
        "torch.set_grad_enabled(False)",
        "try:",
        *(f"    {line}" for line in tried),
        "except Exception as error:",
        '    print(f"{type(error).__name__}: {error}")',
        "",
    ])  # fmt: skip


def decoding(model: Model, latents: str = LATENTS) -> str:
    """How the family decodes `vae`: the expression of its sample."""
    lines: list[list[str]] = []
    sample = said(model.family.decode(Echo(VAE, lines), Echo(latents, lines)))  # type: ignore[arg-type]
    if lines:
        raise EvaluationError(f"{model.family.name} decodes in more than one call, which is not written down")
    return sample


def _built(model: Model, cls: str) -> list[str]:
    """Lines that make `vae`: from the model's own folder or file, else by its configuration with random weights."""
    source = Path(model.source) if model.source else None
    if source is not None and source.is_dir():
        return [f"vae = {cls}.from_pretrained({str(source)!r}).eval()"]
    config = {key: value for key, value in model.config.items() if not key.startswith("_")}
    told = pprint.pformat(config, width=WIDTH - 9, compact=True, sort_dicts=False).replace("\n", "\n" + 9 * " ")
    made = [f"config = {told}", f"vae = {cls}.from_config(config).eval()"]
    if source is not None and source.suffix == ".safetensors" and source.is_file():
        return ["from safetensors.torch import load_file", *made, f"vae.load_state_dict(load_file({str(source)!r}))"]
    return [made[0], f"{made[1]}  # trained weights instead: {cls}.from_pretrained(PATH)"]
