"""Streams a chat completion, with the time to its first token and its speed as marks.

    OPENAI_BASE_URL=http://localhost:8000/v1 python inference_llm_stream.py

The address and the key may stand in a `.env` file. Any server that speaks OpenAI's API will do.
"""

from collections.abc import Iterator

from openai import OpenAI

import cirron as ci


@ci.inference
def answer(client: OpenAI, prompt: str) -> Iterator[str]:
    chunks = client.chat.completions.create(
        model=ci.env("MODEL", "small"),
        messages=[{"role": "user", "content": prompt}],
        stream=True,
    )
    for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            yield chunk.choices[0].delta.content


def main() -> None:
    ci.profile(output="none")
    client = OpenAI(
        base_url=ci.env("OPENAI_BASE_URL", "http://localhost:8000/v1"),
        api_key=ci.env("OPENAI_API_KEY", "none"),
    )
    for text in answer(client, "Say hello"):
        print(text, end="", flush=True)
    print()
    ci.trace()


if __name__ == "__main__":
    main()
