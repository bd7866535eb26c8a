"""`fidelity recommend`: the Pareto front of a run under a budget, never what did not pass; plans from predictions."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from msgspec.structs import replace

from fidelity import cli, offers, proposals, receptive, recommend, registry, standings
from fidelity.errors import FidelityError, RequestError
from fidelity.models import configs
from fidelity.offers import Budget
from fidelity.records import (
    STREAM,
    CaseResult,
    DecodePlan,
    Measurement,
    MemoryTrace,
    Model,
    Reference,
    RunResult,
    Tiling,
    to_json,
)

registry.load_plugins()
KL = "reference-kl"
MIB = 2**20
TILED = Tiling(16, 0.25)


def case(peak: int | None, seconds: float, rmse: float | None, *, latents: str = "a", verdict: str = "pass",
         model: str = KL, about: dict | None = None, **plan: object) -> CaseResult:  # fmt: skip
    settings = DecodePlan(**plan)  # type: ignore[arg-type]
    figures = {"rmse": Measurement("rmse", rmse, "grey levels"), "lpips_alex": Measurement("lpips_alex", 0.01)}
    if settings.tiling:
        figures["tile_seam"] = Measurement("tile_seam", 0.5, "grey levels")
    memory = MemoryTrace(reason="not measured") if peak is None else MemoryTrace(allocated_peak_bytes=peak * MIB)
    return CaseResult(f"{model}/{latents}/{settings.id}", model, latents, settings, verdict, measurements=figures,
                      memory=memory, seconds={"decode": seconds}, **(about or {}))  # type: ignore[arg-type]  # fmt: skip


def run(*cases: CaseResult, **about: object) -> RunResult:
    return RunResult({"name": "small"}, {"class": "a machine"}, cases=cases, **about)  # type: ignore[arg-type]


def find(name: str) -> Model:
    return registry.MODELS.get(name)


def advise(result: RunResult, budget: int, headroom: float = 0.0) -> offers.Advice:
    (advice,) = recommend.from_run(result, find, Budget(budget * MIB, headroom))
    return advice


def plans(advice: offers.Advice) -> list[DecodePlan]:
    return [offer.plan for offer in advice.offers]


PLAIN, BF16 = case(100, 1.0, 0.0), case(60, 1.1, 0.5, dtype="bf16")
SLICED = case(70, 9.0, 0.2, slicing=True)
SMALL = case(20, 5.0, 3.0, tiling=TILED)
WASTED = case(60, 5.0, 0.6, dtype="bf16", offload="model")

# ---------------------------------------------------------------- from a run


def test_the_front_is_cheapest_first_and_leaves_out_what_another_covers():
    advice = advise(run(PLAIN, BF16, SLICED, SMALL, WASTED), 100)
    assert plans(advice) == [SMALL.plan, BF16.plan, SLICED.plan, PLAIN.plan]
    assert [offer.merits for offer in advice.offers] == [
        ("least memory",), (), (), ("closest to the golden", "fastest"),
    ]  # fmt: skip
    first = advice.offers[0]
    assert (first.case, first.need_bytes, first.seconds, first.rmse, first.lpips, first.seam) == (
        SMALL.id, 20 * MIB, 5.0, 3.0, 0.01, 0.5,
    )  # fmt: skip
    assert any("fidelity is RMSE" in said and "seams 1" in said for said in advice.basis)


@pytest.mark.parametrize(("limit", "fits"), [(60, True), (59, False)])
def test_a_budget_is_met_when_equal(limit, fits):
    assert (BF16.plan in plans(advise(run(PLAIN, BF16, SMALL), limit))) == fits


def test_headroom_is_left_free_and_the_least_budget_is_named():
    assert Budget(100, 0.1).limit == 90
    for need, headroom in ((90, 0.1), (10**9 + 7, 0.37), (1, 0.99)):
        least = Budget(0, headroom).least(need)
        assert Budget(least, headroom).limit >= need > Budget(least - 1, headroom).limit
    assert plans(advise(run(PLAIN, BF16), 66, 0.1)) == []
    assert plans(advise(run(PLAIN, BF16), 67, 0.1)) == [BF16.plan]


def test_times_within_reach_of_each_other_are_equal_and_the_simpler_plan_stays():
    slower, faster = case(60, 1.4, 0.5, dtype="bf16"), case(60, 1.0, 0.5, dtype="bf16", offload="model")
    assert plans(advise(run(slower, faster), 100)) == [slower.plan]
    much = replace(slower, seconds={"decode": 1.51})
    assert plans(advise(run(much, faster), 100)) == [faster.plan]


NEVER = {
    "failed": case(10, 1.0, 9.0, verdict="fail", slicing=True),
    "failed as expected": case(10, 1.0, 9.0, verdict="fail", about={"expected": "fail"}, slicing=True),
    "passed though it should fail": case(10, 1.0, 0.0, about={"expected": "fail", "surprise": True}, slicing=True),
    "could not be judged": case(10, 1.0, 0.0, verdict="error", slicing=True),
    "not applicable": case(10, 1.0, 0.0, verdict="not_applicable", slicing=True),
    "emulated": case(10, 1.0, 0.0, about={"receipts": {"precision": {"emulated": True}}}, dtype="fp16"),
    "no peak": case(None, 1.0, 0.0, slicing=True),
    "no RMSE": case(10, 1.0, None, slicing=True),
}


@pytest.mark.parametrize("why", NEVER)
def test_what_did_not_pass_with_figures_of_its_own_is_never_offered(why):
    assert plans(advise(run(PLAIN, NEVER[why]), 1000)) == [PLAIN.plan]


def test_a_plan_that_was_not_judged_with_all_latents_is_never_offered():
    other = case(100, 1.0, 0.0, latents="b")
    assert plans(advise(run(PLAIN, other, BF16), 1000)) == [PLAIN.plan]


def test_the_largest_need_over_all_latents_is_what_must_fit():
    result = run(PLAIN, replace(PLAIN, latents="b", memory=MemoryTrace(allocated_peak_bytes=300 * MIB)))
    assert plans(advise(result, 299)) == []
    assert advise(result, 300).offers[0].need_bytes == 300 * MIB


def test_what_a_device_reserves_is_what_must_fit():
    memory = MemoryTrace(allocated_peak_bytes=50 * MIB, reserved_peak_bytes=80 * MIB)
    result = replace(run(replace(PLAIN, memory=memory)), suite={"name": "s", "request": {"device": "cuda:0"}})
    assert plans(advise(result, 79)) == []
    advice = advise(result, 80)
    assert "reserved peak" in advice.basis[0]
    assert 'vae.to("cuda")' in (advice.offers[0].code or "")


def test_latents_whose_reference_drifted_recommend_nothing():
    drifted = Reference(KL, "a", 3.0, 0.1, ok=False, same_environment=True)
    advice = advise(run(PLAIN, reference=(drifted,)), 1000)
    assert (advice.offers, advice.nearest) == ((), None)
    assert advice.reason == "no plan passed every gate with its memory, RMSE and time measured"
    (summary,) = standings.summarize(run(PLAIN, reference=(drifted,)))[KL]
    assert summary.failed == ("a",)


def test_where_nothing_fits_the_nearest_says_what_it_needs():
    advice = advise(run(PLAIN, BF16, SMALL), 15, 0.1)
    assert advice.offers == ()
    assert advice.nearest is not None
    assert advice.nearest.plan == SMALL.plan
    text = "\n".join(offers.lines(advice))
    assert "nothing that passed every gate fits 13.5 MiB" in text
    assert "nearest: fp32, tile 16 overlap 0.25: it needs 20.0 MiB, a budget of 22.2 MiB" in text


def test_requests_that_a_run_cannot_answer():
    with pytest.raises(RequestError, match=r"is partial.*--resume"):
        advise(run(PLAIN, partial=True), 100)
    with pytest.raises(RequestError, match="judged nothing against a golden"):
        recommend.from_run(run(), find, Budget(100))
    with pytest.raises(RequestError, match=f"model 'other' is not in the run of small: it has {KL}"):
        recommend.from_run(run(PLAIN), find, Budget(100), only="other")
    with pytest.raises(RequestError, match="give --model nobody=PATH"):
        recommend.from_run(run(case(1, 1.0, 0.0, model="nobody")), recommend.known({}, {}), Budget(100))


def test_a_run_of_two_models_advises_each_or_the_one_that_was_named():
    result = run(PLAIN, case(10, 1.0, 0.0, model="reference-tiny"))
    told = [advice.model for advice in recommend.from_run(result, find, Budget(200 * MIB))]
    assert told == [KL, "reference-tiny"]
    (one,) = recommend.from_run(result, find, Budget(200 * MIB), only="reference-tiny")
    assert one.model == "reference-tiny"


@pytest.mark.parametrize(("text", "share"), [("10%", 0.1), ("0.25", 0.25), (" 0 ", 0.0), ("12.5 %", 0.125)])
def test_headroom_is_a_share(text, share):
    assert offers.parse_headroom(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["10", "100%", "-1%", "a lot", "1"])
def test_another_headroom_is_refused(text):
    with pytest.raises(RequestError, match="--headroom"):
        offers.parse_headroom(text)


# ---------------------------------------------------------------- code


def test_code_loads_from_a_path_and_sets_what_the_plan_sets():
    plan = DecodePlan(dtype="bf16", slicing=True, tiling=TILED, offload="sequential")
    lines, reason = offers.code(find(KL), plan, "cuda")
    assert reason is None
    assert lines is not None
    assert lines.splitlines()[:3] == ["import torch", "from accelerate import cpu_offload",
                                      "from diffusers import AutoencoderKL"]  # fmt: skip
    for said in ('AutoencoderKL.from_pretrained("PATH")', "vae.to(torch.bfloat16)", "vae.enable_slicing()",
                 "vae.tile_latent_min_size = 16", 'cpu_offload(vae, torch.device("cuda"))'):  # fmt: skip
        assert said in lines
    assert 'vae.to("cuda")' not in lines, "an offload brings the weights in"
    grouped, _ = offers.code(find(KL), DecodePlan(offload="group_leaf"), "cuda")
    assert 'onload_device=torch.device("cuda"), offload_device=torch.device("cpu")' in (grouped or "")


@pytest.mark.slow
def test_code_runs_as_it_stands():
    import torch

    from fidelity.models.reference import FOLDER

    lines, _ = offers.code(find(KL), DecodePlan(dtype="bf16", slicing=True, tiling=TILED))
    assert lines is not None
    ran: dict = {}
    exec(lines.replace('"PATH"', repr(str(FOLDER))), ran)
    with torch.no_grad():
        sample = ran["vae"].decode(torch.zeros(2, 4, 24, 24, dtype=torch.bfloat16)).sample
    assert (tuple(sample.shape), sample.dtype) == ((2, 3, 192, 192), torch.bfloat16)


def test_a_model_that_is_no_class_of_diffusers_has_no_code_and_a_reason():
    model = replace_config(find(KL), {"_class_name": "Another"})
    why = f"{KL} is no class of diffusers: there is no code of diffusers to paste"
    assert offers.code(model, DecodePlan()) == (None, why)


def replace_config(model: Model, config: dict) -> Model:
    import dataclasses

    return dataclasses.replace(model, config=config)


# ---------------------------------------------------------------- from predictions


def test_the_reach_of_a_decoder_is_that_of_its_convolutions():
    """Stable Diffusion's decoder by hand: a 3×3 kernel reaches one latent pixel at their scale, a half at twice it …"""
    by_hand = 1 + 4 + 6 + 1 / 2 + 6 / 2 + 1 / 4 + 6 / 4 + 1 / 8 + 6 / 8 + 1 / 8
    found = proposals.reach_of(configs.from_name("sd15"))
    assert found.radius == math.ceil(by_hand) == 18
    assert found.least_tile == 37
    assert found.everywhere == ("GroupNorm", "Attention")


@pytest.mark.parametrize("name", ["ltx-video", "minimax-h3", "consistency-decoder"])
def test_a_reach_that_cannot_be_told_has_a_reason(name):
    found = proposals.reach_of(configs.from_name(name))
    assert (found.radius is None) == (found.reason is not None)
    assert found.least_tile == (receptive.PROBE if found.radius is None else 2 * found.radius + 1)
    assert (found.radius is None) == (name != "ltx-video")


def test_what_cannot_be_predicted_is_said_in_one_line():
    def asks(module, latents):
        raise RuntimeError("it asks for\nmore than shapes")

    model = find(KL)
    family = type("Asking", (type(model.family),), {"decode": staticmethod(asks)})()
    with pytest.raises(FidelityError, match="cannot be predicted: RuntimeError: it asks for") as said:
        proposals.propose(dataclasses.replace(model, family=family), (128, 128), Budget(2**40))
    assert "\n" not in str(said.value)


@pytest.mark.slow
def test_videos_are_proposed_in_chunks_and_streamed_where_the_class_can():
    video = find("reference-video")
    found = proposals.propose(video, (128, 128), Budget(2**34), frames=33, device="cuda")
    assert any(offer.plan.temporal is not None for offer in found.offers)
    chunked = next(offer for offer in found.offers if offer.plan.temporal is not None)
    assert chunked.work > 1
    assert chunked.need_bytes < max(offer.need_bytes for offer in found.offers)
    plans = list(proposals._plans(find("small-wan"), (1, 4, 9, 8, 8), [], 0.25))
    assert any(plan.options.get("streaming") == proposals.SEGMENT for plan in plans)


def test_a_stream_waits_for_the_first_call_alone():
    plan = DecodePlan(offload="group_block", tiling=TILED)
    both = [proposals.Proposal(proposals.predict.of_shape(find(KL), (1, 4, 20, 20), each, "cuda"), 1.0)
            for each in (plan, replace(plan, options={STREAM: True}))]  # fmt: skip
    plain, ahead = both
    assert (plain.waited, ahead.waited) == (plain.moved, plain.moved // 4)
    assert ahead.need >= plain.need
    assert proposals.front(both) == both


def test_emulated_plans_are_shown_as_predicted_and_on_no_front():
    half = case(None, 9.0, 0.1, dtype="fp16", about={"receipts": {"precision": {"emulated": True}}})
    half = replace(half, memory=MemoryTrace(reason="emulated", predicted_peak_bytes=50 * MIB))
    advice = advise(run(PLAIN, BF16, half), 60)
    assert plans(advice) == [BF16.plan]
    (told,) = advice.unmeasured
    assert (told.plan, told.predicted_peak_bytes, told.case) == (half.plan, 50 * MIB, half.id)
    said = "\n".join(offers.lines(advice))
    assert "predicted, not measured" in said
    assert "50.0 MiB predicted" in said
    assert not advise(run(PLAIN, BF16, half), 49).unmeasured
    untold = replace(half, memory=MemoryTrace(reason="emulated"))
    assert not advise(run(PLAIN, BF16, untold), 60).unmeasured


def test_work_counts_what_overlaps_decode_again():
    shape = (1, 4, 24, 24)
    assert proposals.work(find(KL), shape, DecodePlan()) == 1.0
    # tiles of 16 start at 0 and 12: (16 + 12) / 24 each way
    assert proposals.work(find(KL), shape, DecodePlan(tiling=TILED)) == pytest.approx((28 / 24) ** 2)


def proposed(**about: object) -> offers.Advice:
    return proposals.propose(find(KL), (480, 480), Budget(about.pop("budget", 400) * MIB), **about)  # type: ignore


@pytest.mark.slow
def test_predicted_plans_fit_and_are_a_front_for_each_dtype():
    advice = proposed()
    assert advice.source == "prediction"
    assert any("PREDICTED" in said and "NOT measured" in said for said in advice.basis)
    assert all(offer.need_bytes <= advice.limit_bytes for offer in advice.offers)
    assert [offer.need_bytes for offer in advice.offers] == sorted(offer.need_bytes for offer in advice.offers)
    assert all(offer.rmse is None and offer.seconds is None and offer.case is None for offer in advice.offers)
    for dtype in ("fp32", "bf16"):
        mine = [offer for offer in advice.offers if offer.plan.dtype == dtype]
        assert mine
        works = [offer.work for offer in mine if not offer.moved_bytes]
        assert works == sorted(works, reverse=True), "what needs more, works less"
    tiles = [offer.plan.tiling.tile for offer in advice.offers if offer.plan.tiling is not None]
    assert min(tiles) >= proposals.reach_of(find(KL)).least_tile


@pytest.mark.slow
def test_a_budget_below_all_gives_the_nearest_prediction(monkeypatch):
    monkeypatch.setattr(proposals, "SHARES", (2,))
    monkeypatch.setattr(proposals, "DTYPES", ("bf16",))
    advice = proposed(budget=1)
    assert advice.offers == ()
    assert advice.nearest is not None
    assert advice.nearest.need_bytes > advice.limit_bytes
    assert "predicted plans fits" in (advice.reason or "")


@pytest.mark.parametrize("overlap", [-0.1, 1.0])
def test_an_overlap_that_is_no_share_is_refused(overlap):
    with pytest.raises(RequestError, match="--overlap"):
        proposed(overlap=overlap)


# ---------------------------------------------------------------- the command


def command(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(["recommend", *map(str, arguments)])
    printed = capsys.readouterr()
    return end.value.code, printed.out, printed.err


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "results.json").write_bytes(to_json(run(PLAIN, BF16, SMALL)))
    return tmp_path


def test_the_command_prints_plans_and_exits_1_where_nothing_fits(capsys, folder):
    code, out, _ = command(capsys, folder, "--budget", "70MiB")
    assert code == 0
    assert "1. fp32, tile 16 overlap 0.25  (least memory)" in out
    assert "2. bf16" in out
    assert f"case {BF16.id}" in out
    code, out, _ = command(capsys, folder, "--budget", "10MiB")
    assert code == 1
    assert "nearest:" in out
    code, out, _ = command(capsys, folder, "--budget", "70MiB", "--json")
    (told,) = json.loads(out)
    assert [offer["plan"]["dtype"] for offer in told["offers"]] == ["fp32", "bf16"]
    assert told["limit_bytes"] == 63 * MIB


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gone", "--budget", "1GiB"], "is missing: no fidelity run is there"),
        ([KL, "--budget", "1GiB"], "is a model: say --size HxW"),
        (["sdxl", "--budget", "1GiB"], "is a model: say --size HxW"),
        (["FOLDER", "--budget", "a lot"], "--budget 'a lot'"),
        (["FOLDER", "--budget", "1GiB", "--headroom", "10"], "--headroom '10'"),
        (["FOLDER", "--budget", "1GiB", "--batch", "2"], "--batch is for a prediction"),
        (["FOLDER", "--budget", "1GiB", "--size", "64x64"], "is a run, of which the sizes are known"),
        (["FOLDER", "--budget", "1GiB", "--model", "sdxl"], "model 'sdxl' is not in the run"),
        (["no-such-model", "--budget", "1GiB", "--size", "64x64"], "unknown model 'no-such-model'"),
        ([KL, "--budget", "1GiB", "--size", "65x64"], "decodes multiples of 8 pixels; nearest: 64x64"),
        ([KL, "--budget", "1GiB", "--size", "64x64", "--model", KL], "--model picks a model of a run"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_one_line_and_status_2(capsys, folder, arguments, says):
    given = [str(folder) if each == "FOLDER" else each for each in arguments]
    code, out, err = command(capsys, *given)
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1
