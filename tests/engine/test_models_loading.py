"""What can be loaded is loaded whole; what can't is refused in a sentence."""

from __future__ import annotations

import json
import shutil

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.kernels.device import DeviceError, resolve
from engine.models import ModelError, load
from engine.models.config import RopeKind
from tests.engine import tiny


@pytest.fixture
def folder(tmp_path):
    return tiny.write_folder(tmp_path / "model")


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder, change):
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def split(folder):
    """The folder's weights in two shards with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    where = {name: f"model-{1 + (at > 7)}.safetensors" for at, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: weights[name] for name in names if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def weights_of(model):
    return [model.decoder.embedding, model.decoder.norm, *(layer.mlp_norm for layer in model.decoder.layers)]


def test_shards_hold_the_same_model_as_one_file(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "shards")
    split(tmp_path / "shards")
    one, sharded = load(str(folder), device="cpu"), load(str(tmp_path / "shards"), device="cpu")
    assert one.config == sharded.config
    assert all(torch.equal(a, b) for a, b in zip(weights_of(one), weights_of(sharded), strict=True))


def test_a_gguf_and_a_folder_of_the_same_weights_have_one_configuration(smollm2, smollm2_folder):
    assert load(str(smollm2_folder), device="cpu").config == smollm2.config


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_any_float_type_can_be_loaded_as_any(folder, dtype):
    change_weights(folder, lambda weights: weights.update({name: t.to(dtype) for name, t in weights.items()}))
    model = load(str(folder), device="cpu", dtype=torch.float32)
    assert model.decoder.embedding.dtype == torch.float32
    assert load(str(folder), device="cpu", dtype=dtype).decoder.embedding.dtype == dtype


@pytest.mark.parametrize(("given", "found"), [(7, (7,)), ([0, 5], (0, 5))])
def test_ends_of_sequence_are_those_of_the_generation_settings(folder, given, found):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    assert load(str(folder), device="cpu").eos_token_ids == found


def test_a_template_in_a_file_of_its_own_goes_before_one_in_the_settings(folder):
    (folder / "chat_template.jinja").write_text("own file")
    assert load(str(folder), device="cpu").chat_template == "own file"


def test_of_several_templates_the_default_counts(folder):
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    change_json(folder / "tokenizer_config.json", chat_template=named)
    assert load(str(folder), device="cpu").chat_template == "yes"


def test_older_configurations_spell_rope_another_way(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    path.write_text(json.dumps(config | {"rope_theta": 500.0, "rope_scaling": scaling}))
    rope = load(str(folder), device="cpu").config.layers[0].rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_context) == (RopeKind.LLAMA3, 500.0, 8.0, 64)
    path.write_text(json.dumps(config | {"rope_scaling": {"type": "linear", "factor": 2.0}}))
    rope = load(str(folder), device="cpu").config.layers[0].rope
    assert (rope.kind, rope.theta, rope.factor) == (RopeKind.LINEAR, 10_000.0, 2.0)


def config(**changes):
    return lambda folder: change_json(folder / "config.json", **changes)


def gone(name):
    return lambda folder: (folder / name).unlink()


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def weights(change):
    return lambda folder: change_weights(folder, change)


def index(where):
    def change(folder):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))

    return change


Q = "model.layers.0.self_attn.q_proj.weight"
WRONG = {
    "no configuration": (gone("config.json"), "lacks config.json"),
    "no tokenizer": (gone("tokenizer.json"), "lacks tokenizer.json"),
    "no weights": (gone("model.safetensors"), "model.safetensors is missing"),
    "not JSON": (text("config.json", "{"), "config.json is not JSON"),
    "JSON without end": (text("config.json", "[" * 100_000), "config.json is not JSON"),
    "no object": (text("config.json", "[]"), "not a JSON object"),
    "bytes": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xff"), "UTF-8"),
    "another architecture": (config(model_type="mamba"), "'mamba' is not supported"),
    "no architecture": (config(model_type=None), "lacks model_type"),
    "another activation": (config(hidden_act="gelu"), "'gelu'"),
    "quantised": (config(quantization_config={"quant_method": "awq"}), "quantised"),
    "dynamic rope": (config(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "'dynamic'"),
    "rope of a half": (config(partial_rotary_factor=0.5), "part of each head"),
    "a size that is a text": (config(hidden_size="32"), "whole number"),
    "a size below nothing": (config(num_hidden_layers=-1), "outside"),
    "an endless size": (config(intermediate_size=10**30), "outside"),
    "an odd head": (config(head_dim=7), "odd"),
    "uneven heads": (config(num_key_value_heads=3), "evenly"),
    "an end outside": (text("generation_config.json", '{"eos_token_id": 99999}'), "99999 lies outside"),
    "a broken tokenizer": (text("tokenizer.json", '{"model": {"type": "Pickle"}}'), "tokenizer is not usable"),
    "rubbish for weights": (text("model.safetensors", "x" * 4096), "not a whole safetensors"),
    "weights cut short": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9]),
        "not a whole safetensors",
    ),
    "a tensor too few": (weights(lambda w: w.pop(Q)), f"{Q} is missing"),
    "a tensor too many": (weights(lambda w: w.update(extra=w[Q].clone())), "no use for, such as extra"),
    "another shape": (weights(lambda w: w.update({Q: w[Q][:, :-1].contiguous()})), r"\[32, 31\].*\[32, 32\]"),
    "whole numbers": (weights(lambda w: w.update({Q: w[Q].int()})), "stored as I32"),
    "a shard elsewhere": (index({Q: "../other/model.safetensors"}), "own folder"),
    "a shard that is a pickle": (index({Q: "pytorch_model.bin"}), "own folder"),
    "a shard of no name": (index({Q: 7}), "own folder"),
    "a missing shard": (index({Q: "model-7.safetensors"}), "model-7.safetensors is missing"),
    "a tensor in no shard": (index({Q: "model.safetensors", "ghost": "model.safetensors"}), "ghost"),
}


@pytest.mark.parametrize(("change", "said"), WRONG.values(), ids=WRONG.keys())
def test_a_folder_that_is_not_a_whole_model_is_refused_with_what_is_wrong(folder, change, said):
    change(folder)
    with pytest.raises(ModelError, match=said) as caught:
        load(str(folder), device="cpu")
    assert str(folder) in str(caught.value)


def test_biases_that_the_configuration_asks_for_must_be_there(folder):
    change_json(folder / "config.json", attention_bias=True)
    with pytest.raises(ModelError, match=r"q_proj\.bias is missing"):
        load(str(folder), device="cpu")


def test_a_pickle_is_refused_unopened(tmp_path):
    """Loading it would create the file ``ran``."""
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.zeros(2)}, path)
    with pytest.raises(ModelError, match="pickles never"):
        load(str(path), device="cpu")


def test_what_is_neither_here_nor_a_hub_id_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no such file or folder"):
        load(str(tmp_path / "nothing.gguf"), device="cpu")


def test_a_hub_id_without_a_network_is_refused(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="the hub did not give it"):
        load("nobody/no-such-model-here", device="cpu")


def test_revision_is_that_of_the_files_wherever_they_lie(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert load(str(folder), device="cpu").revision == load(str(tmp_path / "elsewhere"), device="cpu").revision


CHANGES = {
    "weights": weights(lambda w: w[Q].mul_(1.001)),
    "configuration": config(rms_norm_eps=0.5),
    "template": text("chat_template.jinja", "{{ other }}"),
    "ends": text("generation_config.json", '{"eos_token_id": 3}'),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_revision_changes_with_anything_that_changes_the_answers(folder, change):
    before = load(str(folder), device="cpu").revision
    change(folder)
    assert load(str(folder), device="cpu").revision != before


def test_names_are_what_a_person_would_call_the_model(folder, tmp_path, smollm2):
    assert load(str(folder), device="cpu").name == "model"
    assert load(str(tiny.write_gguf(tmp_path / "tiny.Q8.gguf")), device="cpu").name == "tiny.Q8"
    assert smollm2.name == "SmolLM2-135M-Instruct.Q4_1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, which must not be refused")
def test_cuda_is_refused_clearly_where_there_is_none(folder):
    with pytest.raises(DeviceError, match="use --device cpu or auto"):
        load(str(folder), device="cuda")
    assert resolve("auto").type == "cpu"


def test_an_unknown_device_is_refused():
    with pytest.raises(DeviceError, match="auto, cpu, cuda or cuda:N"):
        resolve("tpu")
