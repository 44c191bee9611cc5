"""What a fake vLLM runs as vllm.entrypoints.openai.api_server. FAKE says how it behaves; FAKE_REAL=1 makes it answer with the
target and the drafter themselves, through the embedded engine, so that acceptance and outputs are true."""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--model")
parser.add_argument("--served-model-name", nargs="+")
parser.add_argument("--speculative-config", type=json.loads, default={})
parser.add_argument("--kv-transfer-config", type=json.loads, default={})
a, _ = parser.parse_known_args()
kind = os.environ.get("FAKE", "ok")
after = int(os.environ.get("FAKE_AFTER", "0"))  # requests, from which on it misbehaves
connects = a.speculative_config.get("method") == "extract_hidden_states"
k = 0 if connects else a.speculative_config.get("num_speculative_tokens", 0)
print("INFO Starting to load model x", flush=True)
if kind == "dies":
    print("ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB", flush=True)
    sys.exit(1)
if kind == "mumbles":
    print("something nobody has seen before", flush=True)
    sys.exit(3)
if kind == "silent":
    time.sleep(600)
if kind == "stubborn":  # a worker that ignores SIGTERM, as a hung one does
    subprocess.Popen(
        [sys.executable, "-c", "import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
    )
if kind == "titled":
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], env={})
names = ["another"] if kind == "stranger" else a.served_model_name
lock = threading.Lock()
count = {"requests": 0, "generated": 0, "prompts": 0, "drafts": 0, "accepted": [0] * k}
STEP_S = 0.004 if k else 0.003


class Hashed:
    """Answers that depend on the prompt alone: some ids, in steps of one, or of up to k + 1."""

    def render(self, messages):
        text = json.dumps(messages) + ("!" if kind == "other template" else "")
        return [4 + b % 200 for b in text.encode()][-60:]

    def answer(self, prompt, tokens, temperature):
        seed = hashlib.sha256(bytes(t % 256 for t in prompt)).digest()
        ids = [4 + seed[i % 32] % 200 for i in range(tokens)]
        if kind == "changed" and k and tokens > 3:
            ids[3] = 204
        if kind == "noise" and k and temperature:
            ids = [250 + i % 5 for i in range(tokens)]
        sizes = [1]
        while sum(sizes) < tokens:
            sizes.append(min(1 + (seed[len(sizes) % 32] % (k + 1)), tokens - sum(sizes)))
        return ids, sizes, "length"

    def gap(self, ids):
        return 3.0

    def logprob(self, ids, i):
        """Noise is id 250 and above."""
        return -9.0 if ids[i] >= 250 else -1.0 - (ids[i] % 7) / 10

    def text(self, ids):
        return "".join(chr(60 + i % 60) for i in ids)


class Real:
    """The tiny target and its drafter."""

    def __init__(self):
        import torch

        from eyas import target
        from eyas.drafter import decode, disk
        from eyas.engines.hf import HFEngine

        torch.set_num_threads(1)
        self.target, self.decode = target.load(a.model), decode
        self.tokenizer = self.target.tokenizer()
        self.drafter = disk.read(Path(a.speculative_config["model"]), torch.float32, "cpu") if k else None
        layers = self.drafter.contract.aux_layers if k else [0, 1, 2]
        self.keeper = None
        if os.environ.get("EYAS_STATES_DIR"):
            self.keep(layers := json.loads(os.environ["EYAS_STATES_LAYERS"])[:-1])
        if connects:
            layers = a.speculative_config["draft_model_config"]["hf_config"][
                "eagle_aux_hidden_state_layer_ids"
            ][:-1]
        self.engine = HFEngine(self.target, "float32", "cpu", layers)
        self.sizes = []
        emit = decode._emit

        def counted(out, new, stop_ids, most):
            n = emit(out, new, stop_ids, most)
            self.sizes.append(n)
            return n

        decode._emit = counted

    def render(self, messages):
        return list(
            self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        )

    def answer(self, prompt, tokens, temperature):
        self.sizes = []
        embedding = self.engine.model.get_input_embeddings().weight
        got = self.decode.decode(self.engine, self.drafter, embedding, prompt, k, tokens, temperature, 1)
        return got.ids, self.sizes, got.finish_reason

    def keep(self, layers):
        """Through the plugin itself, which eyas has put on PYTHONPATH."""
        import eyas_vllm
        from vllm.fake_runner import Runner

        eyas_vllm.writes = lambda: True
        eyas_vllm.patch(Runner, (*layers, self.target.layers), os.environ["EYAS_STATES_DIR"])
        self.runner = Runner((*layers, self.target.layers), self.target.hidden, tokens=256)
        self.keeper = self.runner.eyas

    def step_through(self, row, ids, start):
        """The steps in which a server would have computed these ids: the prompt in two, then token by token, and, for every
        third request, all again in one, as after a preemption."""
        if self.keeper is None or row is None:
            return
        seen = self.engine.states([ids])
        aux, top1 = seen.aux_BTLD[0], seen.top1_BT[0]
        if kind == "moved states":
            aux = aux.roll(1, 0)
        shown = [5, *ids[1:]] if kind == "other ids" else ids
        self.runner.add(row, shown, aux, seen.last_BTD[0], top1, self.target.vocab, row)
        first = max(1, start // 2)
        steps = [(0, first), (first, start - first), *((i, 1) for i in range(start, len(ids)))]
        if count["requests"] % 3 == 2:
            steps.append((0, len(ids)))
        for position, n in steps:
            if n:
                self.runner.execute_model(self.runner.scheduled([(row, position, n)]))
        if kind == "full disk" and count["requests"] >= after:
            self.keeper.log.file = os.open("/dev/full", os.O_WRONLY)

    def connect(self, ids):
        """What vLLM's ExampleHiddenStatesConnector does: a file, written under a lock after the answer has been sent."""
        import fcntl

        import torch
        from safetensors.torch import save_file

        folder = Path(a.kv_transfer_config["kv_connector_extra_config"]["shared_storage_path"])
        path = folder / f"cmpl-{count['requests']}.safetensors"
        held = Path(f"{path}.lock").open("w")  # noqa: SIM115
        fcntl.flock(held, fcntl.LOCK_EX)
        seen = self.engine.states([ids])
        together = torch.cat([seen.aux_BTLD[0], seen.last_BTD[0][:, None]], 1).contiguous()
        shown = [5, *ids[1:]] if kind == "other ids" else ids

        def write():
            time.sleep(0.2)
            save_file({"hidden_states": together, "token_ids": torch.tensor(shown)}, path)
            held.close()

        threading.Thread(target=write).start()
        return {"kv_transfer_params": {"hidden_states_path": str(path)}}

    def logprob(self, ids, i):
        import torch

        if i == 1:
            logits = self.engine._forward(torch.tensor([ids]), use_cache=False)[0]
            self.known = logits.log_softmax(-1)
        return float(self.known[i - 1, ids[i]])

    def gap(self, ids):
        return float(self.engine.states([ids]).gap_BT[0, -1])

    def text(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True)


model = Real() if os.environ.get("FAKE_REAL") else Hashed()


def counters():
    rows = [
        ("generation_tokens_total", "", count["generated"]), ("prompt_tokens_total", "", count["prompts"]),
        ("request_success_total", 'finished_reason="length",', count["requests"]), ("prefix_cache_hits_total", "", 0),
    ]  # fmt: skip
    if k:
        rows += [
            ("spec_decode_num_drafts_total", "", count["drafts"]),
            ("spec_decode_num_draft_tokens_total", "", k * count["drafts"]),
            ("spec_decode_num_accepted_tokens_total", "", sum(count["accepted"])),
            *(
                ("spec_decode_num_accepted_tokens_per_pos_total", f'position="{i}",', n)
                for i, n in enumerate(count["accepted"])
            ),
        ]
    return "# HELP some words\n" + "".join(
        f'vllm:{name}{{{labels}engine="0"}} {float(value)}\n' for name, labels, value in rows
    )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def send(self, body, status=200, kind_="application/json"):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind_)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/metrics":
            return (
                self.send(counters(), kind_="text/plain") if kind != "no counters" else self.send("no", 404)
            )
        return self.send({"data": [{"id": n, "max_model_len": 250} for n in names]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] not in names:
            return self.send({"error": {"message": f"The model `{body['model']}` does not exist."}}, 404)
        chat = self.path.endswith("chat/completions")
        if "tools" in body:
            return self.send({"error": {"message": "tool_choice requires --tool-call-parser to be set"}}, 400)
        if "response_format" in body:
            text = '{"name": "Ada", "age": 36}' if kind != "breaks schema" or not k else "{}}"
            return self.send(
                {
                    "choices": [{"message": {"content": text}, "finish_reason": "stop"}],
                    "usage": {"completion_tokens": 9},
                }
            )
        with lock:
            prompt = model.render(body["messages"]) if chat else body["prompt"]
            ids, sizes, finish = model.answer(prompt, body["max_tokens"], body.get("temperature", 1.0))
            count["requests"] += 1
            number = count["requests"]
            row = body.get("vllm_xargs", {}).get("eyas_row")
            if isinstance(model, Real) and row:
                model.step_through(row, [*prompt, *ids[:-1]], len(prompt))
            extra = model.connect(prompt) if connects and isinstance(model, Real) else {}
            count["generated"] += len(ids) + (5 if kind == "foreign" else 0)
            count["prompts"] += len(prompt)
            count["drafts"] += len(sizes) - 1
            for i in range(k):
                count["accepted"][i] += sum(n > i + 1 for n in sizes[1:])
        bad = after and number > after
        if bad and kind == "dies later":
            print("ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if "prompt_logprobs" in body:
            known = [
                None,
                *({str(t): {"logprob": model.logprob(prompt, i)}} for i, t in enumerate(prompt) if i),
            ]
            choice = {"text": "x", "finish_reason": "length", "prompt_logprobs": known}
            return self.send({"choices": [choice], "usage": {"completion_tokens": 1}})
        if body.get("logprobs"):
            gap = model.gap(prompt)
            choice = {
                "text": "x",
                "logprobs": {"top_logprobs": [{"x": -0.1, "y": -0.1 - gap}]},
                "finish_reason": "length",
            }
            return self.send({"choices": [choice], "usage": {"completion_tokens": 1}})
        with_ids = {"prompt_token_ids": prompt} if kind != "no ids" else {}
        if not body.get("stream"):
            message = {"content": model.text(ids), "reasoning": None} if chat else {}
            choice = {"message": message, "text": model.text(ids), "finish_reason": finish, **with_ids}
            if with_ids:
                choice["token_ids"] = ids
            usage = {"usage": {"completion_tokens": len(ids)}}
            return self.send({"choices": [choice], **usage, **with_ids, **extra})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        at = 0
        self.event(
            {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}], **with_ids}
        )
        for i, size in enumerate(sizes):
            time.sleep(3.0 if bad and kind == "crawls" else STEP_S)
            if bad and kind == "breaks" and i == 2:
                self.close_connection = True
                return None
            part, at = ids[at : at + size], at + size
            last = i == len(sizes) - 1
            choice = {
                "delta": {"content": model.text(part)},
                "text": model.text(part),
                "finish_reason": finish if last else None,
            }
            self.event({"choices": [choice | ({"token_ids": part} if with_ids else {})]})
        self.event({"choices": [], "usage": {"completion_tokens": len(ids)}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True
        return None

    def event(self, value):
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *_):
        pass


print("INFO Application startup complete", flush=True)
ThreadingHTTPServer((a.host, a.port), Handler).serve_forever()
