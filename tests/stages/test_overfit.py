"""The overfit gate: on eight conversations the drafter must learn almost everything, or the pipeline has a fault."""

import torch

from eyas import target as targets
from eyas.contract import Norms, for_target
from eyas.drafter import replay
from eyas.drafter.batch import pack
from eyas.drafter.loss import Teacher
from eyas.drafter.network import Drafter
from eyas.engines.hf import HFEngine
from eyas.stores.states import RowStates
from eyas.train import schedule
from eyas.train.updates import TTT, Updates

STEPS = 3
UPDATES = 400


def conversations(engine):
    g = torch.Generator().manual_seed(2)
    for i in range(8):
        prompt = torch.randint(4, engine.target.vocab, (6 + i,), generator=g).tolist()
        answer = engine.generate([prompt], 24, [0.0], 1.0, [torch.zeros(24).numpy()])[0].ids
        seen = engine.states([prompt + answer])
        ids = torch.tensor(prompt + answer, dtype=torch.int32)
        yield RowStates(f"{i:016x}", ids, seen.aux_BTLD[0], seen.last_BTD[0], seen.top1_BT[0], len(prompt))


def test_eight_conversations_are_learned(target_folder):
    t = targets.load(target_folder)
    engine = HFEngine(t, "float32", "cpu", [0, 1, 2])
    rows = list(conversations(engine))
    made = Drafter(for_target(t, [0, 1, 2], Norms(False, "chunks", False), t.vocab, STEPS, 64))
    made.reset(0, torch.arange(t.vocab), t.head_VD(), t.final_norm_D())
    teacher = Teacher(t.head_VD(), t.final_norm_D(), t.eps, torch.arange(t.vocab), t.embedding_VD())
    updates = Updates(made, teacher, torch.float32, TTT(STEPS, 0.8))
    batch = pack(rows)
    for step in range(UPDATES):
        done = updates.apply([batch], schedule.learning_rate(step, UPDATES, 5e-3))
    accuracy = [h / n for h, n in zip(done.hits_S.tolist(), done.pairs_S, strict=True)]
    walks = [
        replay.walk(a, STEPS) for a in replay.accepted_lengths(made.eval(), teacher.embedding_VD, rows, STEPS)
    ]
    assert accuracy[0] > 0.95 and accuracy[-1] > 0.8, accuracy
    assert replay.positions(walks)[0] > 0.95, replay.positions(walks)
