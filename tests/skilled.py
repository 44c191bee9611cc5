"""Drafters that have learned something, small enough to be trained in a test: a target of eight layers answers, and a drafter of a
given contract learns these answers by heart."""

from dataclasses import replace

import torch

from eyas import target as targets
from eyas.contract import Norms, for_target
from eyas.drafter import disk, probe
from eyas.drafter.architectures import build
from eyas.drafter.batch import pack
from eyas.drafter.loss import Teacher, ttt_loss
from eyas.engines import reading
from eyas.engines.hf import HFEngine
from eyas.train import schedule

STEPS, UPDATES, RATE = 3, 250, 6e-3
AUX = [2, 4, 5]  # of eight layers
AQ = {
    "head_dim": 16,
    "kv_heads": 4,
    "rope_theta": 1e6,
    "eps": 1e-6,
}  # head_dim beside hidden / heads = 8, as AQ-MedAI's 128 beside 112


def answers(target_folder, count=24, tokens=24, layers=None):
    """The target, and conversations of it with the states of all layers that a probe can ask for."""
    t = targets.load(target_folder)
    wanted = tuple(layers or sorted({i + s for i in AUX for s in (-1, 0, 1)}))
    engine = HFEngine(t, "float32", "cpu", wanted, remote_code=True)
    g = torch.Generator().manual_seed(2)
    prompts = [
        (f"{i:016x}", torch.randint(4, t.vocab, (30 + i,), generator=g).tolist()) for i in range(count)
    ]
    return t, probe.Rows(reading.states_of(engine, reading.answered(engine, prompts, tokens)), wanted)


def drafter(target, rows, norms=None, ids=None, vocab=200, **shape):
    """Trained on all of these rows."""
    ids = list(ids or AUX)
    c = replace(for_target(target, ids, norms or Norms(False, "none", False), vocab, STEPS, 64), **shape)
    places = [rows.layers.index(i) for i in ids]
    mine = [replace(r, kept_TLD=r.aux_TLD[:, places].float()) for r in rows.rows]
    counts = torch.bincount(torch.cat([r.ids_T.long() for r in mine]), minlength=target.vocab)
    counts[list(target.stop_ids)] += 10**6
    kept = counts.argsort(descending=True, stable=True)[:vocab].sort().values
    made = build(c)
    made.reset(0, kept, target.head_VD()[kept], target.final_norm_D())
    with torch.no_grad():  # as training leaves it on a large target: the normed state is not the state
        made.hidden_norm.weight.mul_(torch.linspace(0.5, 3, target.hidden))
    draft_id = torch.full((target.vocab,), -1).index_put_((kept,), torch.arange(vocab))
    teacher = Teacher(
        target.head_VD()[kept].float(),
        target.final_norm_D(),
        target.eps,
        draft_id,
        target.embedding_VD().float(),
    )
    optimizer = torch.optim.AdamW(made.parameters(), lr=RATE)
    batch = pack(mine)
    for step in range(UPDATES):
        loss = ttt_loss(made, teacher, batch, STEPS, 0.8)
        optimizer.zero_grad()
        (loss.total / batch.pairs).backward()
        optimizer.param_groups[0]["lr"] = schedule.learning_rate(step, UPDATES, RATE)
        optimizer.step()
    return made.eval()


def write(folder, made):
    disk.write(folder, made, {"epoch": 1, "tau": {}})
    return folder
