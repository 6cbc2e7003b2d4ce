"""Ask llama.cpp (through the xllamacpp package) for the ids of a tokenizer's reference and print where it disagrees.

Two tokenizers written apart that agree on 2,000 hostile strings are worth more than one. Needs an environment with
xllamacpp and the GGUF file:

    python tests/reference/check_llamacpp.py SmolLM2-135M-Instruct.Q4_1.gguf smollm2_tokenizer.json.gz
"""

import gzip
import json
import sys
import urllib.request
from pathlib import Path

import xllamacpp

FOLDER = Path(__file__).parent


def ids(address: str, text: str, *, special: bool) -> list[int]:
    """The ids llama.cpp's server gives for a text."""
    body = json.dumps({"content": text, "add_special": False, "parse_special": special}).encode()
    request = urllib.request.Request(f"{address}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        found: list[int] = json.load(answer)["tokens"]
    return found


def main(path: str, name: str) -> None:
    """Compare every text, with special tokens recognised and without."""
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.port = 256, 1, 0
    server = xllamacpp.Server(params)
    reference = json.loads(gzip.decompress((FOLDER / name).read_bytes()))
    different = 0
    for index, (text, special) in enumerate(zip(reference["texts"], reference["ids"], strict=True)):
        plain = reference["plain"].get(str(index), special)
        for expected, parse in ((special, True), (plain, False)):
            found = ids(server.listening_address, text, special=parse)
            if found != expected:
                different += 1
                print(repr(text), "special" if parse else "plain", found, expected)
    print(f"{different} of {2 * len(reference['texts'])} differ")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
