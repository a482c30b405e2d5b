"""Between the worker and a request: order, few wakings of the loop, errors after what came before them, clients that are gone
or do not read."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from dspine.common.serving.channel import Channel, ClientGone
from dspine.common.serving.errors import ApiError
from dspine.common.serving.http import EventStream
from dspine.common.serving.jobs import Update

LAST = Update(finish_reason="stop")


async def connected():
    """`receive` of a client that stays."""
    await asyncio.Event().wait()


async def left():
    """`receive` of a client that is gone."""
    return {"type": "http.disconnect"}


def news(number):
    return Update(drafted=number)


def from_thread(work):
    """Run `work` on a thread of its own, as the worker would."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


async def collect(channel, receive=connected):
    return [batch async for batch in channel.updates(receive)]


def counted(channel):
    """Counts the wakings that the channel asks the loop for."""
    calls = []
    loop = channel._loop

    class Loop:
        def call_soon_threadsafe(self, callback, *args):
            calls.append(callback)
            return loop.call_soon_threadsafe(callback, *args)

        def __getattr__(self, name):
            return getattr(loop, name)

    channel._loop = Loop()
    return calls


def test_updates_of_one_look_come_together_and_in_order():
    async def main():
        channel = Channel()
        sinks, calls = [channel.sink(index) for index in range(2)], counted(channel)
        told = [(i % 2, news(i)) for i in range(6)] + [(0, LAST), (1, LAST)]
        from_thread(lambda: [sinks[index](update) for index, update in told])
        assert await collect(channel) == [told] and len(calls) == 1

    asyncio.run(main())


def test_a_stream_hears_of_every_round():
    async def main():
        channel = Channel()
        sink, calls = channel.sink(0), counted(channel)
        reading = asyncio.ensure_future(collect(channel))
        told = [news(0), news(1), LAST]
        for update in told:
            sink(update)
            await asyncio.sleep(0.01)
        assert await reading == [[(0, update)] for update in told] and len(calls) == 3

    asyncio.run(main())


def test_a_whole_answer_wakes_the_loop_rarely():
    async def main():
        channel = Channel(whole=True)
        sink, calls = channel.sink(0), counted(channel)
        reading = asyncio.ensure_future(collect(channel))
        told = [*map(news, range(70)), LAST]
        for update in told:
            sink(update)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        found = await reading
        assert [update for batch in found for _, update in batch] == told and len(calls) == 3
        assert max(map(len, found)) <= 32  # other requests have their turn in between

    asyncio.run(main())


@pytest.mark.parametrize("whole", [False, True])
def test_an_error_comes_after_what_was_before_it(whole):
    async def main():
        channel = Channel(whole)
        sinks = [channel.sink(index) for index in range(2)]
        sinks[0](news(1))
        sinks[1](Update(error=ApiError("broken", status=500)))
        sinks[0](news(2))
        updates = channel.updates(connected)
        assert await anext(updates) == [(0, news(1))]
        with pytest.raises(ApiError, match="broken"):
            await anext(updates)

    asyncio.run(main())


@pytest.mark.parametrize("before", [0, 1])
def test_a_client_that_is_gone(before):
    async def main():
        channel, gone = Channel(), asyncio.Event()

        async def receive():
            await gone.wait()
            return await left()

        sink = channel.sink(0)
        reading = asyncio.ensure_future(collect(channel, receive))
        for number in range(before):
            sink(news(number))
        await asyncio.sleep(0.01)
        gone.set()
        with pytest.raises(ClientGone):
            await asyncio.wait_for(reading, 5)
        sink(LAST)  # the worker may not know yet
        await asyncio.sleep(0)

    asyncio.run(main())


async def sent(events, send, timeout=5.0):
    """Run an `EventStream`; its scope."""
    scope = {"dspine": {}}
    await EventStream(events, timeout)(scope, connected, send)
    return scope["dspine"]


async def batches(closed, error=None):
    try:
        yield [{"a": "ü"}, {"b": 1}]
        yield [{"c": None}]
        if error is not None:
            raise error
    finally:
        closed.append(True)


@pytest.mark.parametrize("error", [None, ApiError("broken", status=500)])
def test_objects_of_one_list_are_one_write(error):
    async def main():
        messages, closed = [], []

        async def send(message):
            messages.append(message)

        assert await sent(batches(closed, error), send) == {} and closed
        bodies = [message["body"].decode() for message in messages[1:]]
        assert bodies[:2] == ['data: {"a":"ü"}\n\ndata: {"b":1}\n\n', 'data: {"c":null}\n\n'] and len(bodies) == 3
        *failed, done, end = bodies[2].split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        assert [json.loads(event[6:])["error"]["message"] for event in failed] == (["broken"] if error else [])
        assert [message["more_body"] for message in messages[1:]] == [True, True, False]

    asyncio.run(main())


def test_a_client_that_does_not_read_is_dropped_and_a_slow_model_is_not():
    async def main():
        closed = []

        async def stuck(message):
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        assert await asyncio.wait_for(sent(batches(closed), stuck, timeout=0.05), 5) == {"gone": "TimeoutError"} and closed

        async def slow():
            await asyncio.sleep(0.2)  # several times the patience with a write
            yield [{"a": 1}]

        written = []

        async def send(message):
            written.append(message.get("body"))

        assert await sent(slow(), send, timeout=0.05) == {} and written[1] == b'data: {"a":1}\n\n'

    asyncio.run(main())
