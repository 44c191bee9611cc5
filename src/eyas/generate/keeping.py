"""States kept while the answers are generated: from the engine's steps to shards, part by part.

    conversations/steps/                          what the engine writes; gone when the part's shards are written
    conversations/states/part-00000-000.safetensors   shards of a part's rows, written before the part itself
                         likeness.json                how like the engine's own second reading of the first part they are
                         settings.json                layers and types; shards of others are thrown away
                         kept.json                    the same, once all parts are kept

extract checks the shards and takes them over. The last token of an answer is never read by the engine, so its states are zeros;
nothing reads them (drafter/batch.py).
"""

import shutil
from dataclasses import replace
from typing import Any

from eyas.errors import ContractError
from eyas.generate import answering
from eyas.generate.answering import Server
from eyas.progress import say
from eyas.recipe import Resolved
from eyas.rundir import RunDir, atomic, read_json, write_json
from eyas.servers import reading
from eyas.stores import likeness, states
from eyas.stores.conversations import Row
from eyas.stores.states import RowStates

KEPT, LIKENESS, SETTINGS = "kept.json", "likeness.json", "settings.json"
AGAIN_ROWS = 4  # read a second time, alone and together


class Keeper:
    """Turns steps into shards."""

    def __init__(self, resolved: Resolved, rundir: RunDir, server: Server) -> None:
        self.resolved, self.server = resolved, server
        assert server.steps is not None
        self.steps = server.steps
        self.folder = rundir / "conversations" / "states"
        self.settings = {
            "aux_layers": resolved.aux_layers,
            "dtype": resolved.dtype,
            "aux_dtype": resolved.recipe.extract.dtype,
        }
        begun = self.folder / SETTINGS
        if begun.is_file() and read_json(begun) != self.settings:
            shutil.rmtree(self.folder)  # kept of other layers, before a kill: they must not be mixed
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(begun, self.settings)
        seen = self.folder / LIKENESS
        self.again: dict[str, Any] = read_json(seen) if seen.is_file() else {}
        self.without_rows: set[int] = set()  # parts of flagged rows alone

    def part(self, number: int, rows: list[Row]) -> None:
        """Write a part's shards. Raises SurroundingsError where states did not come, ContractError where they are others."""
        lengths = {r.row_id: len(r.ids) - 1 for r in rows}
        rows = [r for r in rows if not r.flag]
        self.steps.wait({self._name(r): lengths[r.row_id] for r in rows})
        self.drop(number)
        per_token = self.resolved.token_bytes
        self.without_rows |= {number} if not rows else set()
        for i, group in enumerate(states.groups(rows, self.resolved.recipe.extract.shard_bytes, per_token)):
            found = [self._row(r) for r in group]
            with atomic(self.folder / f"part-{number:05d}-{i:03d}.safetensors") as tmp:
                states.write_shard(tmp, found, {}, self.resolved.fp8)
        if not self.again and rows:
            self.again = self._read_again(rows)
            write_json(self.folder / LIKENESS, self.again)
        self.steps.forget(
            [answering.try_name(n, i) for n in lengths for i in range(self.server.tries.pop(n, 0) + 1)]
        )

    def _row(self, row: Row) -> RowStates:
        found = self.steps.row(self._name(row), row.ids, len(row.prompt_ids), len(row.ids) - 1)
        return replace(found, row_id=row.row_id)

    def _name(self, row: Row) -> str:
        """Under which the engine kept its states: of an answer that took several tries, the last one's."""
        return answering.try_name(row.row_id, self.server.tries.get(row.row_id, 0))

    def _read_again(self, rows: list[Row]) -> dict[str, Any]:
        """The longest answers of a part read once more as prompts, one by one and all at once: a decoded row against a
        prefilled one, and a row alone against a row among others. Raises ContractError where they are not the same."""
        chosen = sorted(rows, key=lambda r: -len(r.completion_ids))[:AGAIN_ROWS]
        own = {r.row_id: self._row(r) for r in chosen}
        alone, together = (self._prefilled(chosen, way) for way in ("alone", "together"))
        layers = self.resolved.aux_layers
        found = {
            "decoded_against_prefilled": likeness.compare(
                [(own[r.row_id], alone[r.row_id], range(len(r.prompt_ids), len(r.ids) - 1)) for r in chosen],
                layers,
            ),
            "together_against_alone": likeness.compare(
                [(together[r.row_id], alone[r.row_id], range(1, len(r.ids) - 1)) for r in chosen], layers
            ),
        }
        for name, one in found.items():
            if one is None:  # answers of a token or two
                continue
            said = f"states {name.replace('_', ' ')}"
            if wrong := likeness.differs(one):
                raise ContractError(
                    f"{said}: {wrong}. What the engine keeps while it generates cannot be trained on; set extract.with to pass."
                )
            say(f"  {said}: {likeness.shown(one)}")
        return found

    def _prefilled(self, rows: list[Row], way: str) -> dict[str, RowStates]:
        names = {r.row_id: f"{way} {r.row_id}" for r in rows}
        groups = [rows] if way == "together" else [[r] for r in rows]
        for group in groups:
            reading.read(self.server.url, self.server.model, [(names[r.row_id], r.ids[:-1]) for r in group])
        self.steps.wait({names[r.row_id]: len(r.ids) - 1 for r in rows})
        out = {
            r.row_id: self.steps.row(names[r.row_id], r.ids, len(r.prompt_ids), len(r.ids) - 1) for r in rows
        }
        self.steps.forget(list(names.values()))
        return out

    def drop(self, number: int) -> None:
        """Forget a part's states, since it loses rows."""
        for old in self.folder.glob(f"part-{number:05d}-*"):
            old.unlink()

    def finish(self, parts: list[int]) -> None:
        """Say what was kept, once every part has its shards; otherwise they go, since extract takes all or none."""
        shutil.rmtree(self.steps.folder, ignore_errors=True)
        lacking = [
            n
            for n in parts
            if n not in self.without_rows and not any(self.folder.glob(f"part-{n:05d}-*.safetensors"))
        ]
        if lacking:
            say(
                f"  {len(lacking)} parts were answered without keeping states: extract will read all rows again"
            )
            shutil.rmtree(self.folder)
            return
        write_json(
            self.folder / KEPT,
            {**self.settings, "engine": self.server.engine, "likeness": self.again},
        )
