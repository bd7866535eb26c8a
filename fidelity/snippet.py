"""A plan as a short program in plain diffusers: to reproduce a finding, or to paste into one's own program.

Nothing is said twice: the family sets its attributes and decodes as it always does, on an `Echo` of an instance without
weights, which writes down what is done to it: so the program does what the decode did.
"""

from __future__ import annotations

import pprint
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fidelity.errors import EvaluationError, RequestError
from fidelity.lazy import torch
from fidelity.models.blank import blank
from fidelity.models.interface import interface
from fidelity.records import STREAM, Case, DecodePlan, Model
from fidelity.registry import CHECKS

VAE, LATENTS = "vae", "latents"
DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
CPU, CUDA = 'torch.device("cpu")', 'torch.device("cuda")'
_GROUP = f"vae.enable_group_offload(onload_device={CPU}, offload_device={CPU}, offload_type="
OFFLOADS = {
    "model": ("from accelerate import cpu_offload_with_hook", f"cpu_offload_with_hook(vae, {CPU})"),
    "sequential": ("from accelerate import cpu_offload", f"cpu_offload(vae, {CPU})"),
    "group_block": (None, f'{_GROUP}"block_level", num_blocks_per_group=1)'),
    "group_leaf": (None, f'{_GROUP}"leaf_level")'),
    "disk": ("from accelerate import disk_offload", f'disk_offload(vae, "offload", {CPU})'),
}
"""What each offload takes, by accelerate's and diffusers' own calls: an import, where it needs one, and the call."""
POSTERIORS = ("AutoencoderKLOutput", "ConsistencyDecoderVAEOutput")
"""What an encode returns that gives a distribution and not latents."""
WIDTH = 110
Act = Callable[[Any], Any]
"""Something to do to a vae, a real one or an Echo."""
PLAIN = (bool, int, float, str, tuple, list, type(None))
"""What an attribute is that has a value of its own, to be read."""


class Echo:
    """Stands for an object in a program: what is set on it and called of it becomes lines of Python.

    What it echoes answers what is read, and keeps what is set. A call is written down and not made; its result is an
    Echo of nothing, and the call a line of its own as long as nothing is done with that. What no line can say
    (arithmetic on such a result) raises EvaluationError.
    """

    def __init__(self, expression: str, lines: list[list[str]], of: Any = None, own: list[str] | None = None):
        vars(self).update(_expression=expression, _lines=lines, _of=of, _own=own)

    def _use(self) -> str:
        """The expression, as part of another one: then it is no line of its own."""
        own, lines = vars(self)["_own"], vars(self)["_lines"]
        if own is not None:
            lines[:] = [line for line in lines if line is not own]
        return str(vars(self)["_expression"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        of = vars(self)["_of"]
        value = None if of is None else getattr(of, name)
        if of is not None and isinstance(value, PLAIN):
            return value
        return Echo(f"{self._use()}.{name}", vars(self)["_lines"], value)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["_lines"].append([f"{self._use()}.{name} = {said(value)}"])
        if vars(self)["_of"] is not None:
            setattr(vars(self)["_of"], name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        words = [*map(said, args), *(f"{key}={said(value)}" for key, value in kwargs.items())]
        line = [f"{self._use()}({', '.join(words)})"]
        vars(self)["_lines"].append(line)
        return Echo(line[0], vars(self)["_lines"], None, line)

    def __getitem__(self, key: Any) -> Any:
        return Echo(f"{self._use()}[{said(key)}]", vars(self)["_lines"])

    def _arithmetic(self, *_: Any) -> Any:
        raise EvaluationError(f"{vars(self)['_expression']} is computed with, which no line says")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __floordiv__ = _arithmetic
    __int__ = __float__ = __index__ = __bool__ = __len__ = __iter__ = _arithmetic


def said(value: Any) -> str:
    """A value as Python: an Echo by what it stands for, tensors, dtypes and generators by torch's own calls."""
    if isinstance(value, Echo):
        return value._use()
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(said, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, torch.Generator):
        return f"torch.Generator().manual_seed({value.initial_seed()})"
    if isinstance(value, torch.Tensor):
        return f"torch.tensor({value.tolist()!r})"
    return str(value) if isinstance(value, torch.dtype) else repr(value)


# ---------------------------------------------------------------- writing one


class Script:
    """A program being written: what is done is written down, and done to an instance without weights as well."""

    def __init__(self, model: Model, module: Any):
        self.model, self.module = model, module
        self.latents_shape: tuple[int, ...] = ()
        """Of what the class was given to decode last: some families fold frames into the batch."""
        self._lines: list[list[str]] = []

    @property
    def lines(self) -> list[str]:
        return [line[0] for line in self._lines]

    def do(self, act: Act) -> None:
        """What `act(vae)` sets and calls."""
        act(Echo(VAE, self._lines, self.module))

    def say(self, *lines: str) -> None:
        """Lines of one's own."""
        self._lines += [[line] for line in lines]

    def decode(self, shape: tuple[int, ...], latents: str = LATENTS) -> str:
        """The expression of the sample of `latents` of this shape, as the family decodes them now. What the family sets
        for the time of the call is set before it."""
        self.latents_shape, called = self._call(
            "decode", lambda: self.model.family.decode(self.module, torch.zeros(shape))
        )
        returned = interface(self.model.family.name).returns.get("decode", "")
        return f"vae.decode({', '.join([latents, *called])}){'.sample' if 'DecoderOutput' in returned else ''}"

    def encode(self, shape: tuple[int, ...], sample: str) -> str:
        """The expression of the latents (of a posterior, its mode) of `sample` of this shape."""
        _, called = self._call("encode", lambda: self.model.family.encode(self.module, torch.zeros(shape)))
        returned = interface(self.model.family.name).returns.get("encode", "")
        mode = ".mode()" if any(name in returned for name in POSTERIORS) else ""
        return f"vae.encode({', '.join([sample, *called])})[0]{mode}"

    def _call(self, name: str, act: Callable[[], Any]) -> tuple[tuple[int, ...], list[str]]:
        """The shape of the tensor that `act` gives the method `name` of the instance, and what else; it is not made."""
        before, seen = _plain(self.module), []

        def spy(*args: Any, **kwargs: Any) -> Any:
            seen.append((args, kwargs, _plain(self.module)))
            raise _Seen

        vars(self.module)[name] = spy
        try:
            act()
        except _Seen:
            pass
        finally:
            vars(self.module).pop(name)
        if not seen:
            raise EvaluationError(f"{self.model.family.name} does not call its class's {name}")
        (given, *args), kwargs, after = seen[0]
        self.say(*(f"vae.{key} = {said(value)}" for key, value in after.items() if value != before.get(key)))
        while args and args[-1] is None:
            args.pop()
        return tuple(given.shape), [*map(said, args), *(f"{key}={said(value)}" for key, value in kwargs.items())]


class _Seen(Exception):
    """Ends a call that was only looked at."""


def _plain(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, PLAIN)}


def script(model: Model) -> Script:
    """A Script for a model, on an instance as the family settles it. Raises EvaluationError for a class that is not of
    diffusers."""
    if model.config.get("_class_name") != model.family.name or not interface(model.family.name).calls:
        raise EvaluationError(f"{model.name} is no class of diffusers, so no program in diffusers alone decodes it")
    return Script(model, blank(model))


def recorded(model: Model, act: Act) -> list[str]:
    """What `act(vae)` sets and calls, as lines."""
    written = script(model)
    written.do(act)
    return written.lines


def settings(model: Model, plan: DecodePlan) -> str:
    """The lines that configure `vae`, a pipeline's or one's own, as this plan does; empty where it sets nothing.

    `import torch` is taken for granted, and so is that the latents come in the dtype of the weights. An option that
    diffusers does not have stays as a comment. Raises IllegalTiling for tiles that the class cannot have, and
    EvaluationError for a model that is no class of diffusers.
    """
    written = script(model)
    apply(written, plan)
    return "\n".join(written.lines)


def apply(script: Script, plan: DecodePlan) -> None:
    """Write down what a plan sets."""
    family, geometry = script.model.family, script.model.geometry
    if plan.dtype != "fp32":
        script.say(f"vae.to({DTYPES[plan.dtype]})")
    if plan.force_upcast:
        script.say("vae.to(torch.float32)  # weights rounded to half, computed in fp32, as force_upcast does")
    if plan.slicing:
        script.say("vae.enable_slicing()")
    if (tiling := plan.tiling) is not None:
        script.do(lambda vae: family.set_tiling(vae, geometry, tiling))
    if (temporal := plan.temporal) is not None:
        script.do(lambda vae: family.set_temporal(vae, geometry, temporal))
    foreign = {name: value for name, value in plan.options.items() if value and name != STREAM}
    script.say(*(f"# {name} = {value!r}: no option of diffusers" for name, value in foreign.items()))
    if plan.offload != "none":
        needs, call = OFFLOADS[plan.offload]
        if plan.options.get(STREAM):  # streams need an accelerator
            call = f"{call.replace(f'(onload_device={CPU}', f'(onload_device={CUDA}')[:-1]}, use_stream=True)"
        script.say(*([needs] if needs else []), call)


# ---------------------------------------------------------------- whole programs


def of_case(case: Case, model: Model, shape: tuple[int, ...]) -> str:
    """The program of a case of a suite, by its check where that has one of its own; a comment where there is none."""
    about = CHECKS.get(case.check) if case.check is not None else None
    make = about.code if about is not None and about.code is not None else code
    try:
        return make(model, case.plan, shape)
    except (EvaluationError, RequestError) as error:
        return f"# {error}\n"


def code(model: Model, plan: DecodePlan, shape: tuple[int, ...], *, seed: int = 0) -> str:
    """A program without fidelity: build the class, decode seeded latents of `shape` plainly and under `plan`, compare.

    It prints both shapes and the relative RMSE (over the standard deviation of the plain decode), or what was raised.
    Weights are those of the model's own folder where it has one, else random and seeded. Raises as `settings` does.
    """
    half = plan.dtype != "fp32" and not plan.force_upcast

    def write(script: Script) -> None:
        apply(script, plan)
        script.say(f"sample = {script.decode(shape, f'{LATENTS}.to({DTYPES[plan.dtype]})' if half else LATENTS)}")

    return program(model, shape, write, seed=seed)


def program(model: Model, shape: tuple[int, ...], write: Callable[[Script], None], *, seed: int = 0) -> str:
    """The same for what `write` says: it finds `vae`, `latents` and the plain decode `full`, and may leave `sample`."""
    cls, top, body = model.family.name, script(model), script(model)
    top.do(getattr(model.family, "settle", lambda _: None))
    body.say(f"full = {body.decode(shape)}", 'print("full decode", *full.shape)')
    write(body)
    if any(line.startswith("sample = ") for line in body.lines):
        body.say(
            'print("this decode", *sample.shape)',
            "if sample.shape == full.shape:",
            '    print("relative RMSE", ((sample.float() - full).square().mean().sqrt() / full.std()).item())',
        )
    return "\n".join([
        "import torch",
        f"from diffusers import {cls}",
        "",
        f"torch.manual_seed({seed})",
        *_built(model, cls),
        *top.lines,
        f"{LATENTS} = torch.randn({', '.join(map(str, body.latents_shape))})",
        "",
        "torch.set_grad_enabled(False)",
        "try:",
        *(f"    {line}" for line in body.lines),
        "except Exception as error:",
        '    print(f"{type(error).__name__}: {error}")',
        "",
    ])  # fmt: skip


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
