"""Every family of decoders against `transformers`: small random weights that it wrote itself, float32."""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.kernels.padded import PaddedAttention
from engine.kernels.sparse import SparseAttention
from engine.models import ModelError, load
from engine.models.config_gguf import from_metadata
from engine.models.fields import Fields
from engine.models.gguf import GgufFile
from engine.plan import StepPlan
from engine.runner import Feed, TorchRunner
from tests.engine import tiny
from tests.engine.driver import Driver
from tests.engine.test_parity import engine_over
from tests.engine.test_runner import to_meta
from tests.engine.world import job

TOLERANCE = 1e-4  # of logits up to 1e1; float32 sums in another order
KERNELS = {"sparse": SparseAttention, "padded": PaddedAttention}


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def family(request, tmp_path_factory):
    """(name, transformers' model, folder that it wrote)"""
    theirs = tiny.of_family(request.param, **tiny.FAMILIES[request.param])
    return request.param, theirs, tiny.write_folder(tmp_path_factory.mktemp(request.param), theirs)


def prompts(lengths):
    choice = random.Random(1)
    return [[choice.randrange(2, len(tiny.vocabulary())) for _ in range(length)] for length in lengths]


def logits_of(model, ids):
    """[positions, vocabulary]"""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def test_greedy_tokens_are_those_of_transformers_through_chunks_preemption_window_and_rope_context(family):
    name, theirs, folder = family
    runner = TorchRunner(load(str(folder), device="cpu"), device="cpu", num_blocks=26, block_size=4, threads=1)
    engine = engine_over(runner, EngineConfig(max_batch=4, step_tokens=8))
    jobs = [job(prompt, 24, temperature=0.0, ignore_eos=True) for prompt in prompts([30, 3, 18, 9])]
    tokens = {each.request_id: [] for each in jobs}
    waiting, reports, plans = list(jobs), [], []
    while waiting or engine.has_work:
        if waiting and len(plans) % 3 == 0:
            engine.add(waiting.pop(0))
        output = engine.step()
        plans += [output.plan] if output.plan else []
        reports += [ended.report for ended in output.ended]
        for event in (event for events in output.events.values() for event in events):
            tokens[event.request_id] += event.ids
        engine.check_integrity()
    for each in jobs:
        found = tokens[each.request_id]
        assert found == logits_of(theirs, [*each.prompt, *found[:-1]])[len(each.prompt) - 1 :].argmax(-1).tolist()
    chunks = [chunk for plan in plans for chunk in plan.chunks]
    assert sum(chunk.request_id == jobs[0].request_id and chunk.end <= 30 for chunk in chunks) >= 3, "no chunks"
    assert any({1} < {len(chunk.tokens) for chunk in plan.chunks} for plan in plans), "no prompts beside others"
    assert sum(report.preemptions for report in reports) >= 1
    assert min(len(each.prompt) for each in jobs) + 23 > tiny.WINDOW
    assert max(chunk.end for chunk in chunks) > 2 * tiny.ORIGINAL_CONTEXT.get(name, 0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_are_those_of_transformers_in_any_mix_of_rows(family, kernel):
    _, theirs, folder = family
    model = load(str(folder), device="cpu")
    runner = TorchRunner(model, device="cpu", num_blocks=200, block_size=4, threads=1)
    runner._attention = KERNELS[kernel](runner._memory, num_heads=model.config.num_heads, scoring=model.config.scoring)
    runner._memory._all.fill_(float("nan"))  # what earlier owners left
    driver, budgets, compared = Driver(runner), random.Random(2), 0
    texts = [driver.text(prompt) for prompt in prompts([29, 1, 17, 6])]
    found = {text: [] for text in texts}
    while unfinished := [text for text in texts if len(text.completion) < 16]:
        rows = {text: min(text.missing, budgets.choice([1, 2, 9, 20])) for text in unfinished}
        for number, row in drawn_from(runner, [driver.chunk(text, count) for text, count in rows.items()]).items():
            found[texts[number - 1]].append(row)
        driver.step(rows)
    for text in texts:
        wanted = logits_of(theirs, text.known[:-1])[text.given - 1 :]
        torch.testing.assert_close(torch.stack(found[text]), wanted, atol=TOLERANCE, rtol=0)
        compared += len(wanted)
    assert compared == 64
    assert max(len(text.known) for text in texts) > 3 * tiny.WINDOW


def drawn_from(runner, chunks):
    feed = Feed.of(StepPlan(number=0, chunks=chunks))
    arrays = [torch.from_numpy(array) for array in (feed.tokens, feed.positions, feed.drawing)]
    with torch.inference_mode():
        rows = runner._decoder.forward(arrays[0], arrays[1], runner._attention.prepare(feed.spans), arrays[2])
    return {chunk.request_id.int: row for chunk, row in zip([c for c in feed.chunks if c.draws], rows, strict=True)}


# Values that no writer of a configuration would think of, for every key that there is.
HOSTILE = (
    None,
    -1,
    0,
    2**31,
    10**30,
    1e308,
    float("nan"),
    "",
    "x",
    [],
    {},
    [[]],
    True,
    [0] * 7,
    ["full_attention"] * 9,
)


def test_a_configuration_with_anything_anywhere_loads_or_is_refused_in_a_sentence(family, tmp_path):
    folder = Path(shutil.copytree(family[2], tmp_path / "hostile"))
    path, choice = folder / "config.json", random.Random(7)
    config = json.loads(path.read_text())
    keys = [(config, key) for key in config]
    keys += [(value, key) for value in config.values() if isinstance(value, dict) for key in value]
    refused = []
    for mapping, key in keys:
        kept = mapping[key]
        for value in (*choice.sample(HOSTILE, 2), None):
            mapping[key] = value
            path.write_text(json.dumps(config))
            try:
                load(str(folder), device="cpu")
            except ModelError as error:
                refused.append(str(error))
        mapping[key] = kept
    assert len(refused) > len(keys)
    assert max(map(len, refused)) < 400


def test_a_configuration_cut_anywhere_is_refused_in_a_sentence(tmp_path):
    folder = tiny.write_folder(tmp_path, tiny.of_family("gemma2", **tiny.FAMILIES["gemma2"]))
    whole = (folder / "config.json").read_text().rstrip()
    for length in range(0, len(whole), 7):
        (folder / "config.json").write_text(whole[:length])
        with pytest.raises(ModelError, match=r"config\.json is not JSON"):
            load(str(folder), device="cpu")


WRONG = {
    "a thousand million layers": ({"block_count": 2**31 - 1}, r"outside 1\.\.1024"),
    "no layer": ({"block_count": 0}, "block_count is 0"),
    "a window that is a text": ({"attention.sliding_window": "x"}, "sliding_window should be a whole number"),
    "a period of nothing": ({"attention.sliding_window_pattern": 0}, "pattern is 0"),
    "a pattern of numbers": ({"attention.sliding_window_pattern": [7, 1]}, "list of true and false"),
    "a pattern of other layers": ({"attention.sliding_window_pattern": [True]}, "tells of 1 layers, but there are 2"),
    "a cap of nothing": ({"attn_logit_softcapping": 0.0}, "not a positive number"),
    "heads of many kinds": ({"attention.head_count": [4, 4]}, "head_count should be a whole number"),
    "stretched another way": ({"rope.scaling.type": "yarn"}, "'yarn' is not supported"),
    "experts": ({"expert_count": 8}, "mixture-of-experts"),
}


@pytest.mark.parametrize(("change", "said"), WRONG.values(), ids=WRONG.keys())
def test_metadata_that_makes_no_sense_is_refused_with_what_is_wrong(tmp_path, change, said):
    theirs = tiny.of_family("gemma2", **tiny.FAMILIES["gemma2"])
    with GgufFile(tiny.write_gguf_of(tmp_path / "m.gguf", theirs)) as file:
        changed = file.metadata | {f"gemma2.{key}": value for key, value in change.items()}
        with pytest.raises(ModelError, match=said):
            from_metadata(Fields(changed, where="metadata"), vocab_size=9, tensors=file.tensors.keys())


GEMMA_ROPES = tiny.FAMILIES["gemma3_text"]["rope_parameters"]
# What a family has and Llama has not, by what would take it away. The file then still loads.
MATTERS = {
    "mistral": [{"sliding_window": None}, {"sliding_window": 11}],
    "smollm3": [{"no_rope_layers": [1] * 5}, {"no_rope_layers": [1, 1, 0, 1, 1]}],
    "qwen2": [{"use_sliding_window": False, "layer_types": None}, {"layer_types": ["sliding_attention"] * 2}],
    "gemma2": [
        {"sliding_window": 11},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"query_pre_attn_scalar": 16},
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
    ],
    "gemma3_text": [
        {"sliding_window": 11},
        {"layer_types": ["sliding_attention"] * 4 + ["full_attention"] * 3},
        {"rope_parameters": GEMMA_ROPES | {"full_attention": {"rope_type": "default", "rope_theta": 1000.0}}},
        {"rope_parameters": GEMMA_ROPES | {"sliding_attention": {"rope_type": "default", "rope_theta": 90.0}}},
        {"final_logit_softcapping": 6.0},
    ],
}


@pytest.mark.parametrize(
    ("name", "changes"), [(name, changes) for name, several in MATTERS.items() for changes in several]
)
def test_each_setting_of_a_family_makes_a_difference(tmp_path, name, changes):
    folder = tiny.write_folder(tmp_path, tiny.of_family(name, **tiny.FAMILIES[name]))
    before = prompt_logits(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert (prompt_logits(folder) - before).abs().max() > 100 * TOLERANCE


# What GGUF metadata can't tell is given the value that goes without saying there.
UNTOLD = {
    "llama": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}},
    "qwen2": {"use_sliding_window": False},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16, "final_logit_softcapping": 6.0},
}


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_a_gguf_and_a_folder_of_one_model_agree(tmp_path, name):
    theirs = tiny.of_family(name, **tiny.FAMILIES[name] | UNTOLD.get(name, {}))
    file = tiny.write_gguf_of(tmp_path / "m.gguf", theirs)
    folder = tiny.write_folder(tmp_path / "folder", theirs)
    assert load(str(file), device="cpu").config == load(str(folder), device="cpu").config
    torch.testing.assert_close(prompt_logits(file), prompt_logits(folder), atol=TOLERANCE, rtol=0)


def test_the_stretch_of_llama_3_comes_from_a_gguf_as_factors(tmp_path):
    theirs = tiny.of_family("llama", **tiny.FAMILIES["llama"])
    file = tiny.write_gguf_of(tmp_path / "m.gguf", theirs)
    torch.testing.assert_close(prompt_logits(file), logits_of(theirs, prompts([40])[0])[-1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("layers", [46, 62])
def test_the_largest_gemmas_scale_queries_by_the_width_for_each_head(layers):
    """26 and 27 thousand million weights; the metadata doesn't say it."""
    family = {46: "gemma2", 62: "gemma3"}[layers]
    shape = {
        "general.architecture": family,
        f"{family}.attention.head_count": 32,
        f"{family}.embedding_length": 5376,
        f"{family}.feed_forward_length": 21_504,
        f"{family}.attention.key_length": 128,
        f"{family}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{family}.context_length": 8192,
        f"{family}.attention.sliding_window": 1024,
    }
    scalars = [
        from_metadata(Fields(shape | {f"{family}.block_count": number}, where="metadata"), vocab_size=9, tensors=())
        for number in (layers, layers - 1)
    ]
    assert [config.query_scalar for config in scalars] == [168, 128]


def test_a_pattern_of_windows_may_be_told_layer_by_layer(tmp_path):
    theirs = tiny.of_family("gemma2", **tiny.FAMILIES["gemma2"])
    told = {"general.architecture": "gemma2", "gemma2.attention.sliding_window_pattern": [False, True]}
    with GgufFile(tiny.write_gguf_of(tmp_path / "m.gguf", theirs)) as file:
        fields = Fields(file.metadata | told, where="metadata")
        config = from_metadata(fields, vocab_size=9, tensors=file.tensors.keys())
    assert [layer.window for layer in config.layers] == [None, tiny.WINDOW]


def test_the_half_of_gemma_3_that_reads_is_taken_from_a_model_that_also_sees(tmp_path):
    text = tiny.of_family("gemma3_text", **tiny.FAMILIES["gemma3_text"])
    eye = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    eye |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text.config, vision_config=eye, mm_tokens_per_image=4)
    seeing = transformers.Gemma3ForConditionalGeneration(config)
    seeing.model.language_model.load_state_dict(text.model.state_dict())
    folders = [tiny.write_folder(tmp_path / name, model) for name, model in (("text", text), ("seeing", seeing))]
    assert '"model_type": "gemma3"' in (folders[1] / "config.json").read_text()
    assert torch.equal(*map(prompt_logits, folders))


def test_bfloat16_stays_about_as_near_as_that_of_transformers(family):
    """The path of CUDA, run on the CPU: norms with an offset and all sums within an operation are float32's."""
    _, theirs, folder = family
    prompt = prompts([40])[0]
    exact = logits_of(theirs, prompt)[-1]
    rough = logits_of(copy.deepcopy(theirs).to(torch.bfloat16), prompt)[-1].float()
    ours = prompt_logits(folder, torch.bfloat16).float()
    assert (ours - exact).norm() < 2 * (rough - exact).norm()


def test_nothing_within_a_forward_of_any_family_waits_for_the_device(family):
    """On the meta device a tensor has no values: whatever would fetch one raises."""
    model = load(str(family[2]), device="cpu", dtype=torch.bfloat16)
    driver = Driver(TorchRunner(model, device="cpu", num_blocks=80, block_size=4, threads=1))
    texts = [driver.text(prompt) for prompt in prompts([30, 20, 6])]
    driver.finish(texts[:2], 1)
    feed = Feed.of(StepPlan(number=0, chunks=[driver.chunk(text, text.missing) for text in texts]))
    attend = driver.runner._attention.prepare(feed.spans)
    with torch.inference_mode(), torch.device("meta"):
        rows = [torch.empty(array.shape, dtype=torch.int64) for array in (feed.tokens, feed.positions, feed.drawing)]
        found = to_meta(driver.runner._decoder).forward(rows[0], rows[1], to_meta(attend), rows[2])
    assert found.shape == (3, len(tiny.vocabulary()))


def test_no_step_builds_more_than_two_views_and_short_contexts_share_one(family):
    model = load(str(family[2]), device="cpu")
    driver = Driver(TorchRunner(model, device="cpu", num_blocks=80, block_size=4, threads=1))
    short, longer, long = (driver.text(prompt) for prompt in prompts([tiny.WINDOW, tiny.WINDOW + 1, 40]))
    for texts, most in (([short], 1), ([longer], 2), ([short, long], 2)):
        feed = Feed.of(StepPlan(number=0, chunks=[driver.chunk(text, text.missing) for text in texts]))
        views = driver.runner._attention.prepare(feed.spans)._views
        assert len(views) == model.config.num_layers
        windows = {layer.window for layer in model.config.layers}
        assert len(set(map(id, views))) == min(most, len(windows))


def prompt_logits(path, dtype=torch.float32):
    driver = Driver(TorchRunner(load(str(path), device="cpu", dtype=dtype), device="cpu", num_blocks=20, threads=1))
    text = driver.text(prompts([40])[0])
    return drawn_from(driver.runner, [driver.chunk(text, 40)])[text.number]
