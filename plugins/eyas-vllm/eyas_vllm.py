"""Keeps the target's hidden states in the pass in which vLLM generates: compiled and under CUDA graphs.

Compared with another computation of the same states: CUDA graphs on 0.25.1 (a Llama graph), and on 0.32.0's CPU build eager (a Llama
graph; latent attention with experts). One rank writes; more than one was never run.

vLLM loads this in each of its processes (entry point vllm.general_plugins). It does nothing unless EYAS_STATES_DIR is set:

    EYAS_STATES_DIR      folder to write to
    EYAS_STATES_LAYERS   JSON: aux layers (id i is the input of layer i) and, last, the number of layers: what the final norm reads
    EYAS_STATES_DTYPE    of the aux states: bfloat16 | float32; the last state keeps the type in which it was computed
    EYAS_STATES_BUFFER   bytes of host memory between the engine and the disk (1 GiB; at least two full steps)

A request is kept iff its sampling parameters carry extra_args["eyas_row"] (`vllm_xargs` of a request body). What is written:

    DIR/ready-PID.json       what is kept and how, once the model is loaded; removed when keeping has failed
    DIR/steps-PID-NNNNN.log  one record after another, each a step of the engine:
        b"EYS1"  uint32 length of the header, the header: {"rows": n, "requests": [[row, position, count], …]}
        int32 [n] ids that were fed   int32 [requests] argmax of the logits after a request's last row
        [n, L, D] aux   [n, D] last

Positions make records independent: a preempted request is read again from 0 and writes the same positions anew. Memory is bounded:
a place in the buffer is free only when it is on the disk, and a step waits for one. A disk that fails ends keeping, said in the log,
never the server.
"""

import collections
import contextlib
import json
import os
import struct
import sys
import threading

VERSION = "0.1.0"
MAGIC = b"EYS1"
OLDEST, NEWEST = (0, 25), (0, 32)  # tried with 0.25.1 (CUDA) and 0.32.0 (CPU)
ROW = "eyas_row"
FILE_BYTES = 256 * 2**20
BUFFER_BYTES = 2**30
ALIGN = 64


def register():
    """Called by vLLM in every process. Raises RuntimeError, which ends the server, where states could not be kept rightly."""
    folder = os.environ.get("EYAS_STATES_DIR")
    if not folder:
        return
    import vllm

    refuse_untried(vllm.__version__)
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0":
        raise RuntimeError(
            "eyas-vllm: set VLLM_USE_V2_MODEL_RUNNER=0; states are kept in the V1 model runner"
        )
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    patch(GPUModelRunner, tuple(json.loads(os.environ["EYAS_STATES_LAYERS"])), folder)


def refuse_untried(version):
    found = tuple(
        int("".join(c for c in part if c.isdigit()) or 0) for part in version.split("+")[0].split(".")[:2]
    )
    if not OLDEST <= found <= NEWEST:
        raise RuntimeError(
            f"eyas-vllm: tried with vLLM {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}, and this is {version}"
        )


def patch(runner_class, layers, folder):
    """Let a runner hand out aux states of `layers` and write those of tagged requests."""
    if getattr(runner_class, "eyas_layers", None):
        return
    runner_class.eyas_layers = layers
    init, execute = runner_class.__init__, runner_class.execute_model

    def __init__(self, *args, **kwargs):
        init(self, *args, **kwargs)
        refuse_unfit(self.vllm_config)
        self.use_aux_hidden_state_outputs = True
        self.eyas = Keeper(self, layers, folder) if writes() else None

    def execute_model(self, scheduled, *args, **kwargs):
        result = execute(self, scheduled, *args, **kwargs)
        if self.eyas is not None and scheduled.total_num_scheduled_tokens:
            self.eyas.step(self, scheduled)
        return result

    runner_class.__init__, runner_class.execute_model = __init__, execute_model
    runner_class._get_eagle3_aux_layers_from_config = lambda self: layers


def refuse_unfit(config):
    """Raises RuntimeError naming the setting with which rows of states would be missing or wrong."""
    parallel, cache = config.parallel_config, config.cache_config
    wrong = {
        "prefix caching (--no-enable-prefix-caching)": cache.enable_prefix_caching,
        "speculative decoding": config.speculative_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "dual batch overlap": getattr(parallel, "enable_dbo", False),
        "fast prefill of shared caches": getattr(cache, "kv_sharing_fast_prefill", False),
        "pooling": config.model_config.runner_type != "generate",
    }
    found = [name for name, there in wrong.items() if there]
    if found:
        raise RuntimeError(f"eyas-vllm: states cannot be kept with {', '.join(found)}")


def writes():
    """Whether this process writes: the first rank of a tensor-parallel group, all of which hold the same states."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().rank_in_group == 0


class Keeper:
    """Copies a step's states to the host while the next one computes, and writes them on a thread."""

    def __init__(self, runner, layers, folder):
        import torch

        self.torch = torch
        self.layers, self.folder = len(layers) - 1, folder
        self.aux_dtype = getattr(torch, os.environ.get("EYAS_STATES_DTYPE", "bfloat16"))
        self.last_dtype = runner.dtype
        self.hidden = runner.model_config.get_hidden_size()
        self.stream = None
        row = self.hidden * (self.layers * self.aux_dtype.itemsize + self.last_dtype.itemsize) + 4
        step = row * runner.max_num_tokens + 4 * runner.max_num_reqs + 8 * ALIGN
        wanted = int(os.environ.get("EYAS_STATES_BUFFER") or BUFFER_BYTES)
        self.ring = Ring(
            torch.empty(max(wanted, 2 * step), dtype=torch.uint8, pin_memory=runner.device.type == "cuda")
        )
        about = {
            "plugin": VERSION,
            "layers": list(layers),
            "hidden": self.hidden,
            "aux_dtype": str(self.aux_dtype).split(".")[1],
            "last_dtype": str(self.last_dtype).split(".")[1],
        }
        self.log = Log(folder, about)
        threading.Thread(target=self.drain, name="eyas-states", daemon=True).start()

    def step(self, runner, scheduled):
        """Keep the tagged requests' rows of the step that was just launched."""
        requests, places, starts = self.wanted(runner, scheduled)
        if not requests or self.log.failed:
            return
        state = runner.execute_model_state
        if state is None or state.aux_hidden_states is None:
            raise RuntimeError("eyas-vllm: the engine gave no aux states for a step")
        n, torch = scheduled.total_num_scheduled_tokens, self.torch
        aux = torch.stack([h[:n] for h in state.aux_hidden_states[:-1]], dim=1).to(self.aux_dtype)
        last = state.aux_hidden_states[-1][:n]
        ids = runner.input_ids.gpu[:n] if hasattr(runner.input_ids, "gpu") else runner.input_ids[:n]
        top1 = state.logits.argmax(-1).to(torch.int32)
        kept = sum(count for _, _, count in requests)
        if kept != n:  # somebody else's requests are in the batch
            rows = [at + i for at, (_, _, count) in zip(starts, requests, strict=True) for i in range(count)]
            index = torch.tensor(rows, device=aux.device)
            aux, last, ids = aux[index], last[index], ids[index]
        if len(places) != len(top1):
            top1 = top1[torch.tensor(places, device=top1.device)]
        parts = [
            ids.to(torch.int32, copy=True),
            top1,
            aux,
            last.clone(),
        ]  # copies: the engine's own buffers are used again
        sizes = [p.numel() * p.element_size() for p in parts]
        offsets, total = [], 0
        for size in sizes:
            offsets.append(total)
            total += -(-size // ALIGN) * ALIGN
        place = self.ring.take(total)
        event = self.copy(parts, [place + o for o in offsets])
        spans = [(place + o, size) for o, size in zip(offsets, sizes, strict=True)]
        self.ring.put((event, {"rows": kept, "requests": requests}, spans))

    def wanted(self, runner, scheduled):
        """Requests that are kept as [row name, position, count], their places in the batch, and where their rows begin in it."""
        cached = scheduled.scheduled_cached_reqs
        begun = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        begun.update((new.req_id, new.num_computed_tokens) for new in scheduled.scheduled_new_reqs)
        requests, places, starts, at = [], [], [], 0
        for place, request in enumerate(runner.input_batch.req_ids):
            count = scheduled.num_scheduled_tokens.get(request, 0)
            params = runner.requests[request].sampling_params
            name = ((params and params.extra_args) or {}).get(ROW)
            if name is not None and count:
                starts.append(at)
                requests.append([name, begun[request], count])
                places.append(place)
            at += count
        return requests, places, starts

    def copy(self, parts, offsets):
        torch, buffer = self.torch, self.ring.buffer
        to = [
            buffer[o : o + p.numel() * p.element_size()].view(p.dtype).view(p.shape)
            for p, o in zip(parts, offsets, strict=True)
        ]
        if parts[0].device.type != "cuda":
            for target, part in zip(to, parts, strict=True):
                target.copy_(part)
            return None
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for target, part in zip(to, parts, strict=True):
                target.copy_(part, non_blocking=True)
                part.record_stream(self.stream)
            event = torch.cuda.Event()
            event.record()
        return event

    def drain(self):
        while True:
            event, about, spans = self.ring.get()
            header = json.dumps(about).encode()
            if event is not None:
                event.synchronize()
            memory = memoryview(self.ring.buffer.numpy())
            self.log.write(
                [MAGIC, struct.pack("<I", len(header)), header, *(memory[o : o + n] for o, n in spans)]
            )
            self.ring.free()


class Ring:
    """A buffer whose places are taken and freed in order; `take` waits until there is one."""

    def __init__(self, buffer):
        self.buffer = buffer
        self.live: collections.deque = collections.deque()  # (begin, end) of what is taken, oldest first
        self.full: collections.deque = collections.deque()
        self.changed = threading.Condition()

    def take(self, size):
        """Offset of `size` bytes in one piece. Raises RuntimeError where they could never fit."""
        if size > len(self.buffer):
            raise RuntimeError(
                f"eyas-vllm: a step of {size} bytes does not fit the buffer of {len(self.buffer)}"
            )
        with self.changed:
            while True:
                place = self.room(size)
                if place is not None:
                    self.live.append((place, place + size))
                    return place
                self.changed.wait()

    def room(self, size):
        if not self.live:
            return 0
        oldest, newest = self.live[0][0], self.live[-1][1]
        if newest > oldest:  # what is taken lies in one piece
            return newest if len(self.buffer) - newest >= size else 0 if oldest >= size else None
        return newest if oldest - newest >= size else None

    def put(self, item):
        with self.changed:
            self.full.append(item)
            self.changed.notify_all()

    def get(self):
        with self.changed:
            while not self.full:
                self.changed.wait()
            return self.full.popleft()

    def free(self):
        with self.changed:
            self.live.popleft()
            self.changed.notify_all()


class Log:
    """Files of a bounded size; the first error ends writing and removes the ready file, so that a reader knows."""

    def __init__(self, folder, about):
        os.makedirs(folder, exist_ok=True)
        self.folder, self.number, self.size, self.failed = folder, 0, 0, False
        self.file = self.open()
        self.ready = os.path.join(folder, f"ready-{os.getpid()}.json")
        with open(f"{self.ready}.new", "w") as f:
            json.dump(about, f)
        os.replace(f"{self.ready}.new", self.ready)

    def open(self):
        name = f"steps-{os.getpid()}-{self.number:05d}.log"
        return os.open(os.path.join(self.folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def write(self, pieces):
        if self.failed:
            return
        try:
            if self.size > FILE_BYTES:
                os.close(self.file)
                self.number, self.size = self.number + 1, 0
                self.file = self.open()
            for piece in pieces:
                view = memoryview(piece)
                while len(view):
                    written = os.write(self.file, view)
                    view, self.size = view[written:], self.size + written
        except OSError as e:
            self.failed = True
            print(
                f"eyas-vllm: states are no longer kept: {e.strerror} ({self.folder})",
                file=sys.stderr,
                flush=True,
            )
            with contextlib.suppress(OSError):
                os.unlink(self.ready)
