"""Time EAGLE-3 training steps of speculators (vllm-project/speculators) on synthetic batches.

Runs speculators' own classes: TrainConfig and build_draft_model make the drafter, Trainer.train_epoch runs
the steps, with the optimizer that build_optimizers picks (default: Muon with AdamW; or --optimizer adamw),
its autocast, its gradient clipping, its compiled forward pass and its fused loss.

It differs from `speculators train` in these points only:
- the batches are random and already on the GPU (no data loader, no files, no vLLM); the target is a folder
  with random weights. Two batches are used in turn;
- one layer with full attention (--full-attention-indices 0), because the default is a window of 2048;
- no learning-rate schedule, no checkpoint, no validation;
- the two kernels of the fused loss get a copy each of their autotune list: on torch 2.11 with triton 3.6
  the compiled step of speculators 0.9.0 stops at the shared list. The mathematics is unchanged.

Each cell is timed twice: with log_freq 1 (a synchronization and the metrics every step, the default) and
with logging off and one synchronization at the end. step_ms is the smaller of the two.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.machinery
import importlib.util
import json
import logging
import statistics
import sys
import tempfile
import time
import types
from pathlib import Path

import numpy
import peer_common as common
import torch
from safetensors.torch import save_file

NEVER = 10**9


class _Unused:
    """Stands for a class that is imported, or named in an annotation, and never used here."""


@contextlib.contextmanager
def stubbed_imports():
    """Let speculators import `datasets` and `openai` where they are missing.

    It imports them at module level for its data files and its vLLM client, neither of which is used here.
    A package that is installed is left alone.
    """
    wanted = {
        "datasets": ("Dataset", "load_from_disk", "load_dataset", "concatenate_datasets"),
        "openai": ("OpenAI", "AsyncOpenAI", "Client", "AsyncClient"),
        "openai.types": (),
        "openai.types.chat": ("ChatCompletion", "ChatCompletionMessageParam"),
        "openai.types.completion": ("Completion",),
    }
    missing = {top for top in ("datasets", "openai") if importlib.util.find_spec(top) is None}
    stubs = {name: names for name, names in wanted.items() if name.split(".")[0] in missing}
    for name, names in stubs.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        for attribute in names:
            setattr(module, attribute, type(attribute, (_Unused,), {}))
        sys.modules[name] = module
    try:
        yield sorted(missing)
    finally:
        for name in stubs:
            del sys.modules[name]


def write_target(folder, shape, device):
    """A target's folder: configuration and random embedding, head and final norm."""
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_attention_heads": shape.heads,
        "head_dim": shape.head_dim,
        "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": shape.target_layers,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 131072,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    generator = torch.Generator(device=device).manual_seed(1)

    def matrix():
        size = (shape.vocab, shape.hidden)
        values = torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator)
        return values.mul_(0.02).cpu()

    tensors = {
        "model.embed_tokens.weight": matrix(),
        "lm_head.weight": matrix(),
        "model.norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16),
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    weight_map = {name: "model.safetensors" for name in tensors}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


def resolved_arguments(options, shape, tokens, device):
    """The flat arguments that `speculators train` would have, from its own TrainConfig."""
    from speculators.train.config import TrainConfig

    work = Path(options.work)
    target = work / f"target-{options.shape}"
    write_target(target, shape, device)
    target_to_draft, draft_to_target = common.vocabulary_map(shape)
    paths = {"t2d": target / "t2d.npy", "d2t": target / "d2t.npy"}
    numpy.save(paths["t2d"], target_to_draft.numpy())
    numpy.save(paths["d2t"], draft_to_target.numpy())
    command = [
        "--verifier-name-or-path",
        str(target),
        "--t2d-path",
        str(paths["t2d"]),
        "--d2t-path",
        str(paths["d2t"]),
        "--mask-token-id",
        "0",
        "--total-seq-len",
        str(tokens),
        "--save-path",
        str(work / "unused"),
        "--full-attention-indices",
        "0",
    ]
    if options.dry:
        command += ["--draft-attn-impl", "eager", "--loss-implementation", "eager"]
    return argparse.Namespace(**TrainConfig.resolve(command).flatten())


def separate_autotune_lists():
    """Give each of the two fused-loss kernels its own list (see the module's docstring)."""
    from speculators.losses import fused

    for kernel in (fused.loss_forward_kernel, fused.loss_backward_kernel):
        kernel.configs = copy.deepcopy(kernel.configs)
        kernel.keys = list(kernel.keys)


def run_on_cpu():
    """For --dry: the trainer asks for the accelerator's rank and synchronizes it."""
    import speculators.train.trainer as trainer_module

    trainer_module.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_, **__: None


def build_model(arguments, device):
    from speculators.model import SpeculatorModel
    from speculators.train.cli import build_draft_model, parse_vocab_mappings, set_seed

    set_seed(arguments.seed, False)
    draft_to_target, target_to_draft, draft_vocab = parse_vocab_mappings(arguments)
    model_class = SpeculatorModel.registry[arguments.speculator_type]
    with torch.device(device):
        model = build_draft_model(arguments, model_class, target_to_draft, draft_to_target, draft_vocab)
    model.train()
    return model


def make_trainer(model, arguments, optimizer, ttt, loader):
    from speculators.train.trainer import Trainer, TrainerConfig

    arguments.ttt_steps = ttt
    call_arguments, _ = type(model).get_trainer_kwargs(**vars(arguments))
    names = (
        "lr",
        "weight_decay",
        "muon_lr",
        "muon_momentum",
        "muon_weight_decay",
        "muon_ns_steps",
        "muon_adjust_lr_fn",
    )
    config = TrainerConfig(
        num_epochs=1,
        save_path=arguments.save_path,
        train_call_kwargs=call_arguments,
        optimizer=optimizer,
        scheduler_type="none",
        hidden_states_dtype=torch.bfloat16,
        log_freq=1,
        **{name: getattr(arguments, name) for name in names},
    )
    trainer = Trainer(model, config, loader)
    trainer.device_type = model.device.type  # what it finds by itself, but for --dry
    return trainer


def make_batch(cell, shape, device, seed):
    """What speculators' collate function gives for documents packed into one row."""
    number, position, supervised = common.packed_layout(cell["docs"])
    tokens = len(number)
    generator = torch.Generator(device=device).manual_seed(seed)

    def states(width):
        size = (1, tokens, width)
        return torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator)

    return {
        "hidden_states": states(3 * shape.hidden),
        "verifier_last_hidden_states": states(shape.hidden),
        "input_ids": torch.randint(0, shape.vocab, (1, tokens), device=device, generator=generator),
        "loss_mask": supervised.to(device)[None],
        "position_ids": (position + 1).to(device)[None],
        "document_ids": number.to(device)[None],
        "error_records": 0,
    }


class Loader:
    """Stands for the data loader: `steps` batches, in turn; notes when the first one was asked for."""

    class _Sampler:
        def set_epoch(self, epoch):
            pass

    batch_sampler = _Sampler()

    def __init__(self):
        self.steps = 0
        self.batches = []
        self.began = 0.0

    def __len__(self):
        return self.steps

    def __iter__(self):
        common.synchronize()
        self.began = time.perf_counter()
        for i in range(self.steps):
            yield dict(self.batches[i % len(self.batches)])


class MetricLog(logging.Handler):
    """Keeps what the trainer logs: each step's time and loss."""

    def __init__(self):
        super().__init__()
        self.step_ms = []
        self.loss = None
        logger = logging.getLogger("speculators.metrics")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record):
        if isinstance(record.msg, dict) and record.msg.get("profile"):
            self.step_ms.append(record.msg["profile"]["step_ms"])
            self.loss = record.msg["train"].get("loss")


def run_epoch(trainer, steps, log_every):
    """Run `steps` steps; return the mean milliseconds from the first batch to the end of the last step."""
    loader = trainer.train_loader
    loader.steps = steps
    done = {"steps": 0, "at": 0.0}

    def after_step():
        done["steps"] += 1
        if done["steps"] == steps:
            common.synchronize()
            done["at"] = time.perf_counter()

    trainer.config = trainer.config._replace(log_freq=log_every)
    trainer.train_epoch(0, step_callback=after_step)
    return (done["at"] - loader.began) / steps * 1e3


def measure(trainer, log, options):
    """Warm up, then time with the trainer's logging and without it."""
    log.step_ms.clear()
    run_epoch(trainer, options.warm_up, 1)
    warm_up_ms = [round(value, 1) for value in log.step_ms]
    log.step_ms.clear()
    common.reset_peak()
    run_epoch(trainer, options.steps, 1)
    logged = statistics.median(log.step_ms)
    unlogged = run_epoch(trainer, options.steps, NEVER)
    return {
        "step_ms": round(min(logged, unlogged), 2),
        "step_ms_log": round(logged, 2),
        "step_ms_nolog": round(unlogged, 2),
        "step_ms_all": [round(value, 2) for value in log.step_ms],
        "warm_up_ms": warm_up_ms,
        "peak_bytes": common.peak_bytes(),
        "input_bytes": common.tensor_bytes(
            value
            for batch in trainer.train_loader.batches
            for value in batch.values()
            if isinstance(value, torch.Tensor)
        ),
        "loss": log.loss,
    }


def report_model(model, arguments):
    """Print what decides how much work a step is."""
    names = (
        "optimizer",
        "lr",
        "muon_lr",
        "loss_fn",
        "loss_implementation",
        "ttt_step_loss_decay",
        "fc_norm",
        "norm_before_residual",
        "norm_before_fc",
        "norm_output",
        "full_attention_indices",
        "draft_attn_impl",
        "hidden_states_dtype",
    )
    print("RESOLVED", json.dumps({name: str(getattr(arguments, name)) for name in names}))
    common.report_parameters(model)


def run_cells(options, model, arguments, device):
    """All cells, by unroll length, so that only a new length compiles anew."""
    shape = common.SHAPES[options.shape]
    optimizer = arguments.optimizer if options.optimizer == "default" else options.optimizer
    log, loader, trainer, ttt = MetricLog(), Loader(), None, None
    for cell in sorted(common.read_cells(options.cells), key=lambda cell: cell["ttt"]):
        if cell["ttt"] != ttt:
            torch._dynamo.reset()
            trainer, ttt = None, cell["ttt"]
        loader.batches = []
        common.free_memory()

        def run(cell=cell):
            nonlocal trainer
            seeds = range(3, 3 + common.DISTINCT_BATCHES)
            loader.batches = [make_batch(cell, shape, device, seed) for seed in seeds]
            trainer = trainer or make_trainer(model, arguments, optimizer, cell["ttt"], loader)
            return measure(trainer, log, options)

        record = common.base_record("speculators", options, cell, optimizer)
        if not common.run_cell(record, options.out, run):
            trainer = None  # its optimizer may be half stepped: the next cell makes a new one
            model.zero_grad(set_to_none=True)


def main():
    parser = common.argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--optimizer", choices=("default", "adamw"), default="default")
    parser.add_argument(
        "--work",
        default=str(Path(tempfile.gettempdir()) / "peer-speculators"),
        help="folder for the random target (2 GB for 8B, 5 GB for Kimi), kept between calls",
    )
    options = parser.parse_args()
    device = common.prepare_process(options.dry)
    with stubbed_imports() as stubs:
        import speculators.train.cli
    print("stubbed:", stubs, "speculators from", Path(speculators.__file__).name, flush=True)
    if options.dry:
        run_on_cpu()
    separate_autotune_lists()
    tokens = common.token_count(common.read_cells(options.cells)[0])
    arguments = resolved_arguments(options, common.SHAPES[options.shape], tokens, device)
    model = build_model(arguments, device)
    report_model(model, arguments)
    run_cells(options, model, arguments, device)


if __name__ == "__main__":
    main()
