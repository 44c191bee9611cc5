"""Time EAGLE-3 training steps of SpecForge (sgl-project/SpecForge) on synthetic batches.

Runs SpecForge's own classes: LlamaForCausalLMEagle3 (flex attention) in OnlineEagle3Model, trained by
Eagle3TrainStrategy, TrainerCore, FSDPTrainingBackend and BF16Optimizer (AdamW on float32 copies of the
bfloat16 weights), with the values of its configuration schema. The teacher is a frozen TargetHead on the
target's last hidden states, as in its offline training.

It differs from `specforge train` in these points only:
- the batches are random and already on the GPU (no feature store, no server). Two are used in turn;
- one process without the FSDP wrapper (prepare_model with wrap=False), which one GPU does not need;
- the random head favours the tokens of the draft vocabulary, as a trained map does: SpecForge leaves out
  the positions at which the teacher's best token is outside it.

SpecForge does not pack: a row is a document, padded to the longest of its batch. tokens_per_s counts the
real tokens, "rows_tokens" the padded ones. A cell's "micro_rows" (default: all) splits the rows into
batches of that many, whose gradients SpecForge accumulates before one step of the optimizer ("loss" is then
that of the last one).
compact_teacher is off, which is SpecForge's default; --compact-teacher sets it.
"""

from __future__ import annotations

import statistics
import time

import peer_common as common
import torch


def draft_config(shape, longest):
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_hidden_layers=1,
        vocab_size=shape.vocab,
        max_position_embeddings=max(4096, longest),
        rms_norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
        hidden_act="silu",
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.draft_vocab_size = shape.draft_vocab
    config.pretraining_tp = getattr(config, "pretraining_tp", 1)
    return config


def make_target_head(config, target_to_draft, device):
    """A frozen TargetHead with random weights; its constructor would read a target from a folder."""
    from specforge.modeling.target.target_head import TargetHead

    head = TargetHead.__new__(TargetHead)
    torch.nn.Module.__init__(head)
    head.config, head.hidden_size, head.vocab_size = config, config.hidden_size, config.vocab_size
    with torch.device(device):
        head.fc = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=torch.bfloat16)
        torch.nn.init.normal_(head.fc.weight, std=0.02)
    with torch.no_grad():
        head.fc.weight[~target_to_draft.to(device)] *= 0.1
    head.freeze_weights()
    return head.eval()


def make_draft(config, mapping, backend, device):
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    with torch.device(device):
        draft = LlamaForCausalLMEagle3(config, attention_backend=backend).to(torch.bfloat16)
    draft = draft.to(device)
    draft.t2d.copy_(mapping[0])
    draft.d2t.copy_(mapping[1])
    draft.freeze_embedding()
    return draft.train()


def make_core(draft, head, options, ttt, accumulation):
    """SpecForge's training core, with the defaults of its configuration schema."""
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.optimizer import BF16Optimizer
    from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
    from specforge.training.controller import TrainerCore
    from specforge.training.strategies.base import Eagle3TrainStrategy

    def optimizer(module):
        return BF16Optimizer(module, lr=1e-4, max_grad_norm=0.5, warmup_ratio=0.015, total_steps=10000)

    model = OnlineEagle3Model(draft, length=ttt, attention_backend=options.attention)
    strategy = Eagle3TrainStrategy(model, target_head=head, compact_teacher=options.compact_teacher)
    backend = FSDPTrainingBackend(ParallelConfig(), optimizer_factory=optimizer)
    backend.prepare_model(model, wrap=False, optimizer_target=draft)
    return TrainerCore(strategy, backend, accumulation_steps=accumulation)


def make_batch(docs, shape, device, generator):
    """What SpecForge's collate function gives: one row a document, padded to the longest."""
    from specforge.runtime.contracts import TrainBatch

    real, supervised = common.padded_layout(docs)
    rows, longest = real.shape

    def states(width):
        values = torch.randn(rows, longest, width, dtype=torch.bfloat16, device=device, generator=generator)
        return values.mul_(real.to(device)[..., None])

    ids = torch.randint(0, shape.vocab, (rows, longest), device=device, generator=generator)
    return TrainBatch(
        sample_ids=[str(row) for row in range(rows)],
        strategy="eagle3",
        metadata={"target_repr": "hidden_state"},
        tensors={
            "input_ids": ids * real.to(device),
            "attention_mask": real.long().to(device),
            "loss_mask": supervised.long().to(device),
            "hidden_state": states(3 * shape.hidden),
            "target": states(shape.hidden),
        },
    )


def make_step_batches(cell, shape, device, seed):
    """The micro-batches of one optimizer step."""
    generator = torch.Generator(device=device).manual_seed(seed)
    docs = cell["docs"]
    rows = cell.get("micro_rows") or len(docs)
    return [make_batch(docs[i : i + rows], shape, device, generator) for i in range(0, len(docs), rows)]


def timed_step(core, batches):
    """One optimizer step: its milliseconds and SpecForge's own result."""
    common.synchronize()
    began = time.perf_counter()
    for batch in batches:
        result = core.train_step(batch)
    common.synchronize()
    if not result.optimizer_stepped:
        raise RuntimeError("the optimizer did not step")
    return (time.perf_counter() - began) * 1e3, result


def measure(core, sources, options):
    """Warm up, then time each step between two synchronizations."""

    def repeat(count):
        return [timed_step(core, sources[i % len(sources)]) for i in range(count)]

    warm_up = repeat(options.warm_up)
    common.reset_peak()
    done = repeat(options.steps)
    step_ms = [value for value, _ in done]
    result = done[-1][1]
    tensors = [value for batches in sources for batch in batches for value in batch.tensors.values()]
    return {
        "step_ms": round(statistics.median(step_ms), 2),
        "step_ms_all": [round(value, 2) for value in step_ms],
        "warm_up_ms": [round(value, 1) for value, _ in warm_up],
        "peak_bytes": common.peak_bytes(),
        "input_bytes": common.tensor_bytes(tensors),
        "loss": result.metrics.get("loss", result.loss),
        "acc": result.metrics.get("acc"),
    }


def layout(cell):
    """The shapes that the compiled code sees: rows and length of each micro-batch."""
    docs = cell["docs"]
    rows = cell.get("micro_rows") or len(docs)
    groups = [docs[i : i + rows] for i in range(0, len(docs), rows)]
    return [(len(group), max(length for length, _ in group)) for group in groups]


def run_on_cpu():
    """For --dry: SpecForge's Triton loss needs a GPU; use the reference that stands beside it."""
    import specforge.algorithms.eagle3.model as model_module
    from specforge.core.loss import _compute_loss

    class ReferenceLoss:
        apply = staticmethod(_compute_loss)

    model_module.LogSoftmaxLoss = ReferenceLoss


def run_cells(options, draft, head, device):
    """All cells, those of one layout together, so that each is compiled for its own shapes."""
    shape = common.SHAPES[options.shape]
    compiled_for = None
    for cell in sorted(common.read_cells(options.cells), key=lambda cell: (layout(cell), cell["ttt"])):
        if layout(cell) != compiled_for:
            torch._dynamo.reset()
            compiled_for = layout(cell)
        draft.zero_grad(set_to_none=True)
        common.free_memory()

        def run(cell=cell):
            seeds = range(3, 3 + common.DISTINCT_BATCHES)
            sources = [make_step_batches(cell, shape, device, seed) for seed in seeds]
            core = make_core(draft, head, options, cell["ttt"], accumulation=len(layout(cell)))
            return measure(core, sources, options)

        record = common.base_record("specforge", options, cell, "adamw")
        record.update(
            attention=options.attention,
            compact_teacher=options.compact_teacher,
            micro_batches=len(layout(cell)),
            rows_tokens=sum(rows * length for rows, length in layout(cell)),
        )
        common.run_cell(record, options.out, run)


def main():
    parser = common.argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--compact-teacher", action="store_true")
    options = parser.parse_args()
    device = common.prepare_process(options.dry)
    options.attention = "sdpa" if options.dry else "flex_attention"
    if options.dry:
        run_on_cpu()
    shape = common.SHAPES[options.shape]
    longest = max(length for cell in common.read_cells(options.cells) for _, length in layout(cell))
    mapping = common.vocabulary_map(shape)
    config = draft_config(shape, longest)
    torch.manual_seed(0)
    head = make_target_head(config, mapping[0], device)
    draft = make_draft(config, mapping, options.attention, device)
    common.report_parameters(draft)
    run_cells(options, draft, head, device)


if __name__ == "__main__":
    main()
