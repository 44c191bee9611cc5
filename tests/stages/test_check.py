"""Each rule with a folder that breaks it, and the healthy twin that gives no finding."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas import target as targets
from eyas.causes import healthy
from eyas.check import engine_rules, mend, stage
from eyas.contract import Norms, for_target
from eyas.drafter import disk
from eyas.drafter.network import Drafter
from eyas.errors import UsageError
from tests.drafter.folders import CONFIGS, IDS, KEPT, foreign
from tests.drafter.folders import target as known_target


def check(folder, target, engine=None, version=None):
    """The findings that matter, and those alone."""
    wanted = engine_rules.named(engine, version) if engine else None
    return [f for f in stage.check(folder, target, wanted)[0] if f.severity != "info"]


@pytest.fixture
def target(target_folder):
    return targets.load(target_folder)


@pytest.fixture
def folder(tmp_path, target):
    made = Drafter(for_target(target, [0, 1, 2], Norms(False, "chunks", False), 64, 3, 32))
    made.reset(0, torch.cat([torch.arange(8), torch.arange(100, 156)]), torch.randn(64, 32), torch.ones(32))
    disk.write(tmp_path / "drafter", made, {})
    return tmp_path / "drafter"


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path)


def change_config(folder, **values):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_a_healthy_drafter_gives_no_finding(folder, target):
    assert check(folder, target) == []


def test_without_a_target_it_says_so_and_stays_healthy(folder):
    findings, _ = stage.check(folder, None)
    assert {f.severity for f in findings} == {"info"} and healthy(findings)
    assert any("no target given" in f.message for f in findings)


ABSOLUTE = torch.cat([torch.arange(8), torch.arange(100, 156)])
BROKEN = {
    "missing tensor": (
        lambda t: t.pop("midlayer.self_attn.o_proj.weight"),
        "tensors",
        'o_proj.weight" is missing',
    ),
    "unknown tensor": (lambda t: t.update(extra=torch.zeros(1)), "tensors", '"extra" is not part'),
    "transposed tensor": (
        lambda t: t.update({"fc.weight": t["fc.weight"].T}),
        "tensors",
        "has shape (96, 32), expected (32, 96)",
    ),
    "not a number": (
        lambda t: t["lm_head.weight"][3].fill_(float("nan")),
        "finite",
        "lm_head.weight holds NaN",
    ),
    "absolute d2t": (lambda t: t.update(d2t=ABSOLUTE.clone()), "vocabulary", "absolute ids"),
    "d2t of zeros": (lambda t: t["d2t"].zero_(), "vocabulary", "keep different ids"),
    "repeated ids": (lambda t: t["d2t"].__setitem__(9, t["d2t"][9] - 1), "vocabulary", "ids repeat"),
    "d2t of another type": (lambda t: t.update(d2t=t["d2t"].int()), "vocabulary", "need int64"),
    "no d2t": (lambda t: t.pop("d2t"), "vocabulary", "has no d2t"),
    "a short d2t": (lambda t: t.update(d2t=t["d2t"][:-1]), "vocabulary", "63 entries"),
    "d2t outside": (lambda t: t["d2t"].__setitem__(63, 10**6), "vocabulary", "outside 0..259"),
    "d2t of floats": (lambda t: t.update(d2t=t["d2t"].float()), "vocabulary", "need int64"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_weights_are_named(folder, target, name):
    change, rule, said = BROKEN[name]
    change_tensors(folder, change)
    findings = check(folder, target)
    assert not healthy(findings)
    assert any(f.rule == rule and said in f.message for f in findings), findings


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (IDS, [0, 1, 1], f"{IDS} is [0, 1, 1]"),
        (IDS, None, "aux layers"),
        ("norm_before_residual", True, "norm_before_residual is True"),
        ("fc_norm", False, "fc_norm"),
        ("norm_output", True, "norm_output is True"),
        ("rope_theta", 1e6, "rope_theta is 1000000.0"),
        ("head_dim", 16, "head_dim is 16"),
        ("tie_word_embeddings", True, "tie_word_embeddings"),
        ("draft_vocab_size", 260, "draft_vocab_size is 260"),
        ("architectures", ["LlamaForCausalLM"], "plain language model"),
        ("hidden_size", 64, "hidden_size is 64"),
        ("max_position_embeddings", 100, "max_position_embeddings is 100"),
        ("num_hidden_layers", 2, "num_hidden_layers is 2"),
    ],
)
def test_a_config_that_says_other_than_the_contract_is_an_error(folder, target, key, value, said):
    change_config(folder, **{key: value})
    findings = check(folder, target, "vllm")
    assert any(f.severity == "error" and said in f.message for f in findings), findings
    assert all(f.fix for f in findings)


@pytest.mark.parametrize(
    "key",
    ["norm_before_residual", "norm_output", "rope_theta", "tie_word_embeddings", "draft_vocab_size"],
)
def test_fix_makes_a_config_say_the_contract_again(folder, target, key):
    before = (folder / "config.json").read_text()
    change_config(
        folder, **{key: {"tie_word_embeddings": True, "rope_theta": 1e6, "draft_vocab_size": 260}.get(key)}
    )
    broken = (folder / "config.json").read_text()
    made = stage.look(folder, target, fix=True)
    assert made["healthy"] and len(made["mended"]) == 1
    assert json.loads((folder / "config.json").read_text()) == json.loads(before)
    assert (folder / f"config.json{mend.BEFORE}").read_text() == broken
    assert stage.look(folder, target, fix=True)["mended"] == []


@pytest.mark.parametrize("kind", ["absolute d2t", "d2t of zeros", "d2t of another type", "no d2t"])
def test_fix_makes_a_vocabulary_map_whole_again(folder, target, kind):
    good = load_file(folder / "model.safetensors")
    change_tensors(folder, BROKEN[kind][0])
    made = stage.look(folder, target, fix=True)
    assert made["healthy"] and len(made["mended"]) == 1, made
    found = load_file(folder / "model.safetensors")
    assert found.keys() == good.keys() and all(torch.equal(found[n], good[n]) for n in good)
    assert (folder / f"model.safetensors{mend.BEFORE}").is_file()


def test_fix_makes_offsets_of_absolute_ids_without_t2d(tmp_path):
    folder = foreign(
        tmp_path / "d", "modelopt", change_tensors=lambda t: t.update(d2t=torch.arange(384, 512))
    )
    made = stage.look(folder, known_target(tmp_path), fix=True)
    assert len(made["mended"]) == 1 and load_file(folder / "model.safetensors")["d2t"].tolist() == [384] * 128


def test_what_is_not_certain_is_not_mended(folder, target):
    change_tensors(folder, lambda t: t["lm_head.weight"][3].fill_(float("nan")))
    before = (folder / "model.safetensors").read_bytes()
    made = stage.look(folder, target, fix=True)
    assert (
        not made["healthy"] and made["mended"] == [] and (folder / "model.safetensors").read_bytes() == before
    )


def test_another_target_is_told_apart(folder, target):
    deeper = dataclasses.replace(target, layers=5)
    assert any("number of layers" in f.message for f in check(folder, deeper))
    other = dataclasses.replace(target)
    other.__dict__["fingerprint"] = "0" * 16
    findings = check(folder, other)
    assert [f.severity for f in findings] == ["warning"] and healthy(findings)


def test_stop_ids_outside_the_vocabulary_are_an_error(folder, target):
    raw = json.loads((folder / "contract.json").read_text()) | {"stop_ids": [3, 50]}
    (folder / "contract.json").write_text(json.dumps(raw))
    assert any("ends are never drafted" in f.message for f in check(folder, None))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_without_a_file_is_one_error(folder, target, name):
    (folder / name).unlink()
    findings = check(folder, target)
    assert [f.rule for f in findings] == ["read"]


# ---- drafters of others ----


@pytest.mark.parametrize("dialect", CONFIGS)
def test_a_healthy_drafter_of_every_dialect_gives_no_finding(tmp_path, dialect):
    assert check(foreign(tmp_path / "d", dialect), known_target(tmp_path)) == []


KINDS = {
    "C01 numbers of outputs in the key of inputs": ("vllm", lambda c: c.update({IDS: [1, 4, 6]}), None, "layers", "one too early"),
    "C02 two keys that disagree": (
        "vllm", lambda c: c.update(eagle_config={IDS: [2, 4, 7]}), None, "layers", "says two things",
    ),
    "C03 no layers": ("vllm", lambda c: c.pop(IDS), None, "unknown", "cannot be seen"),
    "C14 a norm without its flag": (
        "vllm", None, lambda t: t.update({f"fc_norm.{i}.weight": torch.ones(64) for i in range(3)}), "flags", "fc_norm is not stated",
    ),
    "C14 a flag without its norm": ("vllm", lambda c: c.update(norm_before_fc=True), None, "flags", "there is no input_norm"),
    "C15 the residual of speculators": ("speculators", lambda c: c.pop("norm_before_residual"), None, "unknown", "takes false"),
    "C20 another rope than the target's": ("vllm", lambda c: c.update(rope_theta=1e6), None, "target", "rope theta is 1e+06"),
    "C22 no map": ("vllm", None, lambda t: [t.pop("d2t"), t.pop("t2d")], "vocabulary", "has no d2t"),
    "C22 a map of zeros": ("modelopt", None, lambda t: t["d2t"].zero_(), "vocabulary", "all zeros"),
    "C23 absolute ids": ("vllm", None, lambda t: t.update(d2t=KEPT.clone()), "vocabulary", "absolute ids"),
    "C23 absolute ids without t2d": (
        "modelopt", None, lambda t: t.update(d2t=torch.arange(384, 512)), "vocabulary", "absolute ids",
    ),
    "C23 a map that repeats": ("vllm", None, lambda t: t["d2t"].__setitem__(9, t["d2t"][9] - 1), "vocabulary", "repeat"),
    "C23 a range as offsets": ("vllm", None, lambda t: t.update(d2t=torch.arange(128)), "vocabulary", "different ids"),
    "C23 a map of int32": ("vllm", None, lambda t: t.update(d2t=t["d2t"].int()), "vocabulary", "int64"),
    "C26 a tied head": ("vllm", lambda c: c.update(tie_word_embeddings=True), None, "tied", "embedding for it"),
    "C27 another width": ("vllm", lambda c: c.update(hidden_size=128), None, "widths", "hidden_size is 128"),
    "C27 a narrower drafter without embedding": (
        "vllm", lambda c: c.update(target_hidden_size=96), lambda t: t.update({"fc.weight": torch.ones(64, 288)}), "widths", "embed_tokens",
    ),
    "C31 a plain model's name": ("vllm", lambda c: c.update(architectures=["Qwen3ForCausalLM"]), None, "architecture", "plain"),
    "C33 rope said twice": ("vllm", lambda c: c.update(rope_parameters={"rope_theta": 5.0}), None, "unknown", "differs"),
    "C35 fewer positions than the target": ("vllm", lambda c: c.update(max_position_embeddings=256), None, "length", "below"),
    "C69 another vocabulary": (
        "vllm", lambda c: c.update(vocab_size=600), lambda t: t.update(t2d=torch.nn.functional.pad(t["t2d"], (0, 88))), "target", "512",
    ),
    "C69 a stop id that is never drafted": (
        "vllm", None, lambda t: t.update(d2t=torch.arange(8, 136) - torch.arange(128), t2d=torch.zeros(512, dtype=torch.bool).index_fill_(0, torch.arange(8, 136), True)),
        "vocabulary", "stop ids",
    ),
    "a tensor of the target": ("vllm", None, lambda t: t.update({"verifier_norm.weight": torch.ones(64)}), "tensors", "of the target"),
    "an infinity": ("vllm", None, lambda t: t["norm.weight"].fill_(float("inf")), "finite", "norm.weight"),
    "fc for other layers": ("vllm", lambda c: c.update({IDS: [2, 4]}), None, "widths", "2 aux layers"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_fault_is_found_with_its_values_and_a_fix(tmp_path, kind):
    dialect, change, change_tensors_, rule, said = KINDS[kind]
    found = check(
        foreign(tmp_path / "d", dialect, change, change_tensors_), known_target(tmp_path, layers=10)
    )
    assert any(f.rule == rule and said in f.message and f.fix for f in found), found


def test_layers_that_only_look_like_outputs_are_believed_where_the_contract_states_them(folder, target):
    assert check(folder, dataclasses.replace(target)) == []


def test_a_thought_that_cannot_be_drafted_is_a_warning(tmp_path):
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [{"id": 50, "content": "</think>"}, {"id": 3, "content": "<think>"}]})
    )
    found = check(foreign(tmp_path / "d", "vllm"), known_target(tmp_path))
    assert [(f.severity, f.rule) for f in found] == [("warning", "vocabulary")] and "</think> (50)" in found[
        0
    ].message


def test_a_pickle_is_named_and_refused(tmp_path):
    folder = foreign(tmp_path / "d", "vllm")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    found = check(folder, None)
    assert (
        [f.rule for f in found] == ["read"]
        and "pytorch_model.bin" in found[0].message
        and "pickle" in found[0].message
    )


# ---- for one engine ----

ENGINES = {
    "C01 in vLLM's V1": ("sglang", None, None, "vllm", "0.22.1", "[1, 3, 6]"),
    "C02 SGLang's top level": ("vllm", None, None, "sglang", "0.5.23", "[2, 5, 7]"),
    "C06 the last output of Kimi": ("vllm", lambda c: c.update({IDS: [2, 4, 10]}), None, "vllm", "0.22.1", "not captured"),
    "C14 flags that are not known": ("vllm", lambda c: c.update(norm_output=True), None, "vllm", "0.18.1", "next draft step"),
    "C15 the residual in SGLang": ("vllm", lambda c: c.update(norm_before_residual=True), None, "sglang", "0.5.23", "residual"),
    "C29 a format that is not known": ("speculators", None, None, "sglang", "0.5.23", "speculators format"),
    "C31 a plain name": ("eagle", None, None, "sglang", "0.5.23", "LlamaForCausalLM"),
    "C35 a window": (
        "speculators", lambda c: c["transformer_layer_config"].update(layer_types=["sliding_attention"], sliding_window=128), None,
        "sglang", "0.5.23", "window",
    ),
    "C37 a target that is not on the list": ("vllm", None, None, "vllm", "0.18.1", "not on its list"),
    "C38 a latent drafter of another model type": (
        "mla", lambda c: c.update(model_type="deepseek_v3"), None, "vllm", "0.32.0", "MTP",
    ),
    "a tensor that is missing": ("vllm", None, lambda t: t.pop("midlayer.mlp.up_proj.weight"), "vllm", "0.32.0", "up_proj"),
    "a version that was not read": ("vllm", None, None, "vllm", "0.40.0", "outside"),
}  # fmt: skip
TARGETS = {
    "C06 the last output of Kimi": "kimi_k2",
    "C37 a target that is not on the list": "gemma4",
    "C38 a latent drafter of another model type": "kimi_k2",
}


@pytest.mark.parametrize("kind", ENGINES)
def test_what_an_engine_would_do_otherwise_is_found(tmp_path, kind):
    dialect, change, change_tensors_, engine, version, said = ENGINES[kind]
    folder = foreign(tmp_path / "d", dialect, change, change_tensors_)
    found = check(folder, known_target(tmp_path, TARGETS.get(kind, "llama")), engine, version)
    assert not healthy(found) and any(said in f.message and f.fix for f in found), found


@pytest.mark.parametrize(
    ("dialect", "engine"), [("vllm", "vllm"), ("sglang", "sglang"), ("speculators", "vllm")]
)
def test_a_drafter_in_its_engine_s_own_dialect_gives_no_finding(tmp_path, dialect, engine):
    assert check(foreign(tmp_path / "d", dialect), known_target(tmp_path), engine) == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", ["llama", "kimi_k2"])
@pytest.mark.parametrize("ids", [[2, 4, 7], [1, 4, 9]])
def test_what_eyas_writes_runs_as_trained_in_both_engines(tmp_path, engine, kind, ids):
    seen = known_target(tmp_path, kind)
    made = Drafter(for_target(seen, ids, Norms(False, "chunks", False), 128, 3, 32))
    made.reset(0, KEPT, torch.randn(128, 64), torch.ones(64))
    disk.write(tmp_path / "d", made, {})
    assert check(tmp_path / "d", seen, engine) == []


def test_a_difference_of_the_other_runner_is_a_warning(tmp_path):
    folder = foreign(
        tmp_path / "d",
        "vllm",
        lambda c: [c.pop(IDS), c.update(eagle_config={"layer_ids": [2, 4, 7], IDS: [1, 3, 6]})],
    )
    found = check(folder, known_target(tmp_path, layers=10), "vllm", "0.32.0")
    assert any(f.severity == "warning" and "with the other runner" in f.message for f in found), found


def test_an_unknown_engine_or_version_is_refused():
    for engine, version in (("tgi", None), ("vllm", "new")):
        with pytest.raises(UsageError, match="--engine"):
            engine_rules.named(engine, version)


def test_the_card_has_a_column_for_each_engine_and_marks_what_differs(tmp_path, capsys):
    folder = foreign(tmp_path / "d", "vllm", lambda c: c.update(norm_before_residual=True))
    made = stage.look(folder, known_target(tmp_path))
    lines = capsys.readouterr().err.splitlines()
    head = next(line for line in lines if "trained with" in line)
    assert "vLLM 0.32.0" in head and "SGLang 0.5.23" in head
    row = next(line for line in lines if "residual is the normed state" in line)
    assert row.split()[-2:] == ["no", "(!)"] and "yes" in row
    assert made["card"]["aux_layers"] == {"value": "(2, 4, 7)", "source": "stated", "from": IDS}


def test_checking_a_folder_loads_no_torch(tmp_path):
    folder = foreign(tmp_path / "d", "vllm")
    code = "import sys; from eyas.cli import eyas; eyas.main(['check', sys.argv[1], '--engine', 'vllm', '--json'], standalone_mode=False)"
    code = f"import sys\ntry:\n    exec({code!r})\nexcept SystemExit: pass\nprint(sorted({{'torch', 'transformers', 'pyarrow', 'pydantic'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("args", "version", "bad"),
    [
        (["--pipeline-parallel-size", "2"], (0, 25, 1), True),
        (["--pipeline-parallel-size=4"], (0, 25, 1), True),
        (["--pipeline-parallel-size", "1"], (0, 25, 1), False),
        (["--pipeline-parallel-size"], (0, 25, 1), False),
        (["--pipeline-parallel-size", "2"], (0, 32, 0), False),
    ],
)
def test_pipeline_stages_need_an_embedding_of_the_drafter_s_own(tmp_path, args, version, bad):
    wanted = engine_rules.Named("vllm", version)
    for name, expected in (("vllm", bad), ("speculators", False)):  # the latter brings one
        found, _ = stage.check(foreign(tmp_path / name, name), known_target(tmp_path), wanted, args)
        assert any(f.rule == "engine-launch" for f in found) is expected


def test_fix_keeps_the_link_of_a_download_cache_and_the_file_that_it_names(tmp_path):
    folder = foreign(tmp_path / "d", "vllm", change_tensors=lambda t: t.pop("d2t"))
    blob = tmp_path / "blob"
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    before = blob.read_bytes()
    assert len(stage.look(folder, known_target(tmp_path), fix=True)["mended"]) == 1
    assert blob.read_bytes() == before and not (folder / "model.safetensors").is_symlink()
    assert (folder / f"model.safetensors{mend.BEFORE}").read_bytes() == before
