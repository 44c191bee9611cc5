"""A server that answers as a target would, and misbehaves on purpose: what becomes of each request is decided by a function.

with Stub(tokenizer, behave=lambda request: "429" if request.number < 5 else "well") as stub: ... stub.url

well      the prompt's ids, an answer that depends on the prompt alone, and its ids
slow      the same after 50 ms              late        the same after 2 s
429 503   with Retry-After                  500 400 401 with words
half      the first half of the answer      reset       the connection is cut at once
html      something that is not JSON        list        JSON that is no answer
huge      an answer without end             hang        nothing, for ever; pings too while anything hangs (hang alone: they are answered)
other     the name of another model         strange     ids that do not spell the text
text      no ids, and a count of tokens     miscounted  no ids, and a wrong count
"""

import asyncio
import hashlib
import json
import threading
from collections import Counter
from typing import NamedTuple

from aiohttp import web

from tests.conftest import END, WORDS


class Request(NamedTuple):
    number: int  # from 0, in the order of arrival
    body: dict
    times: int  # that this prompt was asked before


class Stub:
    def __init__(
        self, tokenizer, behave=lambda request: "well", answer=None, words=12, prepared=None, longest=250
    ):
        self.tokenizer, self.behave, self.words = tokenizer, behave, words
        self.special = answer  # body -> a message and ids of one's own, or None
        self.asked, self.count, self.hanging = Counter(), 0, False
        self.longest = longest
        self.prepared = prepared  # bytes that are always answered, for speed
        self.bodies = []

    def __enter__(self):
        started = threading.Event()
        self.thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self.thread.start()
        started.wait(10)
        return self

    def __exit__(self, *about):
        self.loop.call_soon_threadsafe(self.over.set)
        self.thread.join(10)

    def _serve(self, started):
        async def main():
            self.loop, self.over = asyncio.get_running_loop(), asyncio.Event()
            app = web.Application(client_max_size=2**26)
            app.router.add_get("/v1/models", self._models)
            app.router.add_post("/v1/chat/completions", self._chat)
            app.router.add_post("/v1/completions", self._complete)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
            started.set()
            await self.over.wait()
            await runner.cleanup()

        asyncio.run(main())

    async def _models(self, request):
        if self.hanging:
            await asyncio.sleep(600)
        return web.json_response({"data": [{"id": "stub", "max_model_len": self.longest}]})

    async def _complete(self, request):
        """Only the ranks of a prompt's ids."""
        body = await request.json()
        if "prompt_logprobs" not in body:
            return web.json_response({"error": {"message": "no completions here"}}, status=400)
        known = [None, *({str(t): {"rank": 1, "logprob": -0.1}} for t in body["prompt"][1:])]
        return web.json_response(
            {"choices": [{"text": "x", "finish_reason": "length", "prompt_logprobs": known}]}
        )

    def render(self, body):
        return list(
            self.tokenizer.apply_chat_template(
                body["messages"], tools=body.get("tools"), add_generation_prompt=True, return_dict=True,
                **body.get("chat_template_kwargs", {}),
            )["input_ids"]
        )  # fmt: skip

    def reply(self, body):
        prompt = self.render(body)
        own = self.special(body) if self.special else None
        if own is None:
            seed = hashlib.sha256(bytes(t % 256 for t in prompt)).digest()
            text = " ".join(WORDS[b % len(WORDS)] for b in seed[: 1 + seed[0] % self.words])
            ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], END]
            message, finish = {"content": text}, "stop"
        else:
            message, ids, finish = own
        if len(ids) > body["max_tokens"]:
            ids, finish = ids[: body["max_tokens"]], "length"
            message = message | {"content": self.tokenizer.decode(ids, skip_special_tokens=True)}
        return {
            "model": body["model"], "prompt_token_ids": prompt,
            "choices": [{"message": {"role": "assistant", **message}, "token_ids": ids, "finish_reason": finish}],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
        }  # fmt: skip

    async def _chat(self, request):
        if self.prepared:
            await request.read()
            return web.Response(body=self.prepared, content_type="application/json")
        body = await request.json()
        key = json.dumps(body["messages"])
        asked = Request(self.count, body, self.asked[key])
        self.count, self.asked[key] = self.count + 1, self.asked[key] + 1
        self.bodies.append(body)
        how = self.behave(asked)
        if how in ("slow", "late"):
            await asyncio.sleep(0.05 if how == "slow" else 2)
        elif how in ("429", "503"):
            return web.json_response(
                {"error": {"message": "full"}}, status=int(how), headers={"Retry-After": "0.05"}
            )
        elif how in ("500", "400", "401"):
            return web.json_response({"error": {"message": f"words of {how}"}}, status=int(how))
        elif how == "reset":
            request.transport.abort()
            return web.Response()
        elif how == "html":
            return web.Response(text="<html>gateway</html>")
        elif how == "list":
            return web.json_response([1, 2])
        elif how in ("hang", "hang alone"):
            self.hanging = how == "hang"
            try:
                await asyncio.sleep(600)
            finally:
                self.hanging = False
        made = self.reply(body)
        if how == "other":
            made["model"] = "another"
        elif how == "strange":
            made["choices"][0]["token_ids"] = [4 + (t + 7) % 200 for t in made["choices"][0]["token_ids"]]
        elif how in ("text", "miscounted"):
            del made["prompt_token_ids"], made["choices"][0]["token_ids"]
            made["usage"]["completion_tokens"] += how == "miscounted"
        if how in ("half", "huge"):
            data = json.dumps(made).encode()
            response = web.StreamResponse(headers={"Content-Length": str(len(data))} if how == "half" else {})
            await response.prepare(request)
            if how == "half":
                await response.write(data[: len(data) // 2])
                request.transport.abort()
            else:
                while request.transport and not request.transport.is_closing():
                    await response.write(b" " * 65536)
            return response
        return web.json_response(made)
