"""generate/client.py against a server that misbehaves: the right outcome for each fault."""

import asyncio
import time
from dataclasses import replace

import pytest
from aiohttp import web

from eyas.errors import ContractError, RequestError, SurroundingsError
from eyas.generate import client
from eyas.generate.client import Endpoint, Patience, Pool
from tests.conftest import byte_tokenizer
from tests.servers.stub import Stub

QUICK = Patience(
    connect_s=1, answer_s=5, ping_s=0.3, pong_s=0.3, tries=4, wait_s=0.02, longest_s=0.1, give_up_s=1.5
)
CHAT = "/v1/chat/completions"


def body(i):
    return {"messages": [{"role": "user", "content": f"question {i}"}], "max_tokens": 100}


def ask(stubs, count, patience=QUICK, at_once=8):
    """Answers or errors of `count` requests, and the pool."""

    async def work():
        async with Pool([Endpoint(s.url, "stub") for s in stubs], patience) as pool:
            gate = asyncio.Semaphore(at_once)

            async def one(i):
                async with gate:
                    return await pool.ask(CHAT, lambda number: body(i))

            return await asyncio.gather(*(one(i) for i in range(count)), return_exceptions=True), pool

    return asyncio.run(work())


def well(found):
    return all(not isinstance(f, BaseException) and f.ids and f.finish_reason == "stop" for f in found)


@pytest.mark.parametrize("fault", ["slow", "429", "503", "half", "reset", "html", "list", "500"])
def test_what_passes_is_asked_again_and_answered(fault):
    """Every prompt meets the fault once."""
    with Stub(byte_tokenizer(), lambda r: fault if r.times == 0 else "well") as stub:
        found, pool = ask([stub], 20)
    assert well(found), found
    assert fault == "slow" or sum(pool.retries.values()) >= 20


def test_a_storm_is_waited_out_as_long_as_the_server_says():
    with Stub(byte_tokenizer(), lambda r: "429" if r.number < 60 else "well") as stub:
        found, pool = ask([stub], 20, replace(QUICK, give_up_s=20))
    assert well(found), "that a server is full is no request's fault, however often"
    assert [k for k in pool.retries if "429" in k]


def test_a_server_that_is_down_for_a_while_costs_nothing():
    """Nobody answers at first; nothing is given up."""
    with Stub(byte_tokenizer()) as there:
        url = there.url
    port = int(url.rsplit(":", 1)[1])

    async def work():
        async with Pool([Endpoint(url, "stub")], replace(QUICK, give_up_s=20)) as pool:
            asked = [asyncio.create_task(pool.ask(CHAT, lambda number, i=i: body(i))) for i in range(8)]
            await asyncio.sleep(0.6)
            stub = Stub(byte_tokenizer())
            app = web.Application()
            app.router.add_post(CHAT, stub._chat)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            found = await asyncio.gather(*asked)
            await runner.cleanup()
            return found

    assert well(asyncio.run(work()))


def test_two_servers_share_the_work_and_one_that_fails_is_set_aside(capsys):
    with Stub(byte_tokenizer()) as good, Stub(byte_tokenizer(), lambda r: "reset") as bad:
        found, _ = ask([bad, good], 40)
        assert well(found)
        assert bad.count < 20 < good.count
    assert "set aside for a while" in capsys.readouterr().err
    with Stub(byte_tokenizer(), lambda r: "slow") as one, Stub(byte_tokenizer(), lambda r: "slow") as two:
        found, _ = ask([one, two], 40)
        assert well(found) and abs(one.count - two.count) <= 4


def test_a_dead_server_is_tried_again_later():
    """It fails its first four requests and is well afterwards: it gets work again."""
    with (
        Stub(byte_tokenizer(), lambda r: "reset" if r.number < 4 else "slow") as ill,
        Stub(byte_tokenizer(), lambda r: "slow") as good,
    ):
        found, _ = ask([ill, good], 100)
        assert well(found) and ill.count > 20


def test_a_server_that_hangs_loses_its_requests_to_the_others():
    with Stub(byte_tokenizer(), lambda r: "hang") as hung, Stub(byte_tokenizer()) as good:
        began = time.monotonic()
        found, pool = ask([hung, good], 12)
        assert well(found) and time.monotonic() - began < 60
        assert hung.count and any("ping" in why for why in pool.retries)


def test_a_server_that_answers_pings_and_nothing_else_is_left_in_the_end():
    with Stub(byte_tokenizer(), lambda r: "hang alone") as stub:
        found, _ = ask([stub], 3, Patience(answer_s=0.5, ping_s=0.2, pong_s=0.2, wait_s=0.02, longest_s=0.1, give_up_s=1.0))  # fmt: skip
    assert all(isinstance(f, SurroundingsError) and "no answer within" in str(f) for f in found)


@pytest.mark.parametrize("fault", ["reset", "429", "hang"])
def test_when_nobody_answers_any_more_everything_stops_and_says_so(fault):
    with Stub(byte_tokenizer(), lambda r: fault) as stub:
        found, _ = ask([stub], 6)
        assert all(isinstance(f, SurroundingsError) for f in found)
        assert stub.url in str(found[0]) and "same command again" in str(found[0])


def test_one_request_that_never_works_is_given_up_alone():
    """A prompt that the server cannot stomach: others before, beside and after it are answered."""
    poison = lambda r: "500" if "question 7" in r.body["messages"][0]["content"] else "well"  # noqa: E731
    with Stub(byte_tokenizer(), poison) as stub:
        found, _ = ask([stub], 20)
    bad = [f for f in found if isinstance(f, BaseException)]
    assert len(bad) == 1 and isinstance(bad[0], RequestError) and "words of 500" in str(bad[0])


def test_a_server_that_fails_every_request_stops_everything():
    with Stub(byte_tokenizer(), lambda r: "500") as stub:
        found, _ = ask([stub], 20, replace(QUICK, give_up_s=60))
    assert any(isinstance(f, SurroundingsError) and "in a row" in str(f) for f in found)


@pytest.mark.parametrize(
    "fault, kind, said",
    [
        ("400", RequestError, "words of 400"),
        ("401", SurroundingsError, "EYAS_API_KEY"),
        ("other", ContractError, 'answers as "another"'),
    ],
)
def test_what_no_second_try_mends_is_not_tried_again(fault, kind, said):
    with Stub(byte_tokenizer(), lambda r: fault) as stub:
        found, _ = ask([stub], 1)
        assert isinstance(found[0], kind) and said in str(found[0]) and stub.count == 1


def test_an_answer_without_end_is_cut_off(monkeypatch):
    monkeypatch.setattr(client, "LARGEST", 2**20)
    with Stub(byte_tokenizer(), lambda r: "huge") as stub:
        found, _ = ask([stub], 1)
    assert isinstance(found[0], RequestError) and "more than 1 MiB" in str(found[0])


@pytest.mark.parametrize(
    "value, seconds",
    [
        ("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("99999", 3600.0), ("nan", None), ("", None), (None, None), ("soon", None),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 40.0), ("Thu, 01 Jan 1970 00:00:10 GMT", 0.0),
    ],
)  # fmt: skip
def test_retry_after_as_number_and_as_date(value, seconds):
    assert client.retry_after(value, 60.0) == seconds
