"""train.init_from a drafter of any trainer: nothing is lost before the first step, and a parent whose config is not what its weights were
trained for is refused with the name of what is wrong."""

import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from eyas import pipeline
from eyas import target as targets
from eyas.contract import Norms
from eyas.convert import convert
from eyas.drafter import disk, replay
from eyas.drafter.dialects import IDS
from eyas.drafter.probe import Rows
from eyas.errors import ContractError, RecipeError
from eyas.rundir import RunDir
from eyas.stores import states
from eyas.train import records
from tests import skilled
from tests.conftest import save_target, write_recipe


@pytest.fixture(scope="module")
def deep(tmp_path_factory, prompt_file):
    """A recipe and a run folder with conversations and states of a target of eight layers."""
    folder = tmp_path_factory.mktemp("deep")
    recipe = write_recipe(
        folder / "deep.yaml", save_target(folder / "target", layers=8, grows=1.5), prompt_file
    )
    body = yaml.safe_load(recipe.read_text())
    body["target"]["aux_layers"] = skilled.AUX
    body["train"] = {"ttt_steps": 3, "epochs": 1, "tokens_per_step": 256, "micro_tokens": 128}
    recipe.write_text(yaml.safe_dump(body))
    pipeline.run(str(recipe), (), str(folder / "run"), None, "extract")
    return recipe, folder / "run", targets.load(folder / "target")


@pytest.fixture(scope="module")
def parent(deep, tmp_path_factory):
    """AQ-MedAI's shape (heads wider than width / heads, theta 1e6, eps 1e-6, norm_before_residual absent), with skill on these answers, as
    somebody else's folder; and its acceptance on the held-out ones."""
    _, run, target = deep
    listed = json.loads((run / "states" / "manifest.json").read_text())["content"]
    rows = [r.load() for r in states.refs(run / "states", listed)]
    made = skilled.drafter(target, Rows(rows, tuple(skilled.AUX)), Norms(False, "none", False), **skilled.AQ)
    folder = skilled.write(tmp_path_factory.mktemp("parent") / "aq", made)
    (folder / "contract.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config.pop("norm_before_residual")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def skill(deep, parent):
    """tau at k=3 of the parent on the held-out answers, by the replay of the drafter as it was written."""
    _, run, target = deep
    from eyas.drafter import facts, opening
    from eyas.stores import conversations

    held_out = {r.row_id for r in conversations.read(run / "conversations", "held_out")}
    listed = json.loads((run / "states" / "manifest.json").read_text())["content"]
    rows = [r.load() for r in states.refs(run / "states", listed) if r.row_id in held_out]
    held = opening.read(facts.gather(parent, target), target)
    accepted = replay.accepted_lengths(held.drafter, held.embedding_VD, rows, 3)
    tau = replay.tau([replay.walk(a, 3) for a in accepted])
    assert tau > 2.5
    return tau


def start(deep, tmp_path, word, *sets):
    recipe, run, _ = deep
    folder = shutil.copytree(run, tmp_path / "run")
    RunDir(folder).clear("train")
    return pipeline.run(str(recipe), (f"train.init_from={word}", *sets), str(folder), None, "train"), folder


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "speculators", "modelopt", "file"])
def test_nothing_is_lost_before_the_first_step(deep, parent, skill, tmp_path, capsys, dialect):
    word = tmp_path / "parent"
    if dialect == "file":
        word = shutil.copytree(parent, word) / "model.safetensors"
    else:
        convert(parent, word, dialect, None, deep[2])
    made, run = start(deep, tmp_path, word)
    first = records.evals(run / "train" / "evals.jsonl")[0]
    assert first["epoch"] == 0 and first["tau"]["3"]["value"] == pytest.approx(skill, abs=1e-9)
    child = disk.read(run / "drafter" / "best").contract
    assert (child.head_dim, child.rope_theta, child.eps, child.norms) == (
        16,
        1e6,
        1e-6,
        Norms(False, "none", False),
    )
    gate = made["train"]["parent"]
    assert gate["came"] == {"tau": pytest.approx(skill, abs=1e-9), "changed": []}
    assert (
        set(gate["axes"].values()) <= {"agrees", "undetermined", "not probed"}
        and gate["axes"]["fed_back"] == "agrees"
    )
    said = capsys.readouterr()
    assert "the parent as it came" in said.out + said.err


def edit(config=None, tensors=None):
    def change(folder):
        path = folder / "config.json"
        body = json.loads(path.read_text())
        if config:
            config(body)
        path.write_text(json.dumps(body))
        if tensors:
            held = load_file(folder / "model.safetensors")
            tensors(held)
            save_file(held, folder / "model.safetensors")

    return change


def rebuilt(*stops):
    """Another vocabulary, in which the ends of a turn are kept."""

    def change(tensors):
        others = torch.arange(60, 60 + len(tensors["d2t"]) - len(stops))
        kept = torch.cat([torch.tensor(stops), others]).sort().values
        tensors["d2t"] = kept - torch.arange(len(kept))
        tensors["t2d"] = torch.zeros_like(tensors["t2d"]).index_fill_(0, kept, True)

    return change


PLANTED = {
    "theta 1e6 to 1e4": (edit(lambda c: c.pop("rope_theta")), ContractError, "trained with rope: theta .*1e\\+06.* its config says theta 10000"),
    "head_dim that is no longer that of the weights": (
        edit(lambda c: c.update(head_dim=8)), (RecipeError, ContractError), "head_dim 8|width of a head",
    ),
    "norm flag flipped": (
        edit(lambda c: c.update(norm_before_residual=True)), ContractError, "trained with the normed state as residual: no",
    ),
    "map rebuilt under an old head": (edit(None, rebuilt(3)), ContractError, "the vocabulary map is not the one"),
    "layers one later": (
        edit(lambda c: c.update({IDS: [3, 5, 6], "eagle_config": None})), ContractError, "trained with layers one earlier",
    ),
    "final norm flag": (
        edit(lambda c: c.update(norm_output=True)), ContractError, "trained with the state that is fed back: hidden",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_each_planted_mismatch_is_refused_with_its_name(deep, parent, tmp_path, fault):
    change, kind, said = PLANTED[fault]
    folder = shutil.copytree(parent, tmp_path / "parent")
    change(folder)
    recipe, run, _ = deep
    mine = shutil.copytree(run, tmp_path / "run")
    sets = (f"train.init_from={folder}",)
    with pytest.raises(kind, match=said):
        # other layers need other states: the whole life from extract on
        pipeline.run(str(recipe), (*sets, "target.aux_layers=auto"), str(mine), "extract", "train")
    assert not (mine / "drafter").exists()


def test_what_a_parent_leaves_open_must_be_stated(deep, parent, skill, tmp_path):
    convert(parent, tmp_path / "parent", "speculators", None, deep[2])
    edit(lambda c: c.pop("norm_before_residual"))(tmp_path / "parent")
    with pytest.raises(RecipeError, match="Set train.norms.before_residual to what it was trained with"):
        start(deep, tmp_path / "a", tmp_path / "parent")
    made, _ = start(deep, tmp_path / "b", tmp_path / "parent", "train.norms.before_residual=false")
    assert made["train"]["parent"]["came"]["tau"] == pytest.approx(skill, abs=1e-9)
    with pytest.raises(ContractError, match="trained with the normed state as residual: no"):
        start(deep, tmp_path / "c", tmp_path / "parent", "train.norms.before_residual=true")


def test_a_change_that_costs_the_skill_is_refused_by_its_name(deep, parent, tmp_path):
    with pytest.raises(
        ContractError,
        match="with train.norms.fc chunks for none, train.norms.output True for False.*less than 50%",
    ):
        start(
            deep, tmp_path, parent, "train.norms.fc=chunks", "train.norms.output=true", "train.draft_vocab=60"
        )


def test_an_embedding_of_its_own_is_refused(deep, parent, tmp_path):
    folder = shutil.copytree(parent, tmp_path / "parent")
    edit(None, lambda t: t.update({"embed_tokens.weight": torch.randn(260, 32).bfloat16()}))(folder)
    with pytest.raises(ContractError, match="an embedding of its own"):
        start(deep, tmp_path, folder)


def test_the_targets_embedding_in_its_file_is_no_embedding_of_its_own(deep, parent, skill, tmp_path):
    folder = shutil.copytree(parent, tmp_path / "parent")
    edit(None, lambda t: t.update({"embed_tokens.weight": deep[2].embedding_VD().bfloat16()}))(folder)
    made, _ = start(deep, tmp_path, folder)
    assert made["train"]["parent"]["came"]["tau"] == pytest.approx(skill, abs=1e-9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edit(lambda c: c.update(hidden_act="gelu")), "its activation is gelu"),
        (edit(lambda c: c.update(num_hidden_layers=2)), "it has 2 layers"),
        (edit(lambda c: c.update(rope_scaling={"rope_type": "longrope", "factor": 2.0})), "longrope"),
        (edit(lambda c: c.update(vocab_size=300)), "vocabulary"),
    ],
)
def test_what_our_network_does_not_compute_is_refused_before_anything_is_made(
    deep, parent, tmp_path, change, said
):
    folder = shutil.copytree(parent, tmp_path / "parent")
    change(folder)
    with pytest.raises(RecipeError, match=said):
        pipeline.open_run(str(deep[0]), (f"train.init_from={folder}",), str(tmp_path / "run"))


def test_a_target_is_no_parent(deep, tmp_path):
    with pytest.raises(RecipeError, match="no fc.weight"):
        pipeline.open_run(str(deep[0]), (f"train.init_from={deep[2].folder}",), str(tmp_path / "run"))


def test_a_parent_that_was_mended_goes_on_with_the_same_command(deep, parent, skill, tmp_path):
    recipe, run, _ = deep
    folder, mine = shutil.copytree(parent, tmp_path / "parent"), shutil.copytree(run, tmp_path / "run")
    RunDir(mine).clear("train")
    whole = (folder / "config.json").read_text()
    edit(lambda c: c.update(norm_output=True))(folder)
    words = (str(recipe), (f"train.init_from={folder}",), str(mine), None, "train")
    with pytest.raises(ContractError, match="the state that is fed back: hidden"):
        pipeline.run(*words)
    (folder / "config.json").write_text(whole)
    made = pipeline.run(*words)
    assert made["train"]["parent"]["came"]["tau"] == pytest.approx(skill, abs=1e-9)


def test_a_kill_after_the_probe_is_resumed_to_the_same_end(deep, parent, tmp_path, monkeypatch):
    """The probe is done, nothing is trained: the second run measures the parent again and ends as an undisturbed one."""
    recipe, run, _ = deep
    words = (f"train.init_from={parent}", "train.epochs=1")
    made, whole = start(deep, tmp_path / "whole", parent, "train.epochs=1")
    mine = shutil.copytree(run, tmp_path / "again")
    RunDir(mine).clear("train")

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as m:
        m.setattr("eyas.train.parent.compare", killed)
        with pytest.raises(Killed):
            pipeline.run(str(recipe), words, str(mine), None, "train")
    assert (mine / "train" / "parent.json").is_file() and not (mine / "drafter").exists()
    again = pipeline.run(str(recipe), words, str(mine), None, "train")
    assert again["train"]["parent"] == made["train"]["parent"]
    assert (mine / "drafter/best/model.safetensors").read_bytes() == (
        whole / "drafter/best/model.safetensors"
    ).read_bytes()


def test_what_a_parent_decided_is_not_the_recipes_word_when_a_run_is_read_again(deep, parent, tmp_path):
    """A run of one parent, and then `eyas run RUN` with another: the other's conventions are taken."""
    other = shutil.copytree(parent, tmp_path / "other")
    edit(lambda c: c.update(norm_output=True))(other)
    recipe, run, _ = deep
    mine = shutil.copytree(run, tmp_path / "run")
    RunDir(mine).clear("train")
    pipeline.run(str(recipe), (f"train.init_from={parent}",), str(mine), None, "plan")
    resolved, _, values = pipeline.open_run(str(mine), (f"train.init_from={other}",), str(mine))
    assert resolved.recipe.train.norms.output and values["train.norms.output"].source == "derived"
