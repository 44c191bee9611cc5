"""What engines would make of a drafter, beside what it was trained with: findings for one engine, and the card of all.

eyas check DIR --target T --engine vllm --engine-version 0.32.0        eyas check DIR --target T
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from eyas.causes import Finding, error, info, unknown
from eyas.contract import FIELDS
from eyas.drafter.facts import Facts
from eyas.engines import sglang_loader, vllm_loader
from eyas.engines.loading import Version, View, parse, shown
from eyas.errors import UsageError

LOADERS = {"vllm": vllm_loader, "sglang": sglang_loader}
COMPARED = (
    "architecture", "depth", "aux_layers", "fc_norm", "before_residual", "fed_back", "hidden", "target_hidden", "mlp", "heads",
    "kv_heads", "head_dim", "latent", "qk_norm", "bias", "activation", "eps", "rope", "window", "vocab", "draft_vocab", "map", "head",
)  # fmt: skip
FIXES = {
    "aux_layers": "eyas convert writes each engine's numbering", "before_residual": "state norm_before_residual; SGLang runs false alone",
    "fc_norm": "use a version that reads it", "fed_back": "use a version that reads norm_output",
    "rope": "write rope_theta at the top level, and the same one inside rope_scaling", "head": "export lm_head, and set tie_word_embeddings to false",
    "map": "export d2t", "window": "serve it in vLLM, or train with full attention", "depth": "state num_hidden_layers",
    "head_dim": "state head_dim",
}  # fmt: skip


class Named(NamedTuple):
    """An engine to check for."""

    name: str
    version: Version
    device: str = "cuda"


def named(engine: str, version: str | None) -> Named:
    """Raises UsageError for an engine that eyas does not know, or no version."""
    if engine not in LOADERS:
        raise UsageError(f"--engine is {engine}; known: {', '.join(LOADERS)}")
    if version is None:
        return Named(engine, LOADERS[engine].READ[-1])
    if not parse(version):
        raise UsageError(
            f"--engine-version is {version}; need numbers, such as {shown(LOADERS[engine].READ[-1])}"
        )
    return Named(engine, parse(version))


def findings(f: Facts, engine: Named) -> Iterator[Finding]:
    """What this engine, in this version, would do otherwise than the drafter was trained for."""
    seen = LOADERS[engine.name].views(engine.version, f.folder)
    usual = seen[0]
    if len(seen) > 1:
        kind = f.target.model_type if f.target else None
        runner = vllm_loader.default_runner(engine.version, kind, engine.device)
        usual = seen[1] if runner == "V2" else seen[0]
    mine = list(_of(f, usual))
    yield from mine
    known = {_without(x, usual) for x in mine}
    for other in seen:
        if other is usual:
            continue
        for x in _of(f, other):
            if _without(x, other) not in known:
                yield Finding(
                    x.rule,
                    "warning" if x.severity == "error" else x.severity,
                    f"with the other runner: {x.message}",
                    x.fix,
                )


def launched(f: Facts, engine: Named, args: Sequence[str]) -> Iterator[Finding]:
    """What the server's own arguments (engine.args) do to this drafter."""
    stages = [args[i + 1] for i, word in enumerate(args[:-1]) if word in ("--pipeline-parallel-size", "-pp")]
    stages += [word.partition("=")[2] for word in args if word.startswith("--pipeline-parallel-size=")]
    split = any(s.isdigit() and int(s) > 1 for s in stages)
    if split and engine.name == "vllm" and engine.version < (0, 32) and f.card["embedding"].value == "target":
        yield error(
            "engine-launch",
            f"vLLM {shown(engine.version)} does not share the target's embedding across pipeline stages, and the drafter has none of its own: "
            "it would draft from whatever lies in memory",
            "serve without --pipeline-parallel-size, or with vLLM 0.32",
        )


def _without(finding: Finding, view: View) -> str:
    return finding.message.replace(view.engine, "")


def _of(f: Facts, view: View) -> Iterator[Finding]:
    for why in view.refuses:
        yield error(
            "engine-refuses",
            f"{view.engine} would not start: {why}",
            "convert it (eyas convert), or use another version",
        )
    for name in view.left:
        yield error("engine-random", f"{view.engine} would leave {name} as it finds it in memory: nothing in the folder fills it, and it says nothing",
            "export the tensor, or convert the folder (eyas convert)",
        )  # fmt: skip
    ours = [
        n
        for n in view.skipped
        if n.split(".")[-1] != "t2d" and not n.startswith(("verifier_", "target_model."))
    ]
    for name in ours:
        yield error(
            "engine-skips",
            f"{view.engine} would skip {name} without a word",
            "convert it (eyas convert), or use another version",
        )
    unsaid = [n for n in COMPARED if not view.fields[n].known]
    if unsaid:
        said = view.fields[unsaid[0]].where
        yield unknown(
            "engine-unknown",
            f"{view.engine}: {', '.join(FIELDS[n] for n in unsaid)}: {said}",
            "name a version that was read, or serve and measure it",
        )
    for name in COMPARED:
        a, b = f.card[name], view.fields[name]
        if a.known and b.known and a.value != b.value:
            yield error("engine-differs", f"{view.engine} would run {FIELDS[name]} {_said(b.value)} ({b.where}); it was trained with {_said(a.value)} ({a.where})",
                FIXES.get(name, f"state {FIELDS[name]} in config.json"),
            )  # fmt: skip
    for note in view.notes:
        yield info("engine-note", f"{view.engine}: {note}")


def _said(value: object) -> str:
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return str(list(value))
    return "yes" if value is True else "no" if value is False else "none" if value is None else str(value)


def table(f: Facts) -> list[list[str]]:
    """The contract card: a row for each field; what it was trained with, where that comes from, and what each engine would run."""
    seen = [v for loader in LOADERS.values() for v in loader.views(loader.READ[-1], f.folder)]
    out = [["", "trained with", "from", *(v.engine for v in seen)]]
    for name, meaning in FIELDS.items():
        fact = f.card[name]
        row = [
            meaning,
            _said(fact.value) if fact.known else "unknown",
            fact.where if fact.source != "stated" else f"stated: {fact.where}",
        ]
        for v in seen:
            theirs = v.fields.get(name)
            if theirs is None:
                row.append("")
            elif not theirs.known:
                row.append("unknown")
            else:
                differs = name in COMPARED and fact.known and theirs.value != fact.value
                row.append(_said(theirs.value) + (" (!)" if differs else ""))
        out.append(row)
    out.append(["would start", "", "", *("no" if v.refuses else "yes" for v in seen)])
    out.append(["left unfilled", "", "", *(str(len(v.left)) for v in seen)])
    return out
