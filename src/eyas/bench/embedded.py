"""bench in the embedded engine: one request at a time, each prompt with every k in turn.

Writes bench/round-*.json (one round each), bench/requests.parquet and the body of bench.json.
"""

from collections import Counter
from dataclasses import asdict
from typing import Any

import torch

from eyas import interrupt
from eyas.bench import measure, shown
from eyas.bench.measure import Request
from eyas.causes import NEAR_TIE
from eyas.drafter import disk, replay
from eyas.drafter.decode import decode
from eyas.drafter.network import Drafter
from eyas.engines.hf import HFEngine
from eyas.errors import ContractError
from eyas.progress import Progress
from eyas.recipe import Resolved
from eyas.rundir import RunDir, read_json, write_json
from eyas.stores import states
from eyas.stores.conversations import Row
from eyas.stores.states import RowStates


def run(resolved: Resolved, rundir: RunDir, rows: list[Row]) -> dict[str, Any]:
    """Measure every k against k = 0; returns the manifest's body."""
    recipe = resolved.recipe
    engine = HFEngine(
        resolved.target, resolved.dtype, resolved.device, resolved.aux_layers, recipe.target.trust_remote_code
    )
    drafter = disk.read(rundir / "drafter" / "best", getattr(torch, resolved.dtype), resolved.device)
    bench = Bench(resolved, engine, drafter, rows)
    requests = bench.measure(rundir)
    shown.write_parquet(rundir, requests)
    cells = measure.cells(requests, recipe.verdict.confidence)
    replayed = bench.replayed(rundir)
    outputs = bench.compare_outputs(requests)
    for cell in cells:
        cell |= {"tau_replayed": replayed.get(cell["k"]), "outputs": outputs.get(cell["k"])}
        shown.cell(cell)
    base = [r for r in requests if r.k == 0]
    return {
        "content": len(requests),
        "engine": recipe.engine.name,
        "lengths": "natural",
        "concurrency": [1],
        "dtype": resolved.dtype,
        "device": resolved.device,
        "prompts": len(rows),
        "baseline_tokens_per_s": sum(r.decoded for r in base) / sum(r.decode_s for r in base),
        "cells": cells,
    }


class Bench:
    """One engine, one drafter, the prompts; measures and compares."""

    def __init__(self, resolved: Resolved, engine: HFEngine, drafter: Drafter, rows: list[Row]) -> None:
        self.options, self.engine, self.drafter, self.rows = resolved.recipe.bench, engine, drafter, rows
        self.embedding_VD = engine.model.get_input_embeddings().weight

    def _one(self, row: Row, k: int, number: int) -> Request:
        o = self.options
        got = decode(
            self.engine,
            self.drafter,
            self.embedding_VD,
            row.prompt_ids,
            k,
            o.max_tokens,
            o.temperature,
            number,
        )
        return Request(
            number, row.row_id, row.domain, k, len(row.prompt_ids), got.ids, got.finish_reason, got.steps,
            got.accepted_at, got.prefill_s, got.decode_s,
        )  # fmt: skip

    def measure(self, rundir: RunDir) -> list[Request]:
        """All rounds; each prompt with every k in turn. One prompt goes through all k first and is dropped."""
        ks = [0, *self.options.k]
        out: list[Request] = []
        warm = False
        with Progress(
            "bench", self.options.rounds * len(self.rows) * len(ks), "answers", "tokens"
        ) as progress:
            for number in range(self.options.rounds):
                interrupt.safe_place()
                path = rundir / "bench" / f"round-{number:03d}.json"
                if path.is_file():
                    done = [Request(**r) for r in read_json(path)]
                    progress.done += len(done)
                    progress.first += len(done)
                else:
                    if not warm:
                        warm = bool([self._one(self.rows[0], k, number) for k in ks])
                    done = []
                    for i, row in enumerate(self.rows):
                        for k in measure.order(ks, i + number):
                            done.append(self._one(row, k, number))
                            progress.add(1, len(done[-1].ids))
                    write_json(path, [asdict(r) for r in done])
                out += done
        return out

    def replayed(self, rundir: RunDir) -> dict[int, float]:
        """Replayed tau per k on the very conversations that were measured; only for greedy runs, since those are greedy."""
        if self.options.temperature > 0:
            return {}
        wanted = {r.row_id for r in self.rows}
        stored = states.verified(rundir / "states", rundir.manifest("extract")["content"])
        cut = [_cut(r.load(), self.options.max_tokens) for r in stored if r.row_id in wanted]
        accepted = replay.accepted_lengths(self.drafter, self.embedding_VD, cut, max(self.options.k))
        return {k: replay.tau([replay.walk(a, k) for a in accepted]) for k in self.options.k}

    def compare_outputs(self, requests: list[Request]) -> dict[int, dict[str, int]]:
        """Greedy answers with the drafter against those without: equal, or first different at a near tie, or a fault.

        Raises ContractError when the baseline differs from itself between rounds.
        """
        if self.options.temperature > 0:
            return {}
        base: dict[str, list[int]] = {}
        for r in requests:
            if r.k == 0 and base.setdefault(r.prompt, r.ids) != r.ids:
                raise ContractError(
                    f"bench: the plain answer to {r.prompt} differs between rounds, so nothing can be compared."
                )
        prompts = {r.row_id: r.prompt_ids for r in self.rows}
        out: dict[int, Counter[str]] = {}
        for r in requests:
            if r.k and r.round == 0:
                kind = self._judge(prompts[r.prompt], base[r.prompt], r.ids)
                out.setdefault(r.k, Counter(equal=0, near_tie=0, fault=0))[kind] += 1
        return {k: dict(v) for k, v in out.items()}

    def _judge(self, prompt: list[int], plain: list[int], drafted: list[int]) -> str:
        at = measure.first_difference(plain, drafted)
        if at is None:
            return "equal"
        seen = self.engine.states([prompt + plain[:at]])
        return "near_tie" if float(seen.gap_BT[0, -1]) < NEAR_TIE else "fault"


def _cut(row: RowStates, max_tokens: int) -> RowStates:
    end = row.start + max_tokens
    return RowStates(
        row.row_id,
        row.ids_T[:end],
        row.aux_TLD[:end],
        row.last_SD[: end - row.last_from],
        row.top1_T[:end],
        row.start,
    )
