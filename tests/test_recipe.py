import pytest

from eyas import recipe as recipes
from eyas.errors import RecipeError


def write(tmp_path, text: str | bytes):
    path = tmp_path / "r.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


GOOD = "name: a\ntarget: {model: m}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "found an empty file"),
        ("- a\n- b\n", "found a list"),
        ("just words", "found a str"),
        (b"\xff\xfe\x00\x01", "not UTF-8"),
        ("name: [", "not valid YAML"),
        (GOOD + "train: {epochs: 2, epochs: 3}\n", 'the key "epochs" stands twice'),
        (GOOD + "train: {epochs: 2}\ntrain: {lr: 0.1}\n", 'the key "train" stands twice'),
        ("name: a\n", '"target" is missing'),
        (GOOD + "trian: {epochs: 2}\n", 'unknown key "trian"; did you mean "train"?'),
        (GOOD + "train: {epoch: 2}\n", 'unknown key "train.epoch"; did you mean "train.epochs"?'),
        (GOOD + "train: {epochs: many}\n", '"train.epochs"'),
        (GOOD + "train: {epochs: 0}\n", "greater than or equal to 1"),
        (GOOD + "train: {lr: -1}\n", "greater than 0"),
        (GOOD + "bench: {k: [0, 1]}\n", "the baseline k = 0 is always measured"),
        (GOOD + "bench: {concurrency: [1, 8]}\n", "one request at a time"),
        (GOOD + "engine: {name: trt}\n", "Input should be 'hf' or 'vllm'"),
        ("name: ../../etc\ntarget: {model: m}\n", '"name"'),
        (GOOD + "extract: {with: generate}\n", "extract.with"),
        (
            GOOD + "engine: {name: vllm, args: [--speculative_config, '{}']}\n",
            "draft_tensor_parallel_size in it does nothing",
        ),
        (GOOD + "engine: {name: vllm, args: [--speculative-config.model=x]}\n", "is set by eyas itself"),
        (GOOD + "engine: {name: vllm, args: [--port=80]}\n", "eyas serve --port"),
    ],
)
def test_a_bad_recipe_is_refused_saying_what_is_wrong(tmp_path, text, said):
    with pytest.raises(RecipeError) as e:
        recipes.read(write(tmp_path, text))
    assert said in str(e.value) and "r.yaml" in str(e.value)


def test_each_value_knows_where_it_came_from(tmp_path):
    read, values = recipes.read(
        write(tmp_path, GOOD + "train: {epochs: 2}\n"), ("train.lr=0.01", "bench.k=[2]")
    )
    assert read.train.epochs == 2 and read.train.lr == 0.01 and read.bench.k == [2]
    assert (values["train.epochs"].source, values["train.lr"].source) == ("recipe", "--set")
    assert values["train.ttt_steps"].source == "default" and values["train.ttt_steps"].value == 5
    assert all(v.reason for v in values.values())


@pytest.mark.parametrize("word", ["train.epochs", "=3", "train.epochs=[", "name.x=1"])
def test_a_bad_set_is_refused(tmp_path, word):
    with pytest.raises(RecipeError, match="--set"):
        recipes.read(write(tmp_path, GOOD), (word,))


def test_norms_fc_takes_yes_and_no(tmp_path):
    for given, meant in (("true", "chunks"), ("false", "none"), ("whole", "whole")):
        read, _ = recipes.read(write(tmp_path, GOOD + f"train: {{norms: {{fc: {given}}}}}\n"))
        assert read.train.norms.fc == meant


def test_an_unknown_recipe_name_gets_the_nearest():
    with pytest.raises(RecipeError, match='Did you mean "smollm2-135m"'):
        recipes.find("smolm2-135m")


@pytest.mark.parametrize("name", recipes.shipped_names())
def test_shipped_recipes_are_valid(name):
    assert recipes.read(recipes.find(name))[0].name == name
