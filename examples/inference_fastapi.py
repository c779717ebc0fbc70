"""A FastAPI service whose requests are spans: one endpoint answers, the other streams.

uvicorn inference_fastapi:app      serves it
python inference_fastapi.py        calls it a few times and prints the tree
"""

import asyncio
from collections.abc import AsyncIterator

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

import cirron as ci

app = FastAPI()


@app.get("/classify")
@ci.inference
async def classify(text: str) -> dict[str, str]:
    with ci.scope("tokenize"):
        words = text.split()
    with ci.scope("forward"):
        await asyncio.sleep(0.002)
    return {"label": "long" if len(words) > 3 else "short"}


@app.get("/answer")
@ci.inference(config={"model": "echo-1"})
async def answer(prompt: str) -> StreamingResponse:
    async def words() -> AsyncIterator[str]:
        for word in prompt.split():
            await asyncio.sleep(0.002)
            yield word + " "

    return StreamingResponse(words())


def main() -> None:
    from fastapi.testclient import TestClient

    ci.profile(output="none")
    with TestClient(app) as client:
        print(client.get("/classify", params={"text": "a short text"}).json())
        print(client.get("/answer", params={"prompt": "one word after another"}).text)
    ci.trace()


if __name__ == "__main__":
    main()
