"""Talk to a server started by ``examples/serve.sh``: a completion, a chat, a stream.

python examples/client.py [--url http://127.0.0.1:8000/v1]
"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="dsv4")
    parser.add_argument("--max-tokens", type=int, default=16)
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key="none")

    completion = client.completions.create(
        model=args.model, prompt="The tide was out, and", max_tokens=args.max_tokens, temperature=0
    )
    print("completion:", repr(completion.choices[0].text))

    chat = client.chat.completions.create(
        model=args.model,
        messages=[{"role": "user", "content": "Name a lighthouse."}],
        max_tokens=args.max_tokens,
        temperature=0,
    )
    print("chat:", repr(chat.choices[0].message.content))

    stream = client.completions.create(
        model=args.model,
        prompt="The tide was out, and",
        max_tokens=args.max_tokens,
        temperature=0,
        stream=True,
    )
    print("stream:", repr("".join(chunk.choices[0].text for chunk in stream)))


if __name__ == "__main__":
    main()
