"""The recipe: what a user asks for.

Reads a YAML file (or the name of a shipped one, or the recipe.yaml of a run folder), applies `--set a.b=c`, refuses
unknown keys with the nearest valid name, and resolves `auto` values with a reason. `eyas recipe show` prints it.
"""

import difflib
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ValidationError

from eyas.errors import RecipeError
from eyas.schema import Recipe, Section
from eyas.stores import states
from eyas.target import Target

SHIPPED = Path(__file__).parent / "recipes"
SHIPPED_DRAFTERS = SHIPPED / "drafters"


@dataclass(frozen=True)
class Resolved:
    """A recipe with what it left to be derived; the one thing that stages read."""

    recipe: Recipe
    target: Target
    device: str  # cpu | cuda
    dtype: str  # what the target computes in
    aux_layers: list[int]  # ids in our numbering, ascending

    @property
    def weight_bytes(self) -> int:
        """Memory of the target's weights in the type in which it computes; 0 where they are not here."""
        wider = self.dtype == "float32" and self.target.config.get("dtype") == "bfloat16"
        return sum(p.stat().st_size for p in set(self.target.files.values())) * (2 if wider else 1)

    @property
    def token_bytes(self) -> int:
        """Disk of one token: aux states in extract.dtype, the last state in the target's own type, ids."""
        return states.bytes_per_token(
            len(self.aux_layers), self.target.hidden, self.recipe.extract.dtype, self.last_bytes
        )

    @property
    def last_bytes(self) -> int:
        """Of one number of a last state."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def fp8(self) -> bool:
        """Whether aux states are stored in fp8."""
        return self.recipe.extract.dtype == "fp8"

    @property
    def aux_dtype(self) -> str:
        """What aux states are handed over in before they are stored."""
        return "bfloat16" if self.fp8 else self.recipe.extract.dtype


class Value(NamedTuple):
    """One resolved key: what it is, where it came from (default, recipe, --set), why that is the default."""

    value: Any
    source: str
    reason: str


def shipped_names() -> list[str]:
    return sorted(p.stem for p in SHIPPED.glob("*.yaml"))


def find(word: str) -> Path:
    """The file behind a RECIPE or RUN argument.

    Raises RecipeError where there is neither a file, a run folder, nor a shipped recipe of that name.
    """
    path = Path(word)
    if path.is_dir():
        if (path / "recipe.yaml").is_file():
            return path / "recipe.yaml"
        raise RecipeError(
            f"{path} is a folder without recipe.yaml, so not a run folder. Name a recipe file or a run."
        )
    if path.is_file():
        return path
    if word in shipped_names():
        return SHIPPED / f"{word}.yaml"
    near = difflib.get_close_matches(word, shipped_names(), n=1)
    hint = f' Did you mean "{near[0]}"?' if near else f" Shipped recipes: {', '.join(shipped_names())}."
    raise RecipeError(f'no recipe "{word}": there is no such file, run folder or shipped recipe.{hint}')


def find_drafter(word: str) -> Path:
    """The drafter to start from: a folder, a safetensors file with config.json beside it, or the name of a shipped one.

    Raises RecipeError where there is neither.
    """
    shipped = sorted(p.name for p in SHIPPED_DRAFTERS.iterdir()) if SHIPPED_DRAFTERS.is_dir() else []
    path = Path(word)
    if path.suffix == ".safetensors" and path.is_file() and (path.parent / "config.json").is_file():
        return path
    for folder in (path, SHIPPED_DRAFTERS / word if word in shipped else path):
        if (folder / "config.json").is_file():
            return folder
    raise RecipeError(
        f'"train.init_from": {word} is not a drafter folder (no config.json there), nor a safetensors file beside one, nor a '
        f"shipped drafter ({', '.join(shipped) or 'none'})."
    )


def read(path: Path, sets: tuple[str, ...] = ()) -> tuple[Recipe, dict[str, Value]]:
    """Read and validate a recipe; returns it and every key with its source.

    Raises RecipeError naming the file, the key, what was found and what would be valid.
    """
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Strict)
    except UnicodeDecodeError as e:
        raise RecipeError(f"{path}: not UTF-8 text (byte {e.start}). A recipe is a YAML file.") from e
    except yaml.YAMLError as e:
        raise RecipeError(f"{path}: not valid YAML: {' '.join(str(e).split())}") from e
    except OSError as e:
        raise RecipeError(f"{path}: cannot be read: {e.strerror}") from e
    if not isinstance(raw, dict):
        found = "an empty file" if raw is None else f"a {type(raw).__name__}"
        raise RecipeError(f'{path}: a recipe is a mapping of keys ("name: …", "target: …"); found {found}.')
    return build(raw, str(path), sets)


def build(raw: dict[str, Any], path: str, sets: tuple[str, ...] = ()) -> tuple[Recipe, dict[str, Value]]:
    """A recipe of plain values, with what `--set` changes; errors name `path`."""
    given = set(_leaves(raw))
    changed = set()
    for word in sets:
        changed.add(_apply(raw, word))
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as e:
        raise RecipeError(f"{path}: " + "; ".join(_explain(err) for err in e.errors())) from e
    return recipe, _sources(recipe, given, changed)


class _Strict(yaml.SafeLoader):
    """YAML keeps the last of two equal keys in silence; here the second is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen and isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, f'the key "{key_node.value}" stands twice', key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _apply(raw: dict, word: str) -> str:
    name, sep, text = word.partition("=")
    if not sep or not name:
        raise RecipeError(f'--set {word}: write it as --set section.key=value, as in "--set train.epochs=2"')
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise RecipeError(f"--set {word}: the value is not valid YAML") from e
    *parents, last = name.split(".")
    here = raw
    for part in parents:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise RecipeError(f'--set {word}: "{part}" is a value, not a section')
    here[last] = value
    return name


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    out: dict[str, Any] = {}
    for name, value in tree.items():
        out |= _leaves(value, f"{prefix}.{name}" if prefix else str(name))
    return out


def fields(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Every key of the schema, dotted, with its pydantic field."""
    out: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            out |= fields(field.annotation, f"{path}.")
        else:
            out[path] = field
    return out


def _sources(recipe: Recipe, given: set[str], changed: set[str]) -> dict[str, Value]:
    values = flat(recipe)
    out = {}
    for path, field in fields(Recipe).items():
        source = (
            "--set"
            if path in changed
            else "recipe"
            if any(g == path or g.startswith(path) for g in given)
            else "default"
        )
        out[path] = Value(values[path], source, field.description or "")
    return out


def flat(recipe: Recipe) -> dict[str, Any]:
    """The recipe as {"section.key": value}, lists and facts kept whole."""
    dump = recipe.model_dump(by_alias=True, mode="json")
    return {
        path: functools.reduce(lambda tree, name: tree[name], path.split("."), dump)
        for path in fields(Recipe)
    }


def units() -> dict[str, str]:
    return {path: (f.json_schema_extra or {}).get("unit", "") for path, f in fields(Recipe).items()}


def _explain(err: Any) -> str:
    where = ".".join(str(p) for p in err["loc"])
    if err["type"] == "extra_forbidden":
        valid = list(fields(Recipe)) + [name for name in Recipe.model_fields]
        siblings = [v for v in valid if v.rpartition(".")[0] == where.rpartition(".")[0]] or valid
        near = difflib.get_close_matches(where, siblings, n=1, cutoff=0.5) or difflib.get_close_matches(
            where, valid, n=1
        )
        hint = f'; did you mean "{near[0]}"?' if near else f"; valid here: {', '.join(siblings)}"
        return f'unknown key "{where}"{hint}'
    if err["type"] == "missing":
        return f'"{where}" is missing'
    message = re.sub(r"^Value error, ", "", err["msg"])
    return f'"{where}": {message} (found {err["input"]!r:.80})' if where else message
