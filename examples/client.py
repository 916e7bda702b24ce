"""Talk to a server started by ``examples/serve.sh``: a completion, a chat, a stream.

python examples/client.py [--url http://127.0.0.1:8000/v1]

PORT chooses the port, as for the server. A checkpoint of ``vllm-dsv4 make-tiny`` has random
weights, and answers with random words.
"""

import argparse
import os
import sys

from openai import APIConnectionError, OpenAI


def main() -> None:
    parser = argparse.ArgumentParser()
    url = f"http://127.0.0.1:{os.environ.get('PORT', '8000')}/v1"
    parser.add_argument("--url", default=url)
    parser.add_argument("--model", default="dsv4")
    parser.add_argument("--max-tokens", type=int, default=16)
    args = parser.parse_args()
    try:
        talk(OpenAI(base_url=args.url, api_key="none"), args)
    except APIConnectionError:
        sys.exit(f"no server answers at {args.url}: start examples/serve.sh, or give --url")


def talk(client: OpenAI, args: argparse.Namespace) -> None:
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
